"""Decoding under quantised weights: what attaches and is captured, and how long a token takes.

`python -m lab.quantised --weights bf16,int4,fp8 --out quantised.jsonl`: a shape of random weights, the decoder layers'
quantised in place, one sequence, keys and values drawn. JSON lines, for each kind of weights first a checked one, then timed ones:

- checked: eager, captured: how far logits of 32 tokens are off transformers' own cache under the same weights, of their
  norm; of the first method, at a budget above the length. *_tokens: the share of them whose likeliest token is the same; *_same:
  that beside eager steps; *_s: seconds; *_error: instead of these. rounding: how far transformers' eager
  attention is off its sdpa. weight_bytes: of the model.
- timed: ms, median_ms: a token. device_bytes: the most that torch held during the steps.

`--unchecked`: the first line has the weights' bytes alone. `--lengths ""`: none is timed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvthaw.bench.decode import free
from kvthaw.bench.settings import STEPS
from kvthaw.bench.steps import WARM, attention, most_warm, replayed, take
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import plain_weights
from kvthaw.errors import one_of
from kvthaw.evaluate.results import noted
from lab.bench.check import LENGTH, Checks
from lab.bench.shapes import build, random_tokens
from lab.fill import drawn, fill
from lab.script import Report, options, run_as_script

GROUP = 128
"""Weights that share a scale, in 4 bits."""


def torchao(name: str, **fields: Any) -> Callable[[PreTrainedModel], None]:
    """Return what quantises a model by a config of torchao, without its settings for inductor: with them four layers of fp8 were
    not checked after 100 s on an H200, since each kernel is tuned in all directions at once."""

    def quantise(model: PreTrainedModel) -> None:
        from torchao import quantization

        quantization.quantize_(model.get_decoder(), getattr(quantization, name)(set_inductor_config=False, **fields))

    return quantise


def replacing(make: Callable[[nn.Linear], nn.Module]) -> Callable[[PreTrainedModel], None]:
    """Return what puts other modules in the place of a decoder's linear layers."""

    def quantise(model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        for name, module in list(decoder.named_modules()):
            if isinstance(module, nn.Linear):
                decoder.set_submodule(name, make(module))

    return quantise


def nf4(linear: nn.Linear) -> nn.Module:
    """Return bitsandbytes' layer of 4-bit normal floats."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = linear.weight.data
    made: Any = Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=weight.dtype, device="meta")
    made.weight = Params4bit(weight, requires_grad=False, quant_type="nf4", module=made).to(weight.device)
    return made  # type: ignore[no-any-return]


def gemlite4(linear: nn.Linear) -> nn.Module:
    """Return gemlite's layer of 4 bits, rounded to the nearest."""
    import gemlite
    from gemlite.helper import A16Wn

    if not gemlite.core.GEMLITE_TRITON_CONFIG_CACHE:  # tuned for the chip that is nearest to an H200
        gemlite.load_config(str(Path(gemlite.__file__).parent / "configs" / "h100.json"))
    weight = linear.weight.data
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = (high - low).clamp_min(1e-6) / 15
    zero = (-low / scale).round()
    codes = (groups / scale + zero).round().clamp(0, 15).to(torch.uint8).view_as(weight)
    parts = (part.squeeze(-1).to(weight.dtype) for part in (scale, zero))
    made: nn.Module = A16Wn(device=weight.device, dtype=weight.dtype).from_weights(codes, *parts, 4, GROUP)
    return made


def scaled(linear: nn.Linear) -> nn.Module:
    """Return transformers' layer for fp8 weights of compressed-tensors, activations in fp8 too."""
    from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear

    with torch.device("meta"):
        made: Any = CompressedTensorsFP8Linear(linear.in_features, linear.out_features)
    scale = linear.weight.data.float().abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    made.weight = nn.Parameter((linear.weight.data / scale).to(torch.float8_e4m3fn), requires_grad=False)
    made.weight_scale = nn.Parameter(scale.T.contiguous(), requires_grad=False)
    return made  # type: ignore[no-any-return]


WEIGHTS: dict[str, Callable[[PreTrainedModel], None]] = {
    "bf16": lambda model: None,
    "int8": torchao("Int8WeightOnlyConfig"),
    "fp8": torchao("Float8WeightOnlyConfig"),
    "fp8-dynamic": torchao("Float8DynamicActivationFloat8WeightConfig"),
    "fp8-compressed": replacing(scaled),
    "int4": torchao("Int4WeightOnlyConfig", group_size=GROUP, int4_packing_format="tile_packed_to_4d"),
    "int4-gemlite": replacing(gemlite4),
    "nf4": replacing(nf4),
}
"""By torchao where nothing else is said, activations in fp8 too for fp8-dynamic and fp8-compressed. nf4: bitsandbytes."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def checked(model: PreTrainedModel, method: str, ways: Sequence[str], limit: int) -> dict[str, Any]:
    """Return how far off each way to take steps is; see the module."""
    checks, references = Checks(model), []
    for name in ("sdpa", "eager"):
        with attention(model, name):
            references.append(checks.decode(DynamicCache(config=model.config), "eager"))
    exact = references[0]
    line: dict[str, Any] = {"rounding": _off(references[1], exact)}
    eager: Tensor | None = None
    for way in ways:
        begin = time.perf_counter()
        try:
            with within(limit):
                found = checks.decode(Cache(model, method, budget=None if method == "full" else 4 * LENGTH), way)
        except Exception as error:  # what a quantiser's kernels cannot do is a result
            line[f"{way}_error"] = _said(error)
            continue
        finally:
            noted(f"{method}, {way}: {(taken := time.perf_counter() - begin):.1f} s")
        line |= {way: _off(found, exact), f"{way}_tokens": _same(found, exact), f"{way}_s": round(taken, 1)}
        if eager is not None:
            line[f"{way}_same"] = _same(found, eager)
        eager = found if way == "eager" else eager
    return line


def timed(
    model: PreTrainedModel,
    method: str,
    length: int,
    ways: Sequence[str],
    steps: int,
    limit: int,
) -> list[dict[str, Any]]:
    """Return the times of one cache's steps, taken in each way."""
    same, sparse = drawn(model, 0, length, 0), method != "full"
    cache = Cache(model, method, retrieved=100 if sparse else None)
    coming = len(ways) * (steps + 2 * most_warm(model.device)) if sparse else 0
    fill(cache, lambda layer: same, shared=sparse, coming=coming)
    tokens, lines = random_tokens(model, 1, 0), []
    for way in ways:
        replayed(model, cache, way)
        with within(limit):
            take(model, cache, tokens, 1, capture=way != "eager")  # compiles kernels
        found = take(model, cache, tokens, steps, WARM, capture=way != "eager")
        times = {"ms": round(1e3 * found.mean, 3), "median_ms": round(1e3 * found.quantile(0.5), 3)}
        lines.append({"method": method, "length": length, "steps": way, **times, "device_bytes": found.peak})
    return lines


@torch.no_grad()
def main() -> None:
    """Check and time every kind of weights."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, weights=",".join(WEIGHTS), methods="full,pariskv-plus", lengths="36864,131072",
        ways=str, new_tokens=150, limit=60, unchecked=False, commit=str,
        out=Path,
    )  # fmt: skip
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = (given.ways or ("captured" if device.type == "cuda" else "eager")).split(",")
    for name in given.weights.split(","):
        one_of(WEIGHTS, weights=name)
        methods = given.methods.split(",")
        report = Report(given.out, given.commit, bench="quantised", shape=given.shape, layers=given.layers, weights=name)
        try:
            model = build(given.shape, device, layers=given.layers)
            WEIGHTS[name](model)
            free()
            size = sum(weight.nbytes for _, weight in plain_weights(model))
            ways = [way for way in STEPS if way == "eager" or way in wanted]
            line = {} if given.unchecked else checked(model, methods[0], ways, given.limit)
            report({"weight_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else size, **line})
            ways = [way for way in wanted if given.unchecked or way in line]
            for length in map(int, filter(None, given.lengths.split(","))):
                for method in methods:
                    for one in timed(model, method, length, ways, given.new_tokens, given.limit):
                        report(one)
                    free()
        except Exception as error:  # a library that is not there, or memory
            report({"error": _said(error)})
        model = None
        free()


def _off(found: Tensor, exact: Tensor) -> float:
    return round(float((found - exact).norm() / exact.norm()), 5)


def _same(found: Tensor, exact: Tensor) -> float:
    return float((found.argmax(dim=-1) == exact.argmax(dim=-1)).float().mean())


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


if __name__ == "__main__":
    run_as_script(main)
