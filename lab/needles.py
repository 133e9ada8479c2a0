"""RULER on a pretrained model, as `python -m lab compare --task ruler_... --out FOLDER` found it.

usage: python3 -m lab.needles FOLDER --name MODEL --gpu NAME --commit COMMIT [--text NAME]

Writes lab/results/ruler.jsonl, a line a method, budget, task and length, in place of earlier lines of the model and method with
these seeds. Writes the table of docs/results.md of the samples SHOWN: percent right and of full attention's, by budget.
lab/gpu/ruler.sh makes the folder on a GPU.
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
from lab.script import commits, paragraph, put, run_as_script

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab" / "results" / "ruler.jsonl"
BEGIN = "<!-- written by lab/needles.py -->"
SHOWN = [4200, 4207]
"""First and last seed of the samples in the docs."""


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
    """Write what was asked, and each method's percent right by budget, over all lengths, with its share of full attention's."""
    lengths, tasks = sorted({one["length"] for one in lines}), sorted({one["task"] for one in lines})
    groups = {"needles": [task for task in tasks if "niah" in task], **{task: [task] for task in tasks if "niah" not in task}}
    budgets = sorted({one["budget"] for one in lines if one["budget"] is not None})

    def right(method: str, budget: int | None, group: str) -> tuple[float, int]:
        some = [one for one in lines if (one["method"], one["budget"]) == (method, budget) and one["task"] in groups[group]]
        n = sum(one["n"] for one in some)
        return sum(one["accuracy"] * one["n"] for one in some) / n, n

    def percent(method: str, budget: int, group: str) -> str:
        found, n = right(method, budget, group)
        low, high = wilson(found, n)
        return f"{100 * found:.1f} ({100 * low:.0f} to {100 * high:.0f}), {100 * found / right('full', None, group)[0]:.1f} %"

    first = lines[0]
    group, *others = [name for name, all in groups.items() if all]
    full, n = right("full", None, group)
    about = paragraph(
        f"**RULER.** {first['model']}, {first['dtype']}, {first['gpu']}, {commits(lines)}: {len(groups[group])} tasks of "
        f"{group} in {first['text']}, of {' and '.join(f'{length:,}' for length in lengths)} tokens, through the chat template; "
        f"{n} samples ([lines](../lab/results/ruler.jsonl)). Full attention answers {100 * full:.1f} %. A cell has the percent "
        "right, its 95 % interval as if samples were right or wrong, and the share of full attention's."
    )
    methods = {one["method"] for one in lines if one["budget"] is not None}
    ranked = sorted(methods, key=lambda name: (-sum(right(name, budget, group)[0] for budget in budgets), name))
    head = ["method", *(f"{budget:,} tokens" for budget in budgets)]
    body = [[f"`{name}`", *(percent(name, budget, group) for budget in budgets)] for name in ranked]
    low = [f"`{task}` {100 * right('full', None, task)[0]:.0f} % of {right('full', None, task)[1]}" for task in others]
    rest = f"Too hard for this model: full attention answers {', '.join(low)}." if low else ""
    return "\n\n".join([about, Table(head, body).markdown(), *([paragraph(rest)] if rest else [])])


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
    again = {(one["model"], one["text"], one["method"], *one["seeds"]) for one in made}
    kept = [one for one in map(json.loads, known) if (one["model"], one["text"], one["method"], *one["seeds"]) not in again]
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in kept + made), encoding="utf-8")
    put(ROOT / "docs" / "results.md", table([one for one in kept + made if one["seeds"] == SHOWN]), BEGIN)


if __name__ == "__main__":
    run_as_script(main)
