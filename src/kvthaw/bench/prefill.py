"""Prompts that come in chunks: seconds and device memory beside one pass, and beside what operations and bytes allow."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvthaw.bench.asked import Prefill
from kvthaw.bench.card import provenance
from kvthaw.bench.decode import Watch, free, name_of, where
from kvthaw.bench.options import read_pairs
from kvthaw.bench.script import parted, printing, run_as_script
from kvthaw.bench.shapes import build
from kvthaw.engine.hf import attach
from kvthaw.engine.hf.cache import head_dim
from kvthaw.engine.prefill import spans
from kvthaw.errors import CacheError, at_least
from kvthaw.evaluate.results import AsKey, Kept
from kvthaw.kernels.dense import BLOCK
from kvthaw.methods import resolve

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

HF = "hf-dynamic"
"""transformers' own DynamicCache with sdpa attention: full attention's prefill."""
MATMUL, ATTENTION, BUS = 795e12, 660e12, 55e9
"""Of an H200, measured: operations a second of bfloat16 matrix products and of causal attention; bytes a second each way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(AsKey):
    """What a line depends on. chunk: tokens at once; the whole length is one pass. layers: how many of the shape's, None for all.
    The rest as for `kvthaw.attach`, None for HF."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A prompt that was taken in twice. seconds: until its last logits; indexed_s: until all is offloaded and indexed; cold_s: that
    of the first run, which also takes the host memory from the system. None where the device's memory did not suffice.

    peak_device_bytes: all that torch held; weight_bytes: of the model. bytes_to_host, bytes_back: of KV over the bus. floor_s: the
    larger of compute_floor_s (operations at an H200's measured rates) and of the bytes of either direction at the bus's;
    over_floor: indexed_s over it. Bytes and floors are None on a CPU.
    """

    setting: Setting
    seconds: float | None
    indexed_s: float | None
    cold_s: float | None
    peak_device_bytes: int | None
    weight_bytes: int
    bytes_to_host: int
    bytes_back: int
    compute_floor_s: float | None
    floor_s: float | None
    over_floor: float | None
    about: dict[str, Any]

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps({"bench": "prefill", **asdict(self)})

    def brief(self) -> str:
        """What was measured, in a few words."""
        if self.indexed_s is None or self.seconds is None:
            return f"{self.setting}: does not fit"
        floor = "" if self.over_floor is None else f", {self.over_floor:.2f} times what the hardware allows"
        return f"{self.setting}: {self.seconds:.2f} s, indexed after {self.indexed_s:.2f} s{floor}"

    @staticmethod
    def from_json(text: str) -> Line:
        """The line that to_json() gave. Raises ValueError, KeyError or TypeError for anything else."""
        found = json.loads(text)
        if found.pop("bench") != "prefill":
            raise ValueError("a line of another benchmark")
        return Line(**{**found, "setting": Setting(**found["setting"])})


def main(*asked: Prefill, say: Callable[[Line], None] | None = None, watch: Watch | None = None) -> list[Line]:
    """A line a setting, each given to `say` as soon as it is known; every method is checked first. `out`, `host_bytes` and what
    lines say of the code are the first's. Raises ConfigError for settings that cannot be, CacheError where a prompt in chunks does
    not give what one pass gives."""
    device, _ = where()
    first = asked[0]
    settings = [one for options in asked for one in grid(options, name_of(device))]
    known, about = Kept(first.out, Line.from_json), provenance(first.commit)
    model: PreTrainedModel | None = None
    built: tuple[str, int | None] | None = None
    checked: set[tuple[object, ...]] = set()
    for done, one in enumerate(settings):
        line = known.get(one)
        if line is None:
            if watch is not None:
                watch(str(one), done, len(settings))
            if model is None or built != (one.shape, one.layers):
                model, built = None, (one.shape, one.layers)
                free()
                model = build(one.shape, device, layers=one.layers)
            if one.method != HF and (*built, one.method, one.dense_layers) not in checked:
                check(model, one, first.host_bytes)
                checked.add((*built, one.method, one.dense_layers))
            line = measure(model, one, first.host_bytes, about)
            known.add(line)
        if say is not None:
            say(line)
    return [line for line in map(known.get, settings) if line is not None]


def grid(asked: Prefill, device: str) -> list[Setting]:
    """For every length transformers in one pass, then each method in one pass and in chunks."""
    for name in ("length", "chunk"):
        for value in getattr(asked, name):
            at_least(1, **{name: value})
    found = []
    for length in asked.length:
        for method in asked.method if asked.chunks_only else (HF, *asked.method):
            dense = method == HF or resolve(method).dense
            sizes = (None, None) if dense else (asked.budget, None) if asked.retrieved is None else (None, asked.retrieved)
            chunks = [length] if method == HF else [length] * (not asked.chunks_only) + [c for c in asked.chunk if c < length]
            found += [
                Setting(
                    shape=asked.shape,
                    method=method,
                    length=length,
                    chunk=chunk,
                    budget=sizes[0],
                    retrieved=sizes[1],
                    dense_layers=None if dense else asked.dense_layers,
                    device=device,
                    layers=asked.layers,
                )
                for chunk in chunks
            ]
    return found


@torch.no_grad()
def measure(model: PreTrainedModel, one: Setting, host_bytes: int | None, about: dict[str, Any]) -> Line:
    """Take the prompt in twice and time both."""
    ids, times = _prompt(model, one.length), []
    for _ in range(2):
        gc.collect()  # a cache refers to itself; its host rows go before the next one's come
        if ids.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            times.append(_run(model, one, ids, host_bytes))
        except torch.cuda.OutOfMemoryError:
            break
    seconds, indexed = times[1] if len(times) == 2 else (None, None)
    least = floor(model, one)
    return Line(
        setting=one,
        seconds=seconds,
        indexed_s=indexed,
        cold_s=times[0][1] if times else None,
        peak_device_bytes=torch.cuda.max_memory_allocated() if ids.is_cuda and indexed is not None else None,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        bytes_to_host=int(least["to_host"]),
        bytes_back=int(least["back"]),
        compute_floor_s=least["compute"] if ids.is_cuda else None,
        floor_s=least["all"] if ids.is_cuda else None,
        over_floor=indexed / least["all"] if ids.is_cuda and indexed is not None else None,
        about=about,
    )


def floor(model: PreTrainedModel, one: Setting) -> dict[str, float]:
    """What an H200 allows: compute, seconds of the operations; to_host and back, bytes of KV; all, seconds with both directions of
    the bus beside the operations."""
    config = model.config.get_text_config(decoder=True)
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    dim = head_dim(config)
    weights = sum(m.weight.numel() for m in model.get_decoder().modules() if isinstance(m, torch.nn.Linear))
    pairs = layers * heads * one.length * (one.length + 1) / 2
    frozen = 0 if one.dense_layers is None else layers - one.dense_layers
    row = 2 * config.num_key_value_heads * dim * model.dtype.itemsize * frozen
    compute = 2 * weights * one.length / MATMUL + 4 * dim * pairs / ATTENTION
    to_host, back = row * one.length, row * sum(start for start, _ in spans(one.length, one.chunk))
    return {"compute": compute, "to_host": to_host, "back": back, "all": max(compute, to_host / BUS, back / BUS)}


@torch.no_grad()
def check(model: PreTrainedModel, one: Setting, host_bytes: int | None) -> None:
    """The logits of a prompt in five chunks are transformers' own of one pass, as near as transformers' two ways to attend (sdpa
    and eager) are to each other; rounding alone moves those of a deep bfloat16 model of random weights by 8 %. On a GPU the past
    is of several blocks. Raises CacheError where they are not."""
    ids, few = _prompt(model, 2 * BLOCK + 5000 if model.device.type == "cuda" else 700), _prompt(model, 512)
    expected, sdpa, before = _logits(model, ids), _logits(model, few), model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rounding = _away(_logits(model, few), sdpa)
    finally:
        model.set_attn_implementation(before)
    with attach(model, one.method, prefill_chunk=-(-ids.shape[1] // 5), host_bytes=host_bytes, **_sizes(one)):
        error = _away(_logits(model, ids), expected)
    if not error <= max(rounding, 1e-4):
        raise CacheError(
            f"{one.method} in chunks differs from one pass by {error:.4f} of the logits' norm, more than transformers' eager "
            f"attention does ({rounding:.4f})"
        )


def _run(model: PreTrainedModel, one: Setting, ids: Tensor, host_bytes: int | None) -> tuple[float, float]:
    """Seconds until the last logits, and until all is indexed."""
    if one.method == HF:
        begin = _now(ids)
        out = model(ids, use_cache=True, logits_to_keep=1)  # its KV is counted as long as the time is
        seconds = _now(ids) - begin
        del out
        return seconds, seconds
    with attach(model, one.method, prefill_chunk=one.chunk, host_bytes=host_bytes, **_sizes(one)) as handle:
        begin = _now(ids)
        model(ids, logits_to_keep=1)
        seconds = _now(ids) - begin
        handle.cache.wait()
        return seconds, _now(ids) - begin


def _sizes(one: Setting) -> dict[str, Any]:
    return {"budget": one.budget, "retrieved": one.retrieved, "dense_layers": one.dense_layers}


def _now(ids: Tensor) -> float:
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _prompt(model: PreTrainedModel, length: int) -> Tensor:
    ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(length))
    return ids.to(model.device)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Of the last 32 tokens."""
    logits: Tensor = model(ids, use_cache=True, logits_to_keep=32).logits[0].float()
    return logits


def _away(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def table(lines: list[Line]) -> Table:
    """A row a line."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(title=f"prefill, {lines[0].setting.shape}, {lines[0].about['gpu'] or lines[0].about['cpu']}", box=SIMPLE_HEAD)
    made.add_column("method")
    for name in ("length", "chunk", "logits s", "indexed s", "cold s", "device MiB\nbeside weights", "over\nfloor"):
        made.add_column(name, justify="right")
    for line in lines:
        one, peak = line.setting, line.peak_device_bytes
        made.add_row(
            one.method if one.layers is None else f"{one.method}, {one.layers} layers",
            f"{one.length:,}",
            "one pass" if one.chunk >= one.length else f"{one.chunk:,}",
            *("does not fit" if s is None else f"{s:.3f}" for s in (line.seconds, line.indexed_s, line.cold_s)),
            "-" if peak is None else f"{(peak - line.weight_bytes) / 2**20:,.0f}",
            "-" if line.over_floor is None else f"{line.over_floor:.2f}x",
        )
    return made


if __name__ == "__main__":  # name=value ..., several runs in one process with -- between them
    wanted = [read_pairs(Prefill, one) for one in parted(sys.argv[1:])]
    run_as_script(lambda: main(*wanted, **printing(wanted[0].out)))
