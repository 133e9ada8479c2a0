"""Pictures in the papers' form: the paper's numbers on the left, ours on the right; of a table both in each cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.evaluate import plot
from lab.reproduce.experiment import Outcome, Value

Numbers = dict[str, dict[str, Value]]


def picture(outcome: Outcome) -> Any:
    """Return the figure of an outcome. Raises ConfigError where matplotlib is missing."""
    one = outcome.experiment
    rows, columns = list(outcome.said.rows), len(outcome.said.columns)
    if one.form == "table":
        figure = plot.new(max(8, 3 + 0.85 * columns), 1.6 + 0.42 * len(rows))
        _table(figure.subplots(), outcome)
    else:
        ours: Numbers = {row: {c: cell.value for (name, c), cell in outcome.cells.items() if name == row} for row in rows}
        figure = plot.new(12 if columns < 9 else 16, 1.8 + max(3.0, 0.16 * len(rows) * (columns if one.form == "bars" else 1)))
        panels = figure.subplots(1, 2)
        for axes, title, numbers in ((panels[0], f"the paper: {outcome.model}", outcome.said.rows), (panels[1], "ours", ours)):
            axes.set_title(title, fontsize=9)
            if any(isinstance(value, float | int) for of in numbers.values() for value in of.values()):
                FORMS[one.form](axes, numbers, outcome)
            else:
                axes.text(0.5, 0.5, "no numbers in the text", ha="center", va="center", fontsize=9)
                axes.axis("off")
        handles = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        if handles:
            named = [row for row in rows if row in handles]
            across = max(1, int(figure.get_size_inches()[0] / (0.6 + 0.065 * max(map(len, named)))))
            figure.legend([handles[row] for row in named], named, loc="outside lower center", ncols=across, fontsize=6)
    row = next(iter(outcome.cells))[0]
    figure.suptitle(f"{one.source}: {one.title}, {one.unit}\nours: {outcome.on(row)}", fontsize=9)
    return figure


def _table(axes: Any, outcome: Outcome) -> None:
    axes.axis("off")
    columns = outcome.said.columns
    text = [
        [f"{shown(of[c])}\n{shown(cell.value if (cell := outcome.cells.get((row, c))) else None)}" for c in columns]
        for row, of in outcome.said.rows.items()
    ]
    made = axes.table(cellText=text, rowLabels=list(outcome.said.rows), colLabels=list(columns), loc="center", cellLoc="center")
    made.auto_set_font_size(False)
    made.set_fontsize(7)
    made.scale(1, 1.9)
    for (row, column), cell in made.get_celld().items():
        cell.set_linewidth(0.4)
        if row > 0 and column >= 0:
            cell.set_facecolor("#f6f6f6" if row % 2 else "white")
    axes.set_title("in each cell: the paper above, ours below", fontsize=8)


def _bars(axes: Any, numbers: Numbers, outcome: Outcome) -> None:
    rows, columns, named = list(outcome.said.rows), outcome.said.columns, set[str]()
    for place, column in enumerate(columns):
        for number, row in enumerate(rows):
            value, at = numbers[row].get(column), place + 0.8 * (number + 0.5) / len(rows) - 0.4
            if isinstance(value, float | int):
                axes.barh(at, value, 0.8 / len(rows), color=_colour(number), label=None if row in named else row)
                named.add(row)
                axes.text(value, at, f" {shown(value)}", va="center", fontsize=5)
            elif value is not None:
                axes.text(0, at, f" {value}", va="center", fontsize=5)
    axes.set_yticks(range(len(columns)), columns, fontsize=7)
    axes.invert_yaxis()


def _lines(axes: Any, numbers: Numbers, outcome: Outcome) -> None:
    columns = outcome.said.columns
    for number, row in enumerate(outcome.said.rows):
        known = [(place, v) for place, c in enumerate(columns) if isinstance(v := numbers[row].get(c), float | int)]
        if known:
            joined = [point for point in known if any(map(str.isdigit, columns[point[0]]))]  # others sum up, off the line
            axes.plot(*zip(*known, strict=True), "o", markersize=3, color=_colour(number), label=row)
            axes.plot([place for place, _ in joined], [value for _, value in joined], color=_colour(number))
    axes.set_xticks(range(len(columns)), columns, fontsize=7, rotation=30)
    axes.set_xlim(-0.3, len(columns) - 0.7)
    axes.set_ylabel(outcome.experiment.unit, fontsize=8)


def _points(axes: Any, numbers: Numbers, outcome: Outcome) -> None:
    """The first column across, the second up; where only one of both is known, a line."""
    across, up = outcome.said.columns[:2]
    for number, (row, of) in enumerate(numbers.items()):
        x, y = of.get(across), of.get(up)
        if isinstance(x, float | int) and isinstance(y, float | int):
            axes.plot(x, y, "o", color=_colour(number), label=row)
        elif isinstance(y, float | int):
            axes.axhline(y, color=_colour(number), linewidth=0.8, label=row)
    most = max((y for of in numbers.values() if isinstance(y := of.get(up), float | int)), default=1)
    axes.set(xlabel=across, ylabel=up, ylim=(0, 1.1 * most))
    if not any(isinstance(of.get(across), float | int) for of in numbers.values()):
        axes.set_xticks([])


def _heat(axes: Any, numbers: Numbers, outcome: Outcome) -> None:
    """Accuracy by depth and column, the rows one below the other; without depths a row alone."""
    columns, ticks, cells = outcome.said.columns, list[str](), list[list[float]]()
    ours = numbers is not outcome.said.rows
    for row, of in numbers.items():
        parts = {c: cell.parts for c in columns if ours and (cell := outcome.cells.get((row, c))) and cell.parts}
        depths = sorted({depth for part in parts.values() for depth in part})
        for depth in depths:
            ticks.append(f"{row}, {100 * depth:.0f} %")
            cells.append([parts.get(c, {}).get(depth, float("nan")) for c in columns])
        if not depths:
            ticks.append(row)
            cells.append([float(v) if isinstance(v := of.get(c), float | int) else float("nan") for c in columns])
    axes.imshow(cells, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=7)
    step = -(-len(ticks) // 30)
    axes.set_yticks(range(0, len(ticks), step), ticks[::step], fontsize=6)


FORMS: dict[str, Callable[[Any, Numbers, Outcome], None]] = {"bars": _bars, "lines": _lines, "points": _points, "heat": _heat}
"""Form of a figure -> what draws one side of it. "table" has both sides in each cell."""


def shown(value: Value) -> str:
    """Return a number with the digits that tell something."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _colour(number: int) -> str:
    return f"C{number % 10}"
