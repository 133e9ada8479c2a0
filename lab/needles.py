"""RULER's needles on a pretrained model, as `python -m lab compare --task ruler_niah_... --out FOLDER` found them.

usage: python3 -m lab.needles FOLDER --name MODEL --gpu NAME --commit COMMIT [--text NAME]

Writes lab/results/ruler.jsonl, a line a method, task and length, in place of the model's earlier lines, and the table of
docs/results.md: percent right by length, over both, and of full attention's. lab/gpu/ruler.sh makes the folder on a GPU.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvthaw.evaluate.results import Record, ResultsFile
from lab.evaluate.document import Table
from lab.evaluate.metrics import wilson
from lab.script import paragraph, put, run_as_script

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab" / "results" / "ruler.jsonl"
BEGIN = "<!-- written by lab/needles.py -->"


def lines(records: Iterable[Record], about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Summarize the samples of each method, task and length."""
    names = ("method", "budget", "dense_layers", "task", "length")
    groups = defaultdict[tuple[Any, ...], list[Record]](list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    for group in sorted(groups, key=str):
        some, seeds = groups[group], sorted({record["seed"] for record in groups[group]})
        attended = [record["attended_mean"] for record in some if record["attended_mean"] is not None]
        prompts = [record["prompt"] for record in some]
        yield {
            **about,
            **dict(zip(names, group, strict=True)),
            "n": len(some),
            "accuracy": round(fmean(record["accuracy"] for record in some), 4),
            "attended_mean": round(fmean(attended), 1) if attended else None,
            "prompts": [min(prompts), max(prompts)],
            "seeds": [seeds[0], seeds[-1]],
            "chat": some[0]["chat"],
            "dtype": some[0]["dtype"],
        }


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write what was asked, and each method's percent right."""
    lengths, tasks = sorted({one["length"] for one in lines}), {one["task"] for one in lines}
    right = defaultdict[tuple[str, int], float](float)
    count = defaultdict[tuple[str, int], int](int)
    for one in lines:
        for key in ((one["method"], one["length"]), (one["method"], 0)):
            right[key] += one["accuracy"] * one["n"]
            count[key] += one["n"]
    share = {key: right[key] / count[key] for key in right}
    (budget,) = {one["budget"] for one in lines if one["budget"] is not None}
    first, methods = (
        lines[0],
        sorted({one["method"] for one in lines}, key=lambda name: (name != "full", -share[name, 0], name)),
    )
    about = paragraph(
        f"**RULER's needles.** {first['model']}, {first['dtype']}, {first['gpu']}, {first['commit']}: {len(tasks)} tasks in "
        f"{first['text']}, through the chat template, with {budget} tokens; percent right, {count['full', lengths[0]]} samples a "
        "length ([lines](../lab/results/ruler.jsonl)). In brackets 95 % intervals as if samples were right or wrong."
    )
    head = ["method", *(f"{length // 1024}k" for length in lengths), "all", "of full"]

    def row(name: str) -> list[str]:
        low, high = wilson(share[name, 0], count[name, 0])
        cells = [f"{100 * share[name, length]:.1f}" for length in lengths]
        every = f"{100 * share[name, 0]:.1f} ({100 * low:.0f} to {100 * high:.0f})"
        return [f"`{name}`", *cells, every, f"{100 * share[name, 0] / share['full', 0]:.1f}"]

    return f"{about}\n\n{Table(head, list(map(row, methods))).markdown()}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of python -m lab compare")
    parser.add_argument("--name", required=True, help="of the model, in the results")
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--text", default="essays", help="what the needles lie in")
    given = parser.parse_args()
    about = {"model": given.name, "text": given.text, "gpu": given.gpu, "commit": given.commit}
    made = list(lines(ResultsFile(given.folder / "results.jsonl"), about))
    known = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    kept = [one for one in map(json.loads, known) if one["model"] != given.name]
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in kept + made), encoding="utf-8")
    put(ROOT / "docs" / "results.md", table(made), BEGIN)


if __name__ == "__main__":
    run_as_script(main)
