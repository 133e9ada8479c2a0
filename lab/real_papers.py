"""The papers' tables and figures of accuracy on a pretrained model, in several processes, and their pages of the docs.

usage: python3 -m lab.real_papers MODEL OUT.jsonl --names NAME,... [--data FOLDER] [--limit N] [--part I/N] [--lines LINES.jsonl]
       python3 -m lab.real_papers --publish [LINES.jsonl...]

`--part I/N` measures every N-th row of each name. Once OUT.jsonl has the results of all parts, `--lines` without a part writes a
line a row. A column whose data FOLDER lacks is left out with a sentence, and a mean is of the columns that were measured.
`--publish` adds lines to lab/results/reproduce_real.jsonl, in place of earlier ones of the same rows, and writes docs/reproduce.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvthaw.cli.options import words
from kvthaw.engine.hf.model import load, silence
from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate.evaluator import Progress
from kvthaw.evaluate.results import ResultsFile
from lab.bench.card import provenance
from lab.evaluate.document import Table
from lab.evaluate.published import BENCHMARKS
from lab.reproduce import EXPERIMENTS, Experiment, Lab, named, run
from lab.reproduce.draw import shown
from lab.reproduce.plans import Scores
from lab.script import on_a_model, paragraph, put, run_as_script

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab" / "results" / "reproduce_real.jsonl"
BEGIN = "<!-- written by lab/real_papers.py -->"


def within(one: Experiment, lab: Lab) -> tuple[Experiment, list[str]]:
    """Return an experiment of the columns whose data there are, and a sentence for each of the others."""
    plan, lacking = one.plan, dict[str, str]()
    if isinstance(plan, Scores):
        for name in plan.benchmarks:
            try:
                lab.items(BENCHMARKS[name])
            except ConfigError as error:
                lacking[name] = str(error)
        columns = {column: score for column, score in plan.columns.items() if score.benchmark not in lacking}
        plan = replace(plan, columns=columns)
    says = {
        model: replace(said, columns=tuple(column for column in said.columns if column in plan.columns))
        for model, said in one.says.items()
    }
    return replace(one, plan=plan, says=says), [f"{name} left out: {why}" for name, why in lacking.items()]


def part(one: Experiment, number: int, of: int) -> Experiment:
    """Return an experiment of every of-th row, from a number on."""
    says = {model: replace(said, rows=dict(list(said.rows.items())[number::of])) for model, said in one.says.items()}
    return replace(one, says=says)


def measure(wanted: Sequence[Experiment], lab: Lab, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of experiments, with the model, the machine and the commit in each."""
    for one in wanted:
        begin = time.monotonic()
        asked, left_out = within(one, lab)
        try:
            lines = run(asked, lab).lines()
        except KvthawError as error:
            print(f"{one.name}: {error}", flush=True)
            continue
        print(f"{one.name}: {time.monotonic() - begin:.0f} s", flush=True)
        for line in lines:
            yield {**line, "left_out": [*line["left_out"], *left_out], **about}


def _key(line: dict[str, Any]) -> tuple[str, str, str]:
    return line["name"], line["row"], line["model"]


def publish(paths: Sequence[Path]) -> None:
    """Add the lines of files to the results, and write the docs' tables."""
    known = {_key(line): line for path in (RESULTS, *paths) for line in map(json.loads, path.read_text("utf-8").splitlines())}
    order = list(EXPERIMENTS)
    lines = sorted(known.values(), key=lambda line: (order.index(line["name"]), line["model"]))
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    groups = dict.fromkeys((line["name"], line["model"]) for line in lines)
    tables = [_page([line for line in lines if (line["name"], line["model"]) == group]) for group in groups]
    put(ROOT / "docs" / "reproduce.md", "\n\n".join(tables), BEGIN)


def _page(lines: Sequence[dict[str, Any]]) -> str:
    first = lines[0]
    columns = [column for column in first["paper"] if any(column in line["ours"] for line in lines)]
    both = any(line["paper"][column] is not None for line in lines for column in columns)

    def cell(line: dict[str, Any], column: str) -> str:
        ours = shown(line["ours"].get(column))
        return f"{shown(line['paper'][column])} / {ours}" if both else ours

    rows = [[f"`{line['row']}`", *(cell(line, column) for column in columns)] for line in lines if line["ours"]]
    head = f"**{first['name']}**: {first['title']}. {first['source']}; {first['unit']}. "
    commits = ", ".join(dict.fromkeys(line["commit"] for line in lines))
    machine = first["gpu"] or first["cpu"]
    head += f"The paper's on {first['paper_on']}; here {first['model']}, {first['dtype']}, {machine}, {commits}"
    head += f", at most {first['limit']} questions a set" * bool(first["limit"])
    said = Table(("paper / here" if both else "here", *columns), rows).markdown()
    return paragraph(f"{head}.") + "\n\n" + said


def main() -> None:
    """See the module."""
    parser = on_a_model(__doc__)
    parser.add_argument("--names", help="of experiments, separated by commas")
    parser.add_argument("--data", help="a folder of published data")
    parser.add_argument("--limit", type=int, help="most questions of a set, or samples of a task")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--lines", type=Path, help="write the lines here")
    given = parser.parse_args()
    if given.publish is not None:
        publish(given.publish)
        return
    if None in (given.model, given.out, given.names):
        parser.error("MODEL, OUT.jsonl and --names, or --publish")
    silence()
    lab = Lab(
        given.model,
        lambda name: load(name, device=given.device, dtype=given.dtype),
        ResultsFile(given.out),
        given.data,
        words(given.text),
        limit=given.limit,
        tell=_tell,
    )
    number, of = map(int, given.part.split("/"))
    about = {"model": given.name or Path(given.model).stem, "limit": given.limit, "dtype": lab.same["dtype"]}
    about |= provenance(given.commit)
    lines = list(measure([part(one, number, of) for one in named(given.names)], lab, about))
    if given.lines is not None:
        given.lines.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _tell(state: Progress) -> None:
    if not state.tokens:
        print(f"{state.doing}: {state.samples} of {state.of}", flush=True)


if __name__ == "__main__":
    run_as_script(main)
