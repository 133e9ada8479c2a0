"""Time to first and second token, time per output token and memory, for methods side by side on one model."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvthaw.bench import report
from kvthaw.bench.card import emit, provenance
from kvthaw.bench.launches import launches
from kvthaw.bench.shapes import build
from kvthaw.engine.decode import Replay, capturable, compiled_step
from kvthaw.engine.hf import Cache
from kvthaw.errors import CacheError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WARM = 6  # steps that do not count

HF = "hf-dynamic"
"""transformers' own DynamicCache with sdpa attention, the baseline of every run."""


def main(
    *,
    shape: str = "llama-3.1-8b",
    length: list[int] | None = None,
    batch: list[int] | None = None,
    method: list[str] | None = None,
    budget: int = 256,
    retrieved: int | None = None,
    new_tokens: int = 64,
    host_bytes: int | None = None,
    out: Path | None = None,
    commit: str | None = None,
    compile: bool = False,
    only: str | None = None,
    profile: bool = False,
    json: bool = True,
    plot: Path | None = None,
) -> list[dict[str, Any]]:
    """Measure every method at every length and batch, after checking each against transformers.

    Prints a JSON line a run, or with json=False a table at the end. Settings as for `kvthaw.Cache`. compile: also steps that
    torch.compile has compiled. only: one of eager, captured and compiled, without the cold run. profile: after the steps that
    count, break a captured one down by kernels, see `kvthaw.bench.launches`. Captured and compiled steps need a GPU; elsewhere
    they are left out.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(shape, device)
    compiled = compiled_step(model.forward) if compile else None
    methods = [HF, *(m for m in (method or ["full", "icecache"]) if m != HF)]
    lines = []

    def settings(name: str) -> dict[str, Any]:
        if name in (HF, "full"):
            return {}
        sizes = {"budget": budget} if retrieved is None else {"retrieved": retrieved}
        return {**sizes, "host_bytes": host_bytes}

    for name in methods[1:]:
        check(model, name)
    for n in length or [36864]:
        for rows in batch or [1]:
            for name in methods:
                runs = measure(
                    model,
                    name,
                    length=n,
                    batch=rows,
                    new_tokens=new_tokens,
                    compiled=compiled,
                    only=only,
                    profile=profile,
                    **settings(name),
                )
                for line in runs:
                    lines.append({"bench": "decode", "shape": shape, **line, **provenance(commit)})
                    emit(lines[-1], out, quiet=not json)
    if not json:
        report.table(lines)
    if plot is not None:
        report.plot(lines, plot)
    return lines


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _cache(model: PreTrainedModel, method: str, **settings: Any) -> DynamicCache:
    return DynamicCache(config=model.config) if method == HF else Cache(model, method, **settings)


@torch.no_grad()
def check(model: PreTrainedModel, method: str) -> None:
    """A method whose budget exceeds the prompt must give transformers' own logits, as near as transformers' two ways to attend
    (sdpa and eager) give each other's: rounding alone moves those of a deep bfloat16 model of random weights by 8 %. Raises
    CacheError where it does not."""
    generator = torch.Generator(device="cpu").manual_seed(int(time.time()))
    ids = torch.randint(0, model.config.vocab_size, (1, 512), generator=generator).to(model.device)

    def logits(name: str, attention: str) -> Tensor:
        with _attention(model, attention):
            cache = _cache(model, name, budget=None if name == "full" else 2048)
            model(ids[:, :480], past_key_values=cache)
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits[0, -1].float() for i in range(480, 512)]
        return torch.stack(steps)

    ours, theirs, eager = logits(method, "sdpa"), logits(HF, "sdpa"), logits(HF, "eager")
    if method == "streaming":  # evicts; there is nothing to compare with
        return
    error, rounding = (float((other - theirs).norm() / theirs.norm()) for other in (ours, eager))
    if not error <= max(rounding, 1e-4):
        raise CacheError(
            f"{method} differs from transformers by {error:.4f} of the logits' norm at a budget above the length, more than "
            f"transformers' eager attention does ({rounding:.4f})"
        )


@torch.no_grad()
def measure(
    model: PreTrainedModel,
    method: str,
    *,
    length: int,
    batch: int,
    new_tokens: int,
    compiled: Callable[..., Any] | None = None,
    only: str | None = None,
    profile: bool = False,
    **settings: Any,
) -> Iterator[dict[str, Any]]:
    """One method at one length: a cold run for the time with fresh host memory, then the runs that count: eager, and where the
    method allows it captured, and compiled and captured if a compiled forward is given. Cache settings as for `kvthaw.Cache`."""
    device = model.device
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length)).to(device)
    with _attention(model, "sdpa"):
        cold = None if only else _run(model, lambda: _cache(model, method, **settings), ids, 4)
        forwards = {"eager": None, "captured": model.forward}
        if compiled is not None:
            forwards["compiled"] = compiled
        for steps, forward in forwards.items():
            if only not in (None, steps):
                continue
            made = partial(_cache, model, method, **settings)
            run = _run(model, made, ids, new_tokens, steps=steps, forward=forward, profile=profile)
            if run is None:
                continue
            yield {
                "method": method,
                "steps": steps,
                "requested": settings.get("budget"),
                "retrieve": settings.get("retrieved"),
                "length": length,
                "batch": batch,
                "new_tokens": new_tokens,
                "ttft_s": run["ttft"],
                "tt2t_s": run["tt2t"],
                "tpot_s": run["tpot"],
                "itl_p50_s": run["p50"],
                "itl_p95_s": run["p95"],
                "tokens_per_s": batch / run["tpot"],
                "cold_ttft_s": cold["ttft"] if cold else None,
                "cold_tt2t_s": cold["tt2t"] if cold else None,
                "peak_device_bytes": run["peak"],
                "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
                "full_kv_bytes": _kv_bytes(model, length + new_tokens, batch),
                **run["stats"],
                **run["parts"],
            }


def _kv_bytes(model: PreTrainedModel, tokens: int, batch: int) -> int:
    config = model.config
    width = config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return int(2 * config.num_hidden_layers * width * tokens * batch)


def _run(
    model: PreTrainedModel,
    make: Callable[[], DynamicCache],
    ids: Tensor,
    new_tokens: int,
    *,
    steps: str = "eager",
    forward: Callable[..., Any] | None = None,
    profile: bool = False,
) -> dict[str, Any] | None:
    """One prompt and its continuation; None where the steps of this cache cannot be captured and shall be."""
    captured = forward is not None
    gc.collect()
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cache = make()
    if captured and not (cuda and isinstance(cache, Cache)):
        return None
    _sync(model)
    begin = time.perf_counter()
    token = _step(model, ids, cache)
    _sync(model)
    first = last = time.perf_counter()
    replay = None
    if captured:
        if capturable(cache) is not None:
            return None
        assert forward is not None
        replay = Replay(forward, cache, compiled=steps == "compiled")
    gaps = []
    for i in range(new_tokens + _WARM):
        token = _replay(replay, token, ids.shape[1] + i) if replay else _step(model, token, cache)
        _sync(model)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now
    peak = torch.cuda.max_memory_allocated() if cuda else None
    stats, parts = {}, {}
    if isinstance(cache, Cache):
        stats = {k: v for k, v in cache.stats().to_dict().items() if k not in ("method", "batch")}
        parts = {f"{part}_s": s for part, s in _parts(model, cache, token).items()} if not captured else {}
        if replay is not None:
            parts = {"captures": replay.captures, "capture_s": replay.capture_seconds}
            if profile:
                at = ids.shape[1] + new_tokens + _WARM
                parts |= launches(lambda: _replay(replay, token, at))
    steady = gaps[_WARM:]  # the first steps wait for the index and compile kernels
    ordered = sorted(steady)
    return {
        "ttft": first - begin,
        "tt2t": first - begin + gaps[0],
        "tpot": statistics.mean(steady),
        "p50": statistics.median(steady),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))],
        "peak": peak,
        "stats": stats,
        "parts": parts,
    }


def _replay(replay: Replay, token: Tensor, position: int) -> Tensor:
    positions = torch.full_like(token, position)
    return replay(token, positions)[:, -1:].argmax(dim=-1)


def _parts(model: PreTrainedModel, cache: Cache, token: Tensor, steps: int = 16) -> dict[str, float]:
    """Seconds a token spends in searching the index and in fetching rows, the device idle before each."""
    spent: dict[str, float] = {}

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            _sync(model)
            begin = time.perf_counter()
            result = call(*args)
            _sync(model)
            spent[part] = spent.get(part, 0.0) + time.perf_counter() - begin
            return result

        return wrapper

    originals: list[tuple[Any, str, Any]] = []

    def wrap(owner: Any, name: str, part: str) -> None:
        originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, timed(part, getattr(owner, name)))

    for layer in cache.frozen_layers:
        if layer.group is None or layer._transfer is None:
            continue
        wrap(layer._transfer, "fetch", "fetch")
        if layer.leader is None:
            wrap(layer.group.index, "select", "query")
            wrap(layer.group.residency, "admit", "residency")
    for _ in range(steps):
        token = _step(model, token, cache)
    for owner, name, _ in originals:
        delattr(owner, name)
    return {part: seconds / steps for part, seconds in spent.items()}


def _step(model: PreTrainedModel, ids: Tensor, cache: DynamicCache) -> Tensor:
    logits: Tensor = model(ids, past_key_values=cache, logits_to_keep=1).logits
    return logits[:, -1:].argmax(dim=-1)


def _sync(model: PreTrainedModel) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":  # key=value arguments, for machines without the command line's packages
    given = dict(pair.split("=", 1) for pair in sys.argv[1:])
    main(
        shape=given.get("shape", "llama-3.1-8b"),
        length=[int(n) for n in given.get("length", "36864").split(",")],
        batch=[int(n) for n in given.get("batch", "1").split(",")],
        method=given.get("method", "full,icecache").split(","),
        budget=int(given.get("budget", "256")),
        retrieved=int(given["retrieved"]) if "retrieved" in given else None,
        new_tokens=int(given.get("new_tokens", "64")),
        host_bytes=int(given["host_bytes"]) if "host_bytes" in given else None,
        out=Path(given["out"]) if "out" in given else None,
        commit=given.get("commit"),
        compile=given.get("compile") == "1",
        only=given.get("only"),
        profile=given.get("profile") == "1",
    )
