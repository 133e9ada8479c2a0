"""Where the time until the first token goes: products, attention, what stands between them, and a prompt with and without kernels.

`--parts kernels,products,attention,prompts,profile,own`, in the order given, of all layers of the 8B shape or of `--layers`.

- kernels: norms, rotary positions and gates of a chunk, by the kernel and by transformers' operations. Outputs are compared.
- products: a chunk's projections apart, and as one product of joined weights where the input is the same, in TFLOP/s.
- attention: causal attention of `--tokens` and of chunks, and of a chunk to runs of earlier keys, by each backend of torch, and by
  FlashAttention 4 if it is installed.
- prompts: seconds until the first token of each method, in chunks and in one pass, with kernels and without, and by
  FlashAttention 4; the second of two.
- own: a chunk's causal part with its log-sum-exp, keys repeated for each query head, and once; last, for torch may not take it.
- profile: seconds of the device by part and kernel, of the first method in chunks, with kernels and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import is_flash_attn_4_available

from kvthaw.bench.decode import free
from kvthaw.bench.shapes import SHAPES
from kvthaw.engine.hf import fused
from kvthaw.engine.hf.attention import choose_flash_attention_4
from kvthaw.engine.hf.layer import FLASH_ATTENTION_4
from kvthaw.errors import CacheError
from kvthaw.evaluate.machine import where
from kvthaw.kernels import dense, flash_attention_4, gated, rms_norm, rotate
from lab.bench.prefill import PrefillSetting, measure
from lab.bench.shapes import build
from lab.kernels import DIM, GROUP, HEADS, SHAPE, eager_time, rates
from lab.one_pass import profiled
from lab.script import run_kernels

HIDDEN, INNER = (SHAPES["llama-3.1-8b"][name] for name in ("hidden_size", "intermediate_size"))
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def lines(*, quick: bool, parts: str, tokens: int, chunk: int, layers: int, methods: str) -> Iterator[dict[str, Any]]:
    """Measure; a line a case."""
    model = None
    for part in parts.split(","):
        free()
        if part in CHEAP:
            yield from CHEAP[part](tokens, chunk)
            continue
        with torch.inference_mode(False):  # as a program has its model
            model = model or build("llama-3.1-8b", where()[0], layers=layers)
            ways = [(True, FLASH_ATTENTION_4)] if choose_flash_attention_4(model) else []
            for fuses, attends in (*ways, (True, "sdpa"), (False, "sdpa")):
                model.set_attn_implementation(attends)
                how = {"fused": fuses, "attention": attends}
                with nullcontext() if fuses else patch.object(fused, "_on_gpu", lambda model: False):
                    if part == "profile":
                        yield profiled(model, methods.split(",")[0], tokens, chunk) | how
                        continue
                    for method in methods.split(","):
                        for size in (chunk,) if quick else (chunk, tokens):
                            yield prompt(model, method, tokens, size, layers) | how


def kernels(tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Time each kernel and its definition, and compare them."""
    x, weight = draw(chunk, HIDDEN), draw(HIDDEN)
    gate, up = draw(chunk, INNER), draw(chunk, INNER)
    query, key = (draw(1, chunk, heads, DIM).transpose(1, 2) for heads in (HEADS * GROUP, HEADS))
    turns = torch.randn(1, chunk, DIM // 2, device="cuda").repeat(1, 1, 2)
    angles = turns.cos().bfloat16(), turns.sin().bfloat16()
    cases: list[tuple[str, Any, tuple[Any, ...], int]] = [
        ("norm", rms_norm, (x, rms_norm.Norm(weight, 1e-5)), 2 * x.nbytes),
        ("gate", gated, (gate, up, "silu"), 3 * gate.nbytes),
        ("rotate", rotate, (query, key, *angles), 2 * (query.nbytes + key.nbytes) + 2 * angles[0].nbytes),
    ]
    for name, module, given, moved in cases:
        found, expected = module.launch(*given), module.definition(*given)
        pairs = [(found, expected)] if isinstance(found, Tensor) else list(zip(found, expected, strict=True))
        off = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
        if not off < 0.002:
            raise CacheError(f"the kernel of {name} is {off:.5f} of the norm off its definition")
        for how in ("launch", "definition"):
            seconds = eager_time(partial(getattr(module, how), *given), 20)
            yield {"op": name, "how": how, "tokens": chunk, "off": round(off, 6), **rates(seconds, moved)}


def products(tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Time a chunk's projections, apart and joined."""
    q, kv = HEADS * GROUP * DIM, HEADS * DIM
    sides = {"query, key, value": (HIDDEN, [q, kv, kv]), "gate, up": (HIDDEN, [INNER, INNER]), "output": (q, [HIDDEN])}
    for name, (inner, outs) in (sides | {"down": (INNER, [HIDDEN])}).items():
        x = draw(chunk, inner)
        apart = [draw(out, inner) for out in outs]
        ways: dict[str, list[Tensor]] = {"apart": apart} | ({"joined": [torch.cat(apart)]} if len(apart) > 1 else {})
        for how, weights in ways.items():
            seconds = eager_time(partial(_products, x, weights), 10)
            yield {"op": name, "how": how, "tokens": chunk, **speed(seconds, 2 * chunk * inner * sum(outs))}


def _products(x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        F.linear(x, weight)


def attention(tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Time causal attention, and a chunk's to runs of earlier keys, by each of torch's fast backends."""
    sizes = [(n, n, True) for n in dict.fromkeys((4096, chunk, tokens))]
    sizes += [(chunk, run, False) for run in (16384, 32768) if run < tokens]
    for queries, keys, causal in sizes:
        query, (key, value) = draw(1, HEADS * GROUP, queries, DIM), draw(2, 1, HEADS, keys, DIM)
        shape = query.shape if causal else (1, HEADS, GROUP * queries, DIM)
        for name, backend in BACKENDS.items():
            how: dict[str, Any] = {"is_causal": causal, "enable_gqa": causal}
            with sdpa_kernel(backend):
                seconds = eager_time(partial(F.scaled_dot_product_attention, query.view(shape), key, value, **how), 3)
            pairs = queries * keys // (2 if causal else 1)
            flops = 4 * HEADS * GROUP * DIM * pairs
            yield {"op": "attention", "how": name, "queries": queries, "keys": keys, "causal": causal, **speed(seconds, flops)}
        if is_flash_attn_4_available():
            attend = partial(flash_attention_4.attend, query, key, value, scale=DIM**-0.5, causal=causal)
            line = {"op": "attention", "how": FLASH_ATTENTION_4, "queries": queries, "keys": keys, "causal": causal}
            yield line | speed(eager_time(attend, 3), flops)


def own(tokens: int, chunk: int) -> Iterator[dict[str, Any]]:
    """Time a chunk's causal part as prompts compute it, and by cuDNN with each key once for the query heads of its group."""
    query, (key, value), scale = draw(1, HEADS * GROUP, chunk, DIM), draw(2, 1, HEADS, chunk, DIM), DIM**-0.5
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    ways: dict[str, Callable[[], Any]] = {
        "keys repeated": partial(dense.attend, query, key, value, scale=scale, causal=True),
        "keys once": partial(cudnn, query, key, value, None, True, 0.0, True, scale=scale),
    }
    expected = ways["keys repeated"]()[0]
    for how, attend in ways.items():
        line: dict[str, Any] = {"op": "a chunk's own part", "how": how, "queries": chunk}
        try:
            off = float((attend()[0].double() - expected.double()).norm() / expected.double().norm())
            seconds = eager_time(attend, 5)
        except RuntimeError as error:  # torch may refuse keys of fewer heads
            yield line | {"error": str(error).splitlines()[0][:200]}
        else:
            yield line | {"off": round(off, 6), **speed(seconds, 2 * HEADS * GROUP * DIM * chunk * chunk)}


def prompt(model: Any, method: str, tokens: int, chunk: int, layers: int) -> dict[str, Any]:
    """Time one prompt of a method, the second of two."""
    limits = (None, 100) if method.startswith("pariskv") else (None, None) if method == "full" else (1024, None)
    dense = None if method == "full" else 0
    one = PrefillSetting(
        shape="", method=method, length=tokens, chunk=chunk, budget=limits[0], retrieved=limits[1], dense_layers=dense, device="",
        layers=layers,
    )  # fmt: skip
    found = measure(model, one, None)
    names = ("seconds", "indexed_s", "cold_s", "peak_device_bytes")
    return {
        "op": "prompt",
        "method": method,
        "tokens": tokens,
        "chunk": chunk,
        "layers": layers,
        **{n: found[n] for n in names},
    }


def draw(*size: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(size, device="cuda", dtype=torch.bfloat16)


def speed(seconds: float, flops: int) -> dict[str, Any]:
    """Return the measures of a product."""
    return {"ms": round(seconds * 1e3, 3), "tflops": round(flops / seconds / 1e12, 1)}


CHEAP: dict[str, Callable[[int, int], Iterator[dict[str, Any]]]] = {
    "kernels": kernels,
    "products": products,
    "attention": attention,
    "own": own,
}
"""Parts that need no model."""

if __name__ == "__main__":
    run_kernels(
        __doc__, lines, SHAPE, parts="kernels,products,attention,prompts,profile,own", tokens=36864, chunk=16384, layers=32,
        methods="full,pariskv-plus",
    )  # fmt: skip
