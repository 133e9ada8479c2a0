"""Time linear layers of one token: kvthaw's kernel, cuBLAS and torch's compiler.

`--out kernels_linear.jsonl`. `--weights bf16,fp8,int4`: what the weights are, all by default; drawn codes for fp8 and int4, with
scales of rows and of groups of 128. bench "layers": us of a layer of the 8B shape without attention, in a graph of 8 layers with
weights of their own. Its ways: "separate" launches a kernel for each operation, as captured steps did before, products of int4 by
torch's; "linear" launches four; "compiled" is torch.compile of bf16, left out by --quick. `processes` is the number of GPUs that
share the layer, without their sums. bench "one": us of one kind of launch, for several divisions of the weights. bench "head": the
output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvthaw.errors import one_of
from kvthaw.kernels.gated import gated
from kvthaw.kernels.linear import blocks_of, definition, linear
from kvthaw.kernels.linear_parts import Blocks
from kvthaw.kernels.rms_norm import Norm, rms_norm
from kvthaw.kernels.weights import TILE, Float8Weight, Int4Weight, Weight, dense
from lab.kernels import agree, rates, replay_time
from lab.script import run_kernels

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 8, 4096, 14336, 32, 8, 128, 128256
GROUP = 128
DIVISIONS = {
    "bf16": {
        "qkv": [(2, 4096, 4, 4), (4, 4096, 2, 8), (1, 4096, 6, 4), (4, 2048, 4, 4)],
        "gate": [(1, 4096, 4, 4), (2, 4096, 2, 8), (2, 2048, 4, 4)],
        "o": [(2, 4096, 4, 4), (4, 4096, 2, 8), (4, 2048, 4, 4), (2, 2048, 8, 4), (8, 1024, 4, 4)],
        "down": [(2, 2048, 8, 4), (2, 2048, 4, 4), (2, 4096, 2, 8), (4, 2048, 4, 4), (4, 1024, 8, 4)],
    },
    "fp8": {
        "qkv": [(4, 4096, 4, 4), (2, 4096, 6, 4), (8, 4096, 2, 8), (4, 4096, 2, 8)],
        "gate": [(2, 4096, 4, 4), (1, 4096, 6, 4), (4, 4096, 2, 8), (2, 4096, 2, 8)],
        "o": [(4, 4096, 4, 4), (2, 4096, 6, 4), (2, 4096, 4, 4), (4, 4096, 2, 8)],
        "down": [(4, 16384, 1, 16), (2, 16384, 1, 16), (2, 16384, 2, 16), (2, 4096, 2, 8), (2, 8192, 2, 8)],
    },
    "int4": {
        "qkv": [(1, 4096, 1, 16), (2, 2048, 1, 16), (1, 2048, 1, 16), (1, 2048, 2, 8)],
        "gate": [(1, 4096, 1, 16), (1, 4096, 1, 8)],
        "o": [(1, 4096, 1, 16), (2, 2048, 1, 16), (1, 2048, 2, 8), (2, 4096, 1, 16)],
        "down": [(2, 2048, 1, 16), (1, 2048, 1, 16), (1, 2048, 1, 8), (2, 1024, 1, 8), (1, 4096, 1, 16)],
    },
}  # fmt: skip


def drawn(kind: str, n: int, k: int, device: torch.device) -> Weight:
    """Return a weight of a kind, of numbers of about k^-0.5."""
    if kind == "bf16":
        return torch.randn(n, k, device=device, dtype=torch.bfloat16).mul_(k**-0.5)
    if kind == "fp8":
        scale = (torch.rand(n, device=device) + 0.5) * k**-0.5
        return Float8Weight(torch.randn(n, k, device=device).to(torch.float8_e4m3fn), scale)
    codes = torch.randint(-(1 << 31), 1 << 31, (n // 8, k // TILE, 32, 4), dtype=torch.int32, device=device)
    scales = torch.randn(k // GROUP, n, 2, device=device) * torch.tensor([0.2, 0.5], device=device) * k**-0.5
    return Int4Weight(codes, scales.bfloat16(), GROUP, torch.Size((n, k)))


def product(x: Tensor, weight: Weight) -> Tensor:
    """Return x W' by torch's own kernels."""
    if isinstance(weight, Int4Weight):
        return torch.ops.aten._weight_int4pack_mm(x, weight.codes, weight.group, weight.scales)  # type: ignore[no-any-return]
    return F.linear(x, dense(weight, x.dtype))


@dataclass(slots=True)
class Layer:
    """Weights of a decoder layer, or of the part that one of several processes has."""

    before: Norm
    after: Norm
    qkv: list[Weight]
    o: Weight
    gate: list[Weight]
    down: Weight

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in (*self.qkv, self.o, *self.gate, self.down))


def layer(device: torch.device, processes: int, kind: str) -> Layer:
    def weight(n: int, k: int) -> Weight:
        return drawn(kind, n, k, device)

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
        query, key, value = (product(x, weight) for weight in one.qkv)
        found += key, value
        hidden = hidden + product(query, one.o)
        x = norm(hidden, one.after)
        hidden = hidden + product(gate(*(product(x, weight) for weight in one.gate)), one.down)
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


def lines(*, quick: bool, weights: str) -> Iterator[dict[str, Any]]:
    """Check and measure; a line a case."""
    for kind in weights.split(","):
        one_of(DIVISIONS, weights=kind)
        for line in of_kind(kind, quick=quick):
            yield {"weights": kind, **line}


def of_kind(kind: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Check and measure weights of a kind."""
    device = torch.device("cuda")
    hidden = torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16)
    head = [drawn(kind, VOCAB, HIDDEN, device)]
    heads: dict[str, Callable[[], Tensor]] = {"linear": lambda: linear(hidden, head, [None])[0]}
    if kind != "fp8":  # torch has no product of these for one token
        heads["separate"] = partial(product, hidden, head[0])
    expected = F.linear(hidden.float(), dense(head[0], torch.float32).float())
    for way, run in heads.items():
        error = agree(run(), expected, way)
        yield {"bench": "head", "way": way, "error": error, **rates(replay_time([run] * 4), head[0].nbytes)}
    for processes in (1, 2):
        layers = [layer(device, processes, kind) for _ in range(LAYERS)]
        found = separate([_wide(one) for one in layers], hidden.float(), rms_norm, _gate)
        ways: dict[str, Callable[[], list[Tensor]]] = {"linear": partial(joined, layers, hidden, linear)}
        if kind != "fp8":
            ways["separate"] = partial(separate, layers, hidden, rms_norm, partial(gated, activation="silu"))
        if kind == "bf16" and not quick:
            plain = torch.compile(separate, mode="max-autotune-no-cudagraphs", dynamic=False)
            ways["compiled"] = partial(plain, layers, hidden, _norm, _gate)
        for way, call in ways.items():
            error = max(agree(a, b, way, 3e-2) for a, b in zip(call(), found, strict=True))
            seconds = replay_time([call]) / LAYERS
            size = layers[0].nbytes
            yield {"bench": "layers", "processes": processes, "way": way, "error": error, **rates(seconds, size)}
        if not quick:
            for launch, divisions in DIVISIONS[kind].items():
                for division in divisions:
                    yield one(launch, layers, hidden, processes, Blocks(*division))
        del layers


def one(kind: str, layers: Sequence[Layer], hidden: Tensor, processes: int, how: Blocks) -> dict[str, Any]:
    """Measure one kind of launch, each of another layer's weights."""
    calls, size = list[Callable[[], list[Tensor]]](), 0
    for at in layers:
        given: dict[str, Any]
        weights: list[Weight]
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
    used = how == blocks_of(weights[0], gated=kind == "gate")
    seconds = replay_time(calls)
    return {"bench": "one", "kind": kind, "processes": processes, **told, "used": used, "error": error, **rates(seconds, size)}


def _wide(one: Layer) -> Layer:
    def norm(of: Norm) -> Norm:
        return Norm(of.weight.float(), of.eps)

    def wide(weights: list[Weight]) -> list[Weight]:
        return [dense(weight, torch.float32).float() for weight in weights]

    o, down = wide([one.o, one.down])
    return Layer(norm(one.before), norm(one.after), wide(one.qkv), o, wide(one.gate), down)


def _norm(x: Tensor, norm: Norm) -> Tensor:
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "linear", "hidden": HIDDEN, "inner": INNER}, weights=",".join(DIVISIONS))
