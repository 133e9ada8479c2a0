"""How far next-token distributions are from full attention's on a pretrained model: KL(full || method) in nats a token.

usage: python3 -m lab.real_models MODEL OUT.jsonl [--method all] [--budget 64,256,1024] [--prompts FILE | --text FILE] ...
       python3 -m lab.real_models --publish [OUT.jsonl...]

The first measures for `--seconds` what OUT.jsonl lacks. With `--prompts`, full attention answers each prompt of a file greedily,
through the chat template where there is one. Without, windows of a text at every length are spread evenly over it: the text itself
follows half of them, full attention's greedy answer to a question the other half. All variants see a block of prompts before any
sees the next. MODEL: as for `python -m lab eval --model`. The second writes lab/results/real_models.jsonl, a line a model, text,
kind of prompt and variant, all tables in docs/notes/real-models.md, and a selection of them in docs/results.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvthaw.cli.options import budget_of, listed, tokens_of, words
from kvthaw.engine.chat_template import Chat
from kvthaw.engine.hf.model import load, silence
from kvthaw.errors import ConfigError, KvthawError
from kvthaw.evaluate.agreement import (
    STEPS,
    Agreement,
    Comparison,
    Prompt,
    longest,
    questions,
    summarize,
    whole_prompts,
    windows,
)
from kvthaw.evaluate.files import read_asset, read_prompts
from kvthaw.evaluate.report import enough
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.evaluate.variant import FULL, Variant, complete, read_variants
from kvthaw.methods import METHODS
from lab.bench.card import provenance
from lab.evaluate.document import Table
from lab.script import commits, on_a_model, paragraph, put, run_as_script

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab" / "results" / "real_models.jsonl"
BEGIN = "<!-- written by lab/real_models.py -->"
QUESTION = "What happens here? Answer in one sentence."
KINDS = {"greedy": "full attention's greedy answers", "text": "the text itself"}


def prompts_of(
    tokenizer: Any, text: str, lengths: Sequence[int], count: int, steps: int, chat: Chat | None = None
) -> list[Prompt]:
    """Return so many prompts of each length that the text follows, and as many that are answered, in turn."""
    found: list[Prompt] = []
    for length in lengths:
        follow = windows(tokenizer, text, length, count, steps)
        ask = questions(tokenizer, text, QUESTION, length, count, chat)
        found += [one for pair in zip(follow, ask, strict=True) for one in pair]
    return found


def measure(by: Agreement, work: Comparison, variants: Sequence[Variant], until: float) -> bool:
    """Add the records that the results lack, a block of prompts after the other. Returns whether there was time for all."""
    wanted: list[Variant] = []
    for variant in (FULL, *variants):
        try:
            wanted.append(complete(by.model, variant))
        except KvthawError as error:
            print(f"{variant} left out: {error}", file=sys.stderr)
    for block in by.blocks(work, by.places(work)):
        for piece in by.missing(work, wanted, block):
            for records in by.compute(piece):
                by.results.add(*records)
                print(f"{records[0]['method']} {records[0]['budget']}: {len(records)} prompts", file=sys.stderr, flush=True)
                if time.monotonic() > until:
                    return False
    return True


def lines(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Summarize every variant of a model, text and kind of prompt over the prompts that all of its variants have."""
    groups: dict[tuple[str, ...], dict[Variant, dict[str, Record]]] = {}
    for record in records:
        group = tuple(str(record[name]) for name in ("model", "text", "answer", "steps", "dtype", "device"))
        groups.setdefault(group, {}).setdefault(Variant.of(record.setting), {})[record["prompt"]] = record
    for variants in groups.values():
        common = set.intersection(*map(set, variants.values()))
        for found in variants.values():
            if common:
                yield _line([record for prompt, record in found.items() if prompt in common])


def _line(records: list[Record]) -> dict[str, Any]:
    found = summarize(records)
    names = (
        "model",
        "method",
        "budget",
        "dense_layers",
        "answer",
        "n",
        "tokens",
        "lengths",
        "kl",
        "kl_95",
        "kl_p99",
        "same_top",
    )
    line = {name: found[name] for name in (*names, "attended_mean", "dtype", "device")}
    rounded = {name: float(f"{line[name]:.4g}") for name in ("kl", "kl_p99", "same_top")}
    line["kl_95"] = line["kl_95"] and [float(f"{value:.4g}") for value in line["kl_95"]]
    return {**line, **rounded, "text": records[0]["text"], **records[0]["about"]}


SHOWN = (
    ("SmolLM2-135M-Instruct", ("longbench-8k, settings of thaw", "longbench-8k")),
    ("Qwen2.5-Coder-0.5B-Instruct", ("longbench-16k",)),
    ("Gemma 3 270M", ("longbench-16k, settings of thaw", "longbench-16k")),
)
"""The models of `selection`, and whose prompts speak for them; an earlier text goes first."""
METHODS_SHOWN = (
    "thaw", "oracle", "pariskv-plus", "icecache-digest", "icecache-digest-device", "retroinfer", "pariskv", "icecache",
    "clusterkv-plus", "pqcache", "clusterkv", "prkv-plus", "prkv", "quest", "snapkv", "streaming",
)  # fmt: skip
"""What `selection` compares: our methods, the papers', exact top-k and the best-known baselines."""


def selection(lines: Sequence[dict[str, Any]]) -> str:
    """Write one table of some methods on the three models, with 256 and 1,024 tokens."""
    cells: dict[tuple[str, str, int], str] = {}
    for model, texts in SHOWN:
        for text in reversed(texts):
            for one in lines:
                if (one["model"], one["text"], one["answer"]) == (model, text, "greedy"):
                    cells[one["method"], model, one["budget"]] = f"{_nats(one['kl'])}, {one['same_top']:.1%}"
    columns = [(model, budget) for budget in (256, 1024) for model, _ in SHOWN]
    head = ["method", *(f"{model.split('-')[0]}, {budget:,}" for model, budget in columns)]
    body = [[f"`{name}`", *(cells.get((name, *one), "not run") for one in columns)] for name in METHODS_SHOWN]
    return Table(head, body).markdown()


def tables(lines: Sequence[dict[str, Any]]) -> str:
    """Write a table a model: of every method under every budget the KL, its interval over prompts, and the share of equal top
    tokens, of answers and of the text."""
    return "\n\n".join(
        _table([one for one in lines if (one["model"], one["text"]) == group])
        for group in dict.fromkeys((one["model"], one["text"]) for one in lines)
    )


def _table(some: Sequence[dict[str, Any]]) -> str:
    budgets = sorted({one["budget"] for one in some if one["method"] != "full"})
    kinds = [kind for kind in KINDS if any(one["answer"] == kind for one in some)]
    cells = {(one["method"], one["dense_layers"], one["answer"], one["budget"]): one for one in some}
    rows = dict.fromkeys((one["method"], one["dense_layers"]) for one in some if one["method"] != "full")
    asked = [(kind, budget) for kind in kinds for budget in budgets]

    def cell(row: tuple[str, int], kind: str, budget: int) -> str:
        one = cells.get((*row, kind, budget))
        if one is None:
            return "-"
        between = "" if one["kl_95"] is None else " ({} to {})".format(*map(_nats, one["kl_95"]))
        attended = one["attended_mean"]
        read = f", {attended:.0f} read" if attended is not None and attended < 0.85 * budget else ""
        return f"{_nats(one['kl'])}{between}, {one['same_top']:.1%}{read}"

    def order(row: tuple[str, int]) -> tuple[bool, float]:
        for budget in (256, *budgets):  # those that 256 tokens were not measured of come last
            if known := [cells[*row, kind, budget]["kl"] for kind in kinds if (*row, kind, budget) in cells]:
                return (budget != 256, sum(known) / len(known))
        return (True, float("inf"))

    first, lengths = some[0], [length for one in some for length in one["lengths"]]
    every = [next(one for one in some if one["answer"] == kind) for kind in kinds]
    counts = " and ".join(f"{one['n']} prompts followed by {KINDS[one['answer']]} ({one['tokens']:,} tokens)" for one in every)
    about = paragraph(
        f"**{first['model']}**, {first['text']}: {counts}; prompts of {min(lengths):,} to {max(lengths):,} tokens; "
        f"{first['dtype']}, {first['gpu'] or first['cpu']}, {commits(some)}."
    )
    head = ["method", "dense layers", *(f"{kind} {budget:,}" for kind, budget in asked)]
    body = [[f"`{row[0]}`", str(row[1]), *(cell(row, *one) for one in asked)] for row in sorted(rows, key=order)]
    table = Table(head, body).markdown()
    said = [enough([one | {"retrieved": None} for one in some if one["answer"] == kind]) for kind in kinds]
    ends = [
        paragraph(one if len(kinds) == 1 else f"{KINDS[kind]}: {one}") for kind, one in zip(kinds, said, strict=True) if one
    ]
    return "\n\n".join([about, table, *ends])


def _nats(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.2f}"


def _variant(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("model", "text", "answer", "method", "budget", "dense_layers"))


def _prompts(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["n"], line["tokens"], line["lengths"]


def publish(paths: Sequence[Path]) -> None:
    """Write the results of files, in place of earlier ones of the same variants, and the tables of the docs.

    Earlier ones of the same models and texts stay if they are of as many tokens of the same prompts."""
    made = list(lines(record for path in paths for record in ResultsFile(path)))
    anew = {(one["model"], one["text"], one["answer"]): _prompts(one) for one in made}
    known = {_variant(one) for one in made}
    kept = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for one in kept:
        group = one["model"], one["text"], one["answer"]
        if _variant(one) not in known and anew.get(group, _prompts(one)) == _prompts(one):
            made.append(one)
    made.sort(key=lambda one: (one["model"], one["text"], one["answer"], one["method"], one["budget"] or 0))
    RESULTS.write_text("".join(json.dumps(one) + "\n" for one in made), encoding="utf-8")
    put(ROOT / "docs" / "notes" / "real-models.md", tables(made), BEGIN)
    put(ROOT / "docs" / "results.md", selection(made), BEGIN)


class Noted(ResultsFile):
    """Results that say which text they are of, and where they were computed."""

    def __init__(self, path: Path, text: str, commit: str | None) -> None:
        super().__init__(path)
        self.text, self.card = text, provenance(commit)

    def add(self, *records: Record) -> None:
        """Add records with what is known of them all."""
        super().add(*(Record(one.setting, {**one.measures, "text": self.text, "about": self.card}) for one in records))


def main() -> None:
    """See the module."""
    parser = on_a_model(__doc__)
    parser.add_argument("--method", default="all", help="all, or methods as for python -m lab eval")
    parser.add_argument("--budget", default="64,256,1024")
    parser.add_argument("--dense-layers", default="", help="several numbers; default: two, or what the model's size says")
    parser.add_argument("--prompts", type=Path, help='a JSON-lines file whose lines hold a "prompt"')
    parser.add_argument("--length", default="2048,4096", help="tokens of a window")
    parser.add_argument("--limit", type=int, help="most prompts, or windows of each length and kind; default: all, or 4")
    parser.add_argument("--tokens", type=int, default=STEPS, help="tokens compared after each prompt")
    parser.add_argument("--batch", type=int, help="prompts that share their steps")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many seconds")
    given = parser.parse_args()
    if given.publish is not None:
        publish(given.publish)
        return
    if given.model is None or given.out is None:
        parser.error("MODEL and OUT.jsonl, or --publish")
    if given.prompts is not None and given.text is not None:
        parser.error("give one of --prompts and --text")
    until = time.monotonic() + given.seconds
    silence()
    names = ",".join(METHODS) if given.method == "all" else given.method
    dense = listed([given.dense_layers], int, "--dense-layers") if given.dense_layers else []
    variants = [one for one in read_variants(names, listed([given.budget], budget_of, "--budget"), (), dense) if one != FULL]
    model, tokenizer = load(given.model, device=given.device, dtype=given.dtype)
    chat = Chat() if getattr(tokenizer, "chat_template", None) is not None else None
    if given.prompts is not None:
        name, prompts = (
            given.prompts.stem,
            whole_prompts(tokenizer, read_prompts(given.prompts, given.limit), longest(model, given.tokens), chat),
        )
    else:
        text, name = (read_asset("book.txt"), "alice") if given.text is None else (words(given.text) or "", given.text.stem)
        lengths = listed([given.length], tokens_of, "--length")
        prompts = prompts_of(tokenizer, text, lengths, given.limit or 4, given.tokens, chat)
    results = Noted(given.out, name, given.commit)
    by = Agreement(model, tokenizer, results, name=given.name or Path(given.model).stem, batch=given.batch)
    done = measure(by, Comparison(tuple(dict.fromkeys(prompts)), given.tokens), variants, until)
    if not done:
        raise ConfigError("the time is over; the same command goes on")


if __name__ == "__main__":
    run_as_script(main)
