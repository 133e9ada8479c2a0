"""The model in training: Llama's shape and Hugging Face's arithmetic, weights of the layers stacked, compiled per token.

Everything but attention works on a flat [N, hidden] with N always the same, so that torch.compile sees one shape
whatever the length of the rows; attention itself is one call in between.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab: int = 10752
    hidden: int = 512
    inner: int = 576
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    theta: float = 1e9
    eps: float = 1e-5


NAMES = {
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "wg": "mlp.gate_proj",
    "wu": "mlp.up_proj",
    "wd": "mlp.down_proj",
    "n1": "input_layernorm",
    "n2": "post_attention_layernorm",
}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * y.to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def before(
    x: Tensor, n1: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, d: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """[N, hidden] to q [N, Hq, D], k and v [N, H, D], rotated."""
    y = rms(x, n1, eps)
    q, k, v = (F.linear(y, w.to(x.dtype)).unflatten(-1, (-1, d)) for w in (wq, wk, wv))
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def after(x: Tensor, a: Tensor, wo: Tensor, n2: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, eps: float) -> Tensor:
    """The attention's output [N, Hq * D] and the MLP added to x."""
    x = x + F.linear(a, wo.to(x.dtype))
    y = rms(x, n2, eps)
    y = F.silu(F.linear(y, wg.to(x.dtype))) * F.linear(y, wu.to(x.dtype))
    return x + F.linear(y, wd.to(x.dtype))


def head(x: Tensor, norm: Tensor, embed: Tensor, target: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Cross entropy and whether the likeliest token is right, for [K, hidden] and [K]."""
    logits = F.linear(rms(x, norm, eps), embed.to(x.dtype)).float()
    return F.cross_entropy(logits, target, reduction="none"), logits.argmax(-1) == target


class Llama(nn.Module):
    """Parameters stacked over layers; forward gives the last hidden states, flat."""

    def __init__(self, shape: Shape, compiled: bool) -> None:
        super().__init__()
        s = self.shape = shape
        width, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim

        def stack(rows: int, cols: int, std: float = 0.02) -> nn.Parameter:
            return nn.Parameter(torch.randn(s.layers, rows, cols) * std)

        small = 0.02 / (2 * s.layers) ** 0.5
        self.embed = nn.Parameter(torch.randn(s.vocab, s.hidden) * 0.02)
        self.wq, self.wk, self.wv = stack(width, s.hidden), stack(kv, s.hidden), stack(kv, s.hidden)
        self.wo = stack(s.hidden, width, small)
        self.wg, self.wu, self.wd = stack(s.inner, s.hidden), stack(s.inner, s.hidden), stack(s.hidden, s.inner, small)
        self.n1, self.n2 = nn.Parameter(torch.ones(s.layers, s.hidden)), nn.Parameter(torch.ones(s.layers, s.hidden))
        self.norm = nn.Parameter(torch.ones(s.hidden))
        self.before, self.after, self.head = before, after, head
        if compiled:
            self.before, self.after, self.head = (torch.compile(f, dynamic=False) for f in (before, after, head))
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.backend: dict[int, SDPBackend] = {}

    def table(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin [rows * length, 1, D] in bf16, as Hugging Face rounds them."""
        if (rows, length) not in self.tables:
            s = self.shape
            freq = 1.0 / (s.theta ** (torch.arange(0, s.head_dim, 2, dtype=torch.int64).float() / s.head_dim))
            angle = torch.outer(torch.arange(length).float(), freq)
            angle = torch.cat((angle, angle), -1).repeat(rows, 1)[:, None].to(self.embed.device)
            self.tables = {(rows, length): (angle.cos().bfloat16(), angle.sin().bfloat16())}
        return self.tables[rows, length]

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, L] to hidden states [B * L, hidden] before the last norm, in bf16."""
        s = self.shape
        b, n = ids.shape
        cos, sin = self.table(b, n)
        x = F.embedding(ids.flatten(), self.embed).bfloat16()
        layers = zip(*(getattr(self, w).unbind(0) for w in NAMES), strict=True)
        for wq, wk, wv, wo, wg, wu, wd, n1, n2 in layers:
            heads = self.before(x, n1, wq, wk, wv, cos, sin, s.head_dim, s.eps)
            q, k, v = (t.view(b, n, -1, s.head_dim).transpose(1, 2) for t in heads)
            a = self.attend(q, k, v).transpose(1, 2).reshape(b * n, -1)
            x = self.after(x, a, wo, n2, wg, wu, wd, s.eps)
        return x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n = q.shape[2]
        if not q.is_cuda:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        if n not in self.backend:
            self.backend[n] = fastest(q, k, v)
        return attention(q, k, v, self.backend[n])

    def hf_state(self) -> dict[str, Tensor]:
        """bf16 weights under Hugging Face's names."""
        out = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm}
        for mine, theirs in NAMES.items():
            for i, w in enumerate(getattr(self, mine).unbind(0)):
                out[f"model.layers.{i}.{theirs}.weight"] = w
        return {k: v.detach().bfloat16().contiguous().cpu() for k, v in out.items()}

    def load_hf(self, folder: Path) -> None:
        """Reads what save_shards wrote."""
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state |= load_file(file)
        with torch.no_grad():
            self.embed.copy_(state["model.embed_tokens.weight"])
            self.norm.copy_(state["model.norm.weight"])
            for mine, theirs in NAMES.items():
                for i in range(self.shape.layers):
                    getattr(self, mine)[i].copy_(state[f"model.layers.{i}.{theirs}.weight"])


def attention(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend) -> Tensor:
    g = q.shape[1] // k.shape[1]
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k.repeat_interleave(g, 1), v.repeat_interleave(g, 1), is_causal=True)


def fastest(q: Tensor, k: Tensor, v: Tensor) -> SDPBackend:
    """Times flash attention and cuDNN's, forward and backward, and prints both."""
    times: dict[SDPBackend, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with torch.enable_grad():
                x = [t.detach().clone().requires_grad_() for t in (q, k, v)]
                for i in range(4):
                    if i == 1:
                        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                        start.record()
                    attention(*x, backend).sum().backward()
                end.record()
                torch.cuda.synchronize()
            times[backend] = start.elapsed_time(end) / 3
        except RuntimeError as error:
            print(f"  {backend} does not run: {str(error)[:80]}", flush=True)
    print(f"  attention at {q.shape[2]}: " + ", ".join(f"{b.name} {t:.1f} ms" for b, t in times.items()), flush=True)
    return min(times, key=times.__getitem__)


def save_shards(state: dict[str, Tensor], folder: Path, most: int = 15_000_000) -> dict[str, str]:
    """Writes shards below `most` bytes and gives the weight map of their index."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > most:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += size
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    return weight_map
