"""The report of a comparison: goals, tables like the papers', paired differences, heat maps and plots, from cells alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvthaw.evaluate import perplexity
from kvthaw.evaluate.cells import Cell
from kvthaw.evaluate.charts import accuracy_by_budget, accuracy_by_bytes, heat_maps, recall_by_budget
from kvthaw.evaluate.compare import (
    BASELINES,
    KEEPS,
    SUBJECTS,
    WORKS,
    Goal,
    Paired,
    Protocol,
    check_one_model,
    chosen,
    goals,
    hopes,
    protocols,
    under,
    whole,
    work,
)
from kvthaw.evaluate.describe import describe, word
from kvthaw.evaluate.document import Block, Document, Fold, Heading, Items, Share, Table, Text, Value
from kvthaw.evaluate.metrics import wilson
from kvthaw.methods import resolve


def all_goals(cells: Sequence[Cell]) -> dict[Protocol, list[Goal]]:
    """The goals under every protocol that was run."""
    return {protocol: goals(under(cells, protocol)) for protocol in protocols(cells)}


def overview(cells: Sequence[Cell], stretches: Sequence[perplexity.Line] = ()) -> Document:
    """Everything that the cells and the lines of perplexity say, nothing left out. Raises ConfigError where they are not of one
    comparison."""
    if not cells:
        return Document("Methods on the same work", _perplexity(stretches))
    check_one_model(cells)
    model, weights, dtype, device, version, _ = cells[0].about
    tasks, lengths = (list(dict.fromkeys(getattr(c, name) for c in cells)) for name in ("task", "length"))
    counts = sorted({cell.n for cell in cells})
    several = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    what = (
        f"Model {model} ({weights}) in {dtype} on {device}, kvthaw {version}. {len(cells):,} cells: {len(tasks)} tasks at "
        f"{', '.join(f'{n:,}' for n in sorted(lengths))} tokens, {several} samples a cell, the same under every method. A budget "
        "is the most tokens that attention reads per KV head and step, sink, window and buffer included. Percent with 95 % "
        "intervals: Wilson's of an accuracy, Agresti and Min's of a paired difference."
    )
    blocks: list[Block] = [Text(what)]
    for protocol in protocols(cells):
        blocks += _protocol(under(cells, protocol), protocol)
    return Document("Methods on the same work", [*blocks, *_perplexity(stretches), *_methods(cells)])


def named(protocol: Protocol) -> str:
    """A protocol in words."""
    question, dense = protocol
    how = "the question in the prefill" if question == "dense" else "the question through the method"
    return f"{how}, " + (f"{dense} dense layers" if dense else "every layer under the method")


def _protocol(cells: list[Cell], protocol: Protocol) -> list[Block]:
    left_out = sorted({(c.task, c.length) for c in cells if c.full} - work(cells))
    blocks: list[Block] = [Heading(named(protocol).capitalize())]
    blocks += _goals(goals(cells))
    if left_out:
        names = ", ".join(f"{task} {length:,}" for task, length in left_out)
        blocks.append(
            Text(f"Full attention is right less than {100 * WORKS:.0f} % of the time, so goals and means leave out: {names}.")
        )
    blocks += [Heading("Mean accuracy by budget", 3), by_budget(cells)]
    blocks += [Heading("Accuracy by task, all lengths together", 3), _table(cells, _by_task(cells))]
    for length in sorted({cell.length for cell in cells}):
        some = [cell for cell in cells if cell.length == length]
        blocks.append(Fold(f"At {length:,} tokens", [_table(some, _by_task(some))]))
    blocks += [Heading("Differences over the same samples", 3), *_differences(cells)]
    blocks.append(Heading("Plots", 3))
    pictures = (accuracy_by_budget(cells), accuracy_by_bytes(cells), recall_by_budget(cells))
    blocks += [picture for picture in pictures if picture is not None]
    for budget in sorted({c.budget for c in cells if c.budget is not None}):
        maps = [heat_maps(cells, task, budget) for task in dict.fromkeys(c.task for c in cells)]
        blocks.append(Fold(f"Depth by length with {budget} tokens", [picture for picture in maps if picture is not None]))
    return blocks


def _goals(of: list[Goal]) -> list[Block]:
    groups = {True: "met", False: "not met", None: "not measured"}
    split = {met: [goal for goal in of if goal.met is met] for met in groups}
    counts = "; ".join(f"{len(split[met])} {text}" for met, text in groups.items())
    how = (
        f"{counts}, of {len(of)}. Over all samples of the tasks and lengths where full attention is right at least "
        f"{100 * WORKS:.0f} % of the time: a subject ({', '.join(SUBJECTS)}) keeps at least {100 * KEEPS:.0f} % of full "
        "attention's accuracy, and its mean difference to a baseline is not below zero."
    )
    blocks: list[Block] = [Heading("Goals", 3), Text(how), verdicts(of)]
    for met, text in groups.items():
        if split[met]:
            rows = [[goal.text, *_paired(goal.paired)] for goal in split[met]]
            table = Table(("goal", "difference", "its accuracy", "the other's"), rows)
            blocks.append(Fold(f"{text.capitalize()} ({len(rows)})", [table], opened=met is False))
    return blocks


def verdicts(of: Sequence[Goal]) -> Table:
    """What came of the goals: a row for those that belong together, and the one of them with the least difference."""
    rows: list[list[Value]] = []
    for hope in hopes(of):
        least = hope.tightest
        rows.append([hope.text, hope.verdict, *(["-"] * 4 if least is None else [least.other, *_paired(least.paired)])])
    return Table(("goal", "verdict", "the nearest", "difference", "its accuracy", "the other's"), rows)


def _paired(paired: Paired | None) -> list[Value]:
    if paired is None:
        return ["-", "-", "-"]
    gap = Share(paired.difference, paired.low, paired.high, paired.n, signed=True)
    return [gap, f"{100 * paired.mine:.1f}", f"{100 * paired.theirs:.1f}"]


Column = tuple[str, list[Cell]]


def _by_task(cells: Sequence[Cell]) -> list[Column]:
    return [(task, [c for c in cells if c.task == task]) for task in dict.fromkeys(c.task for c in cells)]


def _rows(cells: Sequence[Cell]) -> list[tuple[str, int | float | None, int | None]]:
    """Method, budget and retrieved: full attention, then by budget, the best mean first."""
    where = work(cells)

    def order(row: tuple[str, int | float | None, int | None]) -> tuple[bool, float, float, str]:
        method, budget, retrieved = row
        mine = [c for c in _of(cells, row) if (c.task, c.length) in where]
        right = sum(sum(c.scores.values()) for c in mine) / max(1, sum(c.n for c in mine))
        return method != "full", budget or retrieved or 0, -right, method

    return sorted({(c.method, c.budget, c.retrieved) for c in cells}, key=order)


def _of(cells: Sequence[Cell], row: tuple[str, int | float | None, int | None]) -> list[Cell]:
    return [c for c in cells if (c.method, c.budget, c.retrieved) == row]


def _share(cells: Sequence[Cell]) -> Value:
    scores = [score for cell in cells for score in cell.scores.values()]
    if not scores:
        return "-"
    mean = sum(scores) / len(scores)
    return Share(mean, *wilson(mean, len(scores)), len(scores))


def _table(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """One row a method and budget; the mean is over what full attention can do."""
    where, rows = work(cells), []
    for row in _rows(cells):
        method, budget, retrieved = row
        mine = _of(cells, row)
        asked = "-" if budget is None else str(budget)
        able = [c for c in mine if (c.task, c.length) in where]
        held = [c.means["attended_mean"] for c in mine if c.means["attended_mean"] is not None]
        attended = f"{sum(held) / len(held):.0f}" if held else "all"
        parts = [_share(_of(some, row)) for _, some in columns]
        asked = f"{retrieved} rows" if retrieved is not None else asked
        most = max((c.kv_device_bytes for c in mine), default=0)
        rows.append([method, asked, _share(able), *parts, attended, f"{most / 2**20:.2f}"])
    heads = ("method", "budget", "mean", *(name for name, _ in columns), "tokens attended", "KV MiB on the device")
    return Table(heads, rows)


def by_budget(cells: Sequence[Cell]) -> Table:
    """Mean accuracy over the work that full attention can do and that was run at every budget, and the samples that all have: a row
    a method, the best first, a column a budget."""
    cells = _alike(whole(cells))
    budgets = sorted({c.budget for c in cells if c.budget is not None})
    names = list(dict.fromkeys(c.method for c in cells if not c.full and c.budget is not None))
    found = {name: [chosen(cells, name, budget) for budget in budgets] for name in names}

    def right(name: str) -> float:
        every = [cell for some in found[name] for cell in some]
        return sum(sum(c.scores.values()) for c in every) / max(1, sum(c.n for c in every))

    rows = [["full", *[_share(chosen(cells, "full", None))] * len(budgets)]]
    rows += [[name, *map(_share, found[name])] for name in sorted(names, key=right, reverse=True)]
    return Table(("method", *(f"{budget} tokens" for budget in budgets)), rows)


def _alike(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with the samples that all of the same task and length have."""
    shared: dict[tuple[str, int], set[tuple[int, float | None]]] = {}
    for cell in cells:
        shared.setdefault((cell.task, cell.length), set(cell.scores)).intersection_update(cell.scores)
    own = ((cell, shared[cell.task, cell.length]) for cell in cells)
    return [replace(c, scores={place: score for place, score in c.scores.items() if place in of}) for c, of in own if of]


def _differences(cells: Sequence[Cell]) -> list[Block]:
    """To full attention, and of every subject to every baseline, at each budget."""
    budgets = sorted({c.budget for c in cells if c.budget is not None})
    full = chosen(cells, "full", None)
    methods = [name for name in dict.fromkeys(row[0] for row in _rows(cells)) if name != "full"]
    to_full = [[name, *(_gap(chosen(cells, name, b), full) for b in budgets)] for name in methods]
    blocks: list[Block] = [
        Text("Each method less full attention, in points, over the samples that full attention's cells above share with it."),
        Table(("method", *(f"at {budget}" for budget in budgets)), to_full),
    ]
    present = [name for name in BASELINES if any(c.method == name for c in cells)]
    subjects = [name for name in SUBJECTS if any(c.method == name for c in cells)]
    for budget in budgets if present and subjects else ():
        rows = [
            [base, *(_gap(chosen(cells, name, budget), chosen(cells, base, budget)) for name in subjects)] for base in present
        ]
        table = Table(("baseline", *(f"{name} less it" for name in subjects)), rows)
        blocks.append(Fold(f"Subjects less baselines, both at {budget}", [table]))
    return blocks


def _gap(mine: Sequence[Cell], theirs: Sequence[Cell]) -> Value:
    return _paired(Paired.of(mine, theirs))[0]


def _perplexity(lines: Sequence[perplexity.Line]) -> list[Block]:
    """Perplexity by length, and the difference to full attention on the same tokens."""
    by_variant: dict[tuple[str, str, int], dict[int, dict[int, perplexity.Line]]] = {}
    for line in lines:
        of = line.setting
        asked = "-" if of.budget is None and of.retrieved is None else str(of.budget or f"{of.retrieved} rows")
        by_variant.setdefault((of.method, asked, of.dense_layers), {}).setdefault(of.length, {})[of.seed] = line
    full, lengths = by_variant.get(("full", "-", 0), {}), sorted({line.setting.length for line in lines})
    if not full:
        return []
    rows: list[tuple[float, list[Value]]] = []
    for (method, asked, dense), found in by_variant.items():
        parts: list[Value] = []
        total = 0.0
        for length in lengths:
            both = sorted(found.get(length, {}).keys() & full.get(length, {}).keys())
            if not both:
                parts.append("-")
                continue
            one = perplexity.Summary.of([found[length][seed] for seed in both], [full[length][seed] for seed in both])
            low, high = one.difference_95
            apart = "" if method == "full" else f", {one.difference:+.3f} nats ({low:+.3f} to {high:+.3f})"
            parts.append(f"{one.perplexity:.2f}{apart}, n={one.n}")
            total += one.difference
        rows.append((total, [method, asked, str(dense), *parts]))
    rows.sort(key=lambda row: row[0])
    columns = ("method", "budget", "dense layers", *(f"after {length:,}" for length in lengths))
    about = (
        f"Perplexity of the next {lines[0].setting.steps} tokens of the book, sent one by one through the method, the best first; "
        "beside it the difference to full attention on the same tokens with its normal 95 % interval. n: places in the book."
    )
    return [Heading("Perplexity"), Text(about), Table(columns, [row for _, row in rows])]


def _methods(cells: Sequence[Cell]) -> list[Block]:
    """What the methods are, as `kvthaw methods` has it."""
    names = sorted({cell.method for cell in cells})
    records = [{**describe(resolve(name)), "name": name} for name in names]
    columns = tuple(column.replace("_", " ") for column in records[0])
    return [
        Heading("The methods"),
        Table(columns, [[word(value) for value in record.values()] for record in records]),
        Items(
            ["bytes a key: of the index, on the device, for a key of a KV head of 128 dimensions in bf16; not in the KV above."]
        ),
    ]
