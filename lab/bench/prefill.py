"""Time prompts that come in chunks, and their device memory, against one pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvthaw.bench.decode import Watch, free
from kvthaw.bench.steps import attention
from kvthaw.cache.index_updater import IndexUpdater
from kvthaw.cache.passes import updaters
from kvthaw.engine.hf import PreTrainedModel, attach
from kvthaw.errors import CacheError, at_least
from kvthaw.evaluate.machine import now, where
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.kernels.dense import BLOCK
from kvthaw.methods import resolve
from lab.bench.card import provenance
from lab.bench.shapes import build, random_ids

HF = "hf-dynamic"
"""transformers' own DynamicCache with sdpa attention: full attention's prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSetting:
    """What a record depends on.

    chunk: tokens at once; the whole length is one pass.
    layers: how many of the shape's, None for all. The rest as for `kvthaw.attach`, None for HF.
    """

    shape: str
    method: str
    length: int
    chunk: int
    budget: int | None
    retrieved: int | None
    dense_layers: int | None
    device: str
    layers: int | None = None

    def __str__(self) -> str:
        words = [self.method, f"{self.length:,}", "one pass" if self.chunk >= self.length else f"chunks of {self.chunk:,}"]
        return ", ".join(words if self.layers is None else [*words, f"{self.layers} layers"])


def run(
    settings: Sequence[PrefillSetting],
    known: ResultsFile,
    *,
    host_bytes: int | None = None,
    commit: str | None = None,
    say: Callable[[Record], None] = lambda record: None,
    watch: Watch = lambda what, done, of: None,
) -> list[Record]:
    """Measure settings, and pass each record to `say` as soon as it is known. Every method is checked first.

    Raises CacheError if a prompt in chunks gives other logits than one pass.
    """
    (device, _), about = where(), provenance(commit)
    model: PreTrainedModel | None = None
    built: tuple[str, int | None] | None = None
    checked: set[tuple[object, ...]] = set()
    for done, one in enumerate(settings):
        record = known.get(asdict(one))
        watch(str(one), done, len(settings))
        if record is None:
            if model is None or built != (one.shape, one.layers):
                model, built = None, (one.shape, one.layers)
                free()
                model = build(one.shape, device, layers=one.layers)
            if one.method != HF and (*built, one.method, one.dense_layers) not in checked:
                check(model, one, host_bytes)
                checked.add((*built, one.method, one.dense_layers))
            record = Record(asdict(one), {**measure(model, one, host_bytes), "about": about})
            known.add(record)
        say(record)
        watch(str(one), done + 1, len(settings))
    return [record for one in settings if (record := known.get(asdict(one))) is not None]


def grid(
    shape: str,
    methods: Sequence[str],
    lengths: Sequence[int],
    chunks: Sequence[int],
    *,
    budget: int | float | None,
    retrieved: int | None = None,
    dense_layers: int = 0,
    chunks_only: bool = False,
    layers: int | None = None,
) -> list[PrefillSetting]:
    """Return for every length transformers in one pass, then each method in one pass and in chunks.

    chunks_only: no single pass, transformers' neither.
    layers: how many of the shape's, None for all.
    """
    for length in (*lengths, *chunks):
        at_least(1, length=length)
    _, device = where()
    found = []
    for length in lengths:
        for method in methods if chunks_only else (HF, *methods):
            dense = method == HF or resolve(method).dense
            sizes = (None, None) if dense else (budget, None) if retrieved is None else (None, retrieved)
            passes = [length] if method == HF else [length] * (not chunks_only) + [n for n in chunks if n < length]
            limits = {"budget": sizes[0], "retrieved": sizes[1], "dense_layers": None if dense else dense_layers}
            same = {"shape": shape, "method": method, "length": length, "device": device, "layers": layers}
            found += [PrefillSetting(chunk=chunk, **same, **limits) for chunk in passes]  # type: ignore[arg-type]
    return found


@torch.no_grad()
def measure(model: PreTrainedModel, one: PrefillSetting, host_bytes: int | None) -> dict[str, Any]:
    """Prefill a prompt twice and time both.

    Times are None if the prompt did not fit in device memory.

    seconds: until its last logits.
    indexed_s: until all tokens are offloaded and indexed. tt2t_s: until the second token, one step later.
    index_alone_s: building the indexes on the host again, with no other work. `seconds` and this are IceCache's figure 5a.
    cold_s: indexed_s of the first run, which also allocates host memory.
    peak_device_bytes: everything that torch allocated.
    weight_bytes: of the model.
    """
    ids, times = random_ids(model, 1, one.length, seed=one.length), list[_Times]()
    for _ in range(2):
        free()
        if ids.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            times.append(_run(model, one, ids, host_bytes))
        except torch.cuda.OutOfMemoryError:
            break
    whole = len(times) == 2
    return {
        **(times[1]._asdict() if whole else dict.fromkeys(_Times._fields)),
        "cold_s": times[0].indexed_s if times else None,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if ids.is_cuda and whole else None,
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }


@torch.no_grad()
def check(model: PreTrainedModel, one: PrefillSetting, host_bytes: int | None) -> None:
    """Check that the logits of a prompt in five chunks equal transformers' of one pass. Raises CacheError if they do not.

    Tolerance: the difference between transformers' two attentions (sdpa and eager). Rounding alone moves the logits of a
    deep bfloat16 model of random weights by 8 %. On a GPU the earlier tokens take several blocks.
    """
    length = 2 * BLOCK + 5000 if model.device.type == "cuda" else 700
    ids, few = random_ids(model, 1, length, seed=length), random_ids(model, 1, 512, seed=512)
    expected, sdpa = _logits(model, ids), _logits(model, few)
    with attention(model, "eager"):
        rounding = _away(_logits(model, few), sdpa)
    with attach(model, one.method, prefill_chunk=-(-ids.shape[1] // 5), host_bytes=host_bytes, **_sizes(one)):
        error = _away(_logits(model, ids), expected)
    if not error <= max(rounding, 1e-4):
        raise CacheError(
            f"{one.method} in chunks differs from one pass by {error:.4f} of the logits' norm, more than transformers' eager "
            f"attention does ({rounding:.4f})"
        )


class _Times(NamedTuple):
    """Of one prompt; see `measure`."""

    seconds: float
    indexed_s: float
    tt2t_s: float
    index_alone_s: float | None


def _run(model: PreTrainedModel, one: PrefillSetting, ids: Tensor, host_bytes: int | None) -> _Times:
    """Prefill a prompt and decode one token."""
    if one.method == HF:
        begin = now(ids.device)
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
        seconds = now(ids.device) - begin
        model(ids[:, -1:], past_key_values=cache)
        return _Times(seconds, seconds, now(ids.device) - begin, None)
    with attach(model, one.method, prefill_chunk=one.chunk, host_bytes=host_bytes, **_sizes(one)) as handle:
        begin = now(ids.device)
        model(ids, logits_to_keep=1)
        seconds = now(ids.device) - begin
        handle.cache.wait()
        indexed = now(ids.device) - begin
        alone = [updater for _, updater in updaters(handle.cache.kv.offloaded)]
        model(ids[:, -1:], past_key_values=handle.cache)
        return _Times(seconds, indexed, now(ids.device) - begin, build_alone(alone))


def build_alone(found: Sequence[IndexUpdater]) -> float | None:
    """Build what indexes on the host hold of the first sequence once more. Returns the seconds."""
    begin, some = time.perf_counter(), False
    for updater in found:
        if updater.retriever.index.traits.on_host and updater.indexed(0) > updater.first:
            context, some = updater.retriever.context, True
            rows = torch.empty(context.kv_heads, updater.indexed(0) - updater.first, 0)
            updater.retriever.fresh_index().build(
                0, updater.first, rows, rows, torch.empty(context.q_heads, 0, context.head_dim)
            )
    return time.perf_counter() - begin if some else None


def _sizes(one: PrefillSetting) -> dict[str, Any]:
    return {"budget": one.budget, "retrieved": one.retrieved, "dense_layers": one.dense_layers}


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of the last 32 tokens."""
    logits: Tensor = model(ids, use_cache=True, logits_to_keep=32).logits[0].float()
    return logits


def _away(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
