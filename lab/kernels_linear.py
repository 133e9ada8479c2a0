"""Time linear layers of one token: kvthaw's kernel, cuBLAS and torch's compiler.

`--out kernels_linear.jsonl`. bench "layers": us of a layer of the 8B shape without attention, in a graph of 8 layers with weights
of their own. Its ways: "separate" launches a kernel for each operation, as captured steps did before; "linear" launches four;
"compiled" is torch.compile, left out by --quick. `processes` is the number of GPUs that share the layer, without their sums. bench
"one": us of one kind of launch, for several divisions of the weights. bench "head": the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.kernels.gated import gated
from kvthaw.kernels.linear import Blocks, blocks_for, definition, linear
from kvthaw.kernels.rms_norm import Norm, rms_norm
from lab.kernels import agree, rates, replay_time
from lab.script import run_kernels

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 8, 4096, 14336, 32, 8, 128, 128256
DIVISIONS = {
    "qkv": [(2, 4096, 4, 4), (4, 4096, 2, 8), (1, 4096, 6, 4), (4, 2048, 4, 4)],
    "gate": [(1, 4096, 4, 4), (2, 4096, 2, 8), (2, 2048, 4, 4)],
    "o": [(2, 4096, 4, 4), (4, 4096, 2, 8), (4, 2048, 4, 4), (2, 2048, 8, 4), (8, 1024, 4, 4)],
    "down": [(2, 2048, 8, 4), (2, 2048, 4, 4), (2, 4096, 2, 8), (4, 2048, 4, 4), (4, 1024, 8, 4)],
}  # fmt: skip


@dataclass(slots=True)
class Layer:
    """Weights of a decoder layer, or of the part that one of several processes has."""

    before: Norm
    after: Norm
    qkv: list[Tensor]
    o: Tensor
    gate: list[Tensor]
    down: Tensor

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.qkv, self.o, *self.gate, self.down))


def layer(device: torch.device, processes: int) -> Layer:
    def weight(n: int, k: int) -> Tensor:
        return torch.randn(n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)

    def norm() -> Norm:
        return Norm(torch.rand(HIDDEN, device=device, dtype=torch.bfloat16).add_(0.5), 1e-5)

    inner, heads, kv = INNER // processes, HEADS // processes * DIM, KV_HEADS // processes * DIM
    qkv, gate = [weight(n, HIDDEN) for n in (heads, kv, kv)], [weight(inner, HIDDEN) for _ in range(2)]
    return Layer(norm(), norm(), qkv, weight(HIDDEN, heads), gate, weight(HIDDEN, inner))


def separate(layers: Sequence[Layer], hidden: Tensor, norm: Callable[..., Tensor], gate: Callable[..., Tensor]) -> list[Tensor]:
    """One operation after the other. The query is taken as attention's result. Returns keys, values and the hidden state."""
    found = list[Tensor]()
    for one in layers:
        x = norm(hidden, one.before)
        query, key, value = (F.linear(x, weight) for weight in one.qkv)
        found += key, value
        hidden = hidden + F.linear(query, one.o)
        x = norm(hidden, one.after)
        hidden = hidden + F.linear(gate(*(F.linear(x, weight) for weight in one.gate)), one.down)
    return [*found, hidden]


def joined(layers: Sequence[Layer], hidden: Tensor, run: Callable[..., list[Tensor]]) -> list[Tensor]:
    """As `separate`, by four launches a layer."""
    found = list[Tensor]()
    for one in layers:
        query, key, value = run(hidden, one.qkv, [None] * 3, norm=one.before)
        found += key, value
        (hidden,) = run(query, [one.o], [None], residual=hidden)
        (inner,) = run(hidden, one.gate, [None] * 2, norm=one.after, gate="silu")
        (hidden,) = run(inner, [one.down], [None], residual=hidden)
    return [*found, hidden]


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    device = torch.device("cuda")
    hidden = torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16)
    head = [torch.randn(VOCAB, HIDDEN, device=device, dtype=torch.bfloat16)]
    heads: dict[str, Callable[[], Tensor]] = {
        "separate": partial(F.linear, hidden, head[0]),
        "linear": lambda: linear(hidden, head, [None])[0],
    }
    for way, run in heads.items():
        error = agree(run(), F.linear(hidden.float(), head[0].float()), way)
        yield {"bench": "head", "way": way, "error": error, **rates(replay_time([run] * 4), head[0].nbytes)}
    for processes in (1, 2):
        layers = [layer(device, processes) for _ in range(LAYERS)]
        expected = separate([_wide(one) for one in layers], hidden.float(), rms_norm, _gate)
        ways: dict[str, Callable[[], list[Tensor]]] = {
            "separate": partial(separate, layers, hidden, rms_norm, partial(gated, activation="silu")),
            "linear": partial(joined, layers, hidden, linear),
        }
        if not quick:
            plain = torch.compile(separate, mode="max-autotune-no-cudagraphs", dynamic=False)
            ways["compiled"] = partial(plain, layers, hidden, _norm, _gate)
        for way, call in ways.items():
            error = max(agree(a, b, way, 3e-2) for a, b in zip(call(), expected, strict=True))
            seconds = replay_time([call]) / LAYERS
            size = layers[0].nbytes
            yield {"bench": "layers", "processes": processes, "way": way, "error": error, **rates(seconds, size)}
        if not quick:
            for kind, divisions in DIVISIONS.items():
                for division in divisions:
                    yield one(kind, layers, hidden, processes, Blocks(*division))
        del layers


def one(kind: str, layers: Sequence[Layer], hidden: Tensor, processes: int, how: Blocks) -> dict[str, Any]:
    """Measure one kind of launch, each of another layer's weights."""
    calls, size = list[Callable[[], list[Tensor]]](), 0
    for at in layers:
        given: dict[str, Any]
        if kind == "qkv":
            weights, given = at.qkv, {"norm": at.before}
        elif kind == "gate":
            weights, given = at.gate, {"norm": at.after, "gate": "silu"}
        else:
            weights, given = [at.o if kind == "o" else at.down], {"residual": hidden}
        x = torch.randn(1, weights[0].shape[1], device=hidden.device, dtype=hidden.dtype)
        x = hidden if "norm" in given else x
        biases: list[Tensor | None] = [None] * len(weights)
        calls.append(partial(linear, x, weights, biases, **given, blocks=how))
        size = sum(weight.nbytes for weight in weights)
    found, wanted = calls[-1](), definition(x, weights, biases, **given)
    error = max(agree(a, b, f"{kind} {how}", 2e-2) for a, b in zip(found, wanted, strict=True))
    told = {"rows": how.rows, "width": how.width, "programs": how.programs, "warps": how.warps}
    used = how == blocks_for(x.shape[1], gated=kind == "gate")
    seconds = replay_time(calls)
    return {"bench": "one", "kind": kind, "processes": processes, **told, "used": used, "error": error, **rates(seconds, size)}


def _wide(one: Layer) -> Layer:
    def norm(of: Norm) -> Norm:
        return Norm(of.weight.float(), of.eps)

    def wide(weights: list[Tensor]) -> list[Tensor]:
        return [weight.float() for weight in weights]

    return Layer(norm(one.before), norm(one.after), wide(one.qkv), one.o.float(), wide(one.gate), one.down.float())


def _norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "linear", "hidden": HIDDEN, "inner": INNER})
