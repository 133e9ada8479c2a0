"""PRKV's automatic static share (appendix G, table 4), by prompt length and rows.

usage: python3 -m benchmarks.shares [--length 4096,16384] [--rows 256,512] [--samples N] [--out FILE]

The share is how much of the k most attended tokens the first and the last query of the prompt's observation window have in common,
in whole pages: averaged over heads, layers and prompts. Prints a JSON line a length and number of rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.passages import Kind, maker
from benchmarks.script import run_as_script
from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt, load
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError
from kvthaw.evaluate.machine import identity, versions
from kvthaw.evaluate.metrics import mean
from kvthaw.evaluate.passages import text_name
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.index.hybrid import HybridIndex

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shares(
    model: PreTrainedModel,
    tokenizer: Any,
    known: ResultsFile,
    *,
    lengths: Sequence[int],
    rows: Sequence[int],
    kinds: Sequence[Kind] = ("text", "needle"),
    samples: int = 1,
    seed: int = 0,
    page: int = 32,
    window: int = 64,
    name: str = "model",
) -> Iterator[dict[str, Any]]:
    """S of appendix G for every length and number of rows, in that order, its least and largest over the prompts, and by layer.

    One prefill a prompt serves all rows; what is known is not computed. Raises ConfigError for a prompt that leaves nothing to
    retrieve.
    """
    about = {**identity(model, name), "text": text_name(None), "page": page, "window": window}
    for length in lengths:
        check_prompt(model, length)
    for length in lengths:
        prompts = [(kind, seed + i) for i in range(samples) for kind in kinds]
        settings = {
            k: [{**about, "kind": kind, "length": length, "seed": number, "rows": k} for kind, number in prompts] for k in rows
        }
        for place, (kind, number) in enumerate(prompts):
            missing = [k for k in rows if known.get(settings[k][place]) is None]
            if missing:
                base = Cache(model, "full")
                passage = maker(kind)(tokenizer, length=length, steps=1, seed=number, text=None)
                prefill(model, base, passage.prompt)
                for k in missing:
                    layers = _layers(base, f"prkv:share=auto:page={page}:window={window}", k)
                    known.add(Record(settings[k][place], {"layers": layers, "versions": versions()}))
        for k in rows:
            found = [record for setting in settings[k] if (record := known.get(setting)) is not None]
            each = [sum(record["layers"].values()) / len(record["layers"]) for record in found]
            numbers = found[0]["layers"]
            by_layer = [{"layer": int(n), "share": mean(record["layers"][n] for record in found)} for n in numbers]
            sizes = {
                "length": length,
                "rows": k,
                "samples": len(found),
                "share": mean(each),
                "least": min(each),
                "most": max(each),
            }
            yield {"eval": "shares", **sizes, "layers": by_layer, **about}


def _layers(base: Cache, method: str, k: int) -> dict[str, float]:
    cache = base.fork(method, retrieved=k)
    cache.wait()
    found: dict[str, float] = {}
    for layer in cache.frozen_layers:
        index = None if layer.retriever is None else layer.retriever.index
        share = index.statics[0].share if isinstance(index, HybridIndex) and index.statics else None
        if share is None:
            raise ConfigError(f"{method} leaves nothing to retrieve of {layer.sequences.padded_length} tokens")
        found[str(layer.number)] = share
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="shipped")
    parser.add_argument("--length", default="4096,8192")
    parser.add_argument("--rows", default="256,512,1024")
    parser.add_argument("--prompt", default="text,needle", help="as for benchmarks.recall")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lengths, rows = ([int(part) for part in text.split(",")] for text in (given.length, given.rows))
    model, tokenizer = load(given.model)
    how: dict[str, Any] = {"lengths": lengths, "rows": rows, "samples": given.samples, "name": given.model}
    how["kinds"] = given.prompt.split(",")
    for line in shares(model, tokenizer, ResultsFile(given.out), **how):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_as_script(main)
