"""PRKV's automatic static share (appendix G, table 4), by prompt length and rows.

usage: python3 -m lab.shares [--length 4096,16384] [--rows 256,512] [--samples N] [--out FILE]

The share is how much of the k most attended tokens the first and the last query of the prompt's observation window have in common,
in whole pages: averaged over heads, layers and prompts. Prints a JSON line a length and number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvthaw.engine.hf import Cache
from kvthaw.engine.hf.model import check_prompt, load
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import text_name
from kvthaw.evaluate.machine import identity, versions
from kvthaw.evaluate.results import Record, ResultsFile, mean
from lab.passages import PASSAGES
from lab.reproduce.special import static_shares
from lab.script import options, run_as_script

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shares(
    model: PreTrainedModel,
    tokenizer: Any,
    known: ResultsFile,
    *,
    lengths: Sequence[int],
    rows: Sequence[int],
    kinds: Sequence[str] = ("text", "needle"),
    samples: int = 1,
    page: int = 32,
    window: int = 64,
    name: str = "model",
) -> Iterator[dict[str, Any]]:
    """S of appendix G for every length and number of rows, in that order, its least and largest over the prompts, and by layer.

    One prefill a prompt serves all rows; what is known is not computed. Raises ConfigError for a prompt that leaves nothing to
    retrieve.
    """
    about = {**identity(model, name), "text": text_name(None), "page": page, "window": window}
    method = f"prkv:share=auto:page={page}:window={window}"
    for length in lengths:
        check_prompt(model, length)
    for length in lengths:
        found: dict[int, list[dict[str, float]]] = {k: [] for k in rows}
        for kind, seed in [(kind, seed) for seed in range(samples) for kind in kinds]:
            settings = {k: {**about, "kind": kind, "length": length, "seed": seed, "rows": k} for k in rows}
            missing = [k for k in rows if known.get(settings[k]) is None]
            if missing:
                base = Cache(model, "full")
                prefill(model, base, PASSAGES[kind](tokenizer, length=length, steps=1, seed=seed).prompt)
                for k in missing:
                    layers = {str(number): share for number, share in static_shares(base, method, k).items()}
                    known.add(Record(settings[k], {"layers": layers, "versions": versions()}))
            for k, record in ((k, known.get(settings[k])) for k in rows):
                found[k] += [record["layers"]] if record is not None else []
        for k, prompts in found.items():
            if not all(prompts):
                raise ConfigError(f"{method} leaves nothing to retrieve of {length} tokens")
            each = [sum(of.values()) / len(of) for of in prompts]
            sizes = {"length": length, "rows": k, "samples": len(each)}
            spread = {"share": mean(each), "least": min(each), "most": max(each)}
            by_layer = [{"layer": int(n), "share": mean(of[n] for of in prompts)} for n in prompts[0]]
            yield {"eval": "shares", **sizes, **spread, "layers": by_layer, **about}


def main() -> None:
    """See the module."""
    given = options(
        __doc__, model="shipped", length="4096,8192", rows="256,512,1024", prompt="text,needle", samples=1, out=Path
    )
    lengths, rows = ([int(part) for part in text.split(",")] for text in (given.length, given.rows))
    model, tokenizer = load(given.model)
    how: dict[str, Any] = {"lengths": lengths, "rows": rows, "samples": given.samples, "name": given.model}
    how["kinds"] = given.prompt.split(",")
    for line in shares(model, tokenizer, ResultsFile(given.out), **how):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    run_as_script(main)
