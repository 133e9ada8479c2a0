"""How far a small card goes: torch may take 24 GiB of the device, and, in the same run, all of it.

`python -m lab.small_card --out small_card.jsonl` on a GPU: the 8B shape, all layers, random weights, one sequence of
random tokens that goes through the model, so that every layer has rows of its own. For each length, one JSON line a contender and
card:

- kvthaw: `--method`, "auto" unless given, device_memory "auto". dynamic: transformers' DynamicCache. offloaded: its offloading
  one, up to `--offloaded` tokens, since each token brings all KV over the bus.
- prefill_s: to the first token, offloading and indexing included. ms: the median of a token's. peak_bytes: what torch took at most.
  error: instead of these, where memory was short.

`--weights int4` or another kind that `lab.quantised` has quantises the decoder's layers first.

The caches named by `--filled` begin with drawn keys and values instead of a prefill. Those of kvthaw are drawn and indexed with the
whole card, of which the small one takes the steps: 512k tokens take a minute and a half then instead of some three. Of the methods
that search on the device only clusterkv-plus has an index that fits 24 GiB there beside the weights, without dense layers:
`--filled kvthaw --cards small --contenders kvthaw --lengths 524288 --method clusterkv-plus --dense-layers 0`.

In the end a line with the longest prompt that each served on the small card, and whether kvthaw's greedy tokens are the same on
both, and how many times the whole card's ms its ms are. Exits with 1 where the tokens differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvthaw import Cache, HostMemoryError
from kvthaw.engine.decode import decode, forward
from kvthaw.engine.prefill import prefill
from kvthaw.errors import one_of
from kvthaw.evaluate.machine import now, where
from kvthaw.evaluate.results import noted
from kvthaw.formatting import read_bytes
from lab.bench.shapes import build
from lab.fill import drawn, fill
from lab.quantised import WEIGHTS
from lab.script import Report, options

PIECE = 4096
"""Tokens of a prompt that transformers' caches get at once."""


def run(
    model: PreTrainedModel, contender: str, length: int, steps: int, *, filled: bool = False, **sizes: Any
) -> dict[str, Any]:
    """Serve one prompt and some greedy tokens. Returns the times, or the error. filled: begin with drawn tokens."""
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        begin, cache = now(model.device), make(model, contender, **sizes)
        if filled:
            logits = torch.zeros((1, model.config.vocab_size), device=model.device)
            with prepared(model, cache):
                fill(cache, lambda layer: drawn(model, layer, length, 0), coming=steps + 1)
        elif isinstance(cache, Cache):
            logits = prefill(model, cache, ids)[None]
            cache.wait()
        else:
            for at in range(0, length, PIECE):
                logits = forward(model, cache, [ids[at : at + PIECE]])
        first, tokens, laps = now(model.device) - begin, list[int](), [now(model.device)]
        for token in decode(model, cache, logits, lambda after: after.argmax(-1)):
            tokens.append(int(token[0]))
            laps.append(now(model.device))
            if len(tokens) > steps:
                break
    except (torch.OutOfMemoryError, HostMemoryError) as error:
        return {"error": str(error).splitlines()[0]}
    each = sorted(after - before for before, after in pairwise(laps[4:]))
    found: dict[str, Any] = {
        "fill_s" if filled else "prefill_s": first,
        "ms": 1e3 * each[len(each) // 2],
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
    }
    if isinstance(cache, Cache):
        stats = cache.stats()
        found |= {"method": stats.method, "device_block_bytes": stats.device_block_bytes, "kv_host_bytes": stats.kv_host_bytes}
    return {**found, "tokens": tokens}


@contextmanager
def prepared(model: PreTrainedModel, cache: DynamicCache) -> Iterator[None]:
    """Let torch take all of the device within it for a cache of kvthaw, and of what it took keep what is in use."""
    if isinstance(cache, Cache):
        cache.kv.streams.device.resolve(model.device)  # what "auto" is on this card
    if not (isinstance(cache, Cache) and torch.cuda.is_available()):
        yield
        return
    share = torch.cuda.get_per_process_memory_fraction()
    torch.cuda.set_per_process_memory_fraction(1.0)
    yield
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    torch.cuda.reset_peak_memory_stats()


def make(model: PreTrainedModel, contender: str, *, method: str = "auto", **sizes: Any) -> Cache | DynamicCache:
    """Return an empty cache."""
    if contender == "kvthaw":
        return Cache(model, method, device_memory="auto", **sizes)
    return DynamicCache(config=model.config, offloading=contender == "offloaded")


def measure(model: PreTrainedModel, given: argparse.Namespace, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a line for each card, contender and length."""
    host = None if given.host_memory is None else read_bytes(given.host_memory, "host_memory")
    total = torch.cuda.get_device_properties(model.device).total_memory if torch.cuda.is_available() else 0
    for card in given.cards.split(","):
        if total:
            torch.cuda.set_per_process_memory_fraction(min(1.0, given.gib * 2**30 / total) if card == "small" else 1.0)
        for contender in given.contenders.split(","):
            for length in lengths:
                if contender == "offloaded" and length > given.offloaded:
                    continue
                sizes = {"method": given.method, "dense_layers": given.dense_layers, "budget": given.budget, "host_bytes": host}
                filled = contender in given.filled.split(",")
                found = run(model, contender, length, given.steps, filled=filled, **sizes)
                gc.collect()
                if total:
                    torch.cuda.empty_cache()
                yield {
                    "card": card,
                    "gib": given.gib,
                    "contender": contender,
                    "length": length,
                    "filled": filled,
                    **found,
                }
                if "error" in found:
                    break  # longer ones are no better off


def verdict(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the longest prompts, and kvthaw's small card beside the whole one."""
    served = [line for line in lines if "error" not in line]
    longest = {
        line["contender"]: line["length"]
        for line in sorted(served, key=lambda line: int(line["length"]))
        if line["card"] == "small"
    }
    ours = {(line["card"], line["length"]): line for line in served if line["contender"] == "kvthaw"}
    both = [
        (ours["small", length], ours["whole", length]) for card, length in ours if card == "small" and ("whole", length) in ours
    ]
    return {
        "longest": longest,
        "times": {small["length"]: small["ms"] / whole["ms"] for small, whole in both},
        "same_tokens": all(small["tokens"] == whole["tokens"] for small, whole in both),
    }


def main() -> None:
    """Measure, one JSON line a run."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, lengths="32768,131072,524288", contenders="kvthaw,dynamic,offloaded",
        offloaded=131072, gib=24.0, budget=1024, host_memory=str, cards="small,whole", steps=32, method="auto",
        dense_layers=int, weights="bf16", filled="", commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, lines = build(given.shape, device, layers=given.layers), list[dict[str, Any]]()
    one_of(WEIGHTS, weights=given.weights)
    WEIGHTS[given.weights](model)
    about = {"shape": given.shape, "layers": model.config.num_hidden_layers, "weights": given.weights, "budget": given.budget}
    about["device"] = name

    report = Report(given.out, given.commit)

    def told(line: dict[str, Any]) -> None:
        report.write({**about, **line, "about": report.card})

    with torch.no_grad():
        for line in measure(model, given, [int(length) for length in given.lengths.split(",")]):
            lines.append(line)
            told(line)
    found = verdict(lines)
    told(found)
    if not found["same_tokens"]:
        noted("kvthaw's tokens on the small card differ from those on the whole one")
        sys.exit(1)


if __name__ == "__main__":
    main()
