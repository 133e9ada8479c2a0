"""Drawings of a comparison, as SVG inside the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.cells import Cell
from kvthaw.evaluate.compare import SUBJECTS, chosen, whole, work
from kvthaw.evaluate.describe import ROW_BYTES, describe
from kvthaw.evaluate.document import Picture
from kvthaw.evaluate.heat import heat
from kvthaw.methods import resolve

_BLUES = dict(zip(SUBJECTS, ("#0b6fb8", "#c2410c", "#15803d", "#7c3aed"), strict=True))
_MARKS = "osD^v<>pPXh*dH8"


def check_drawing() -> None:
    """Raise ConfigError where nothing can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("the report's plots need matplotlib: pip install 'kvthaw[plot]', or take --report never") from None


def accuracy_by_budget(cells: Sequence[Cell]) -> Picture | None:
    """A line a method over the budgets, full attention beside them."""
    found = {name: _points(cells, name) for name in _methods(cells)}
    lines = {name: [(budget, right) for budget, right, _ in points] for name, points in found.items()}
    return _lines(cells, lines, "accuracy", _full(cells), "Accuracy against budget, over the work that full attention can do.")


def recall_by_budget(cells: Sequence[Cell]) -> Picture | None:
    """A line a method: the share of the exact best rows that were selected. None where selections were not observed."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name in _methods(cells):
        for budget in _budgets(cells):
            seen = [c.means["recall_at_k"] for c in cells if c.method == name and c.budget == budget]
            known = [value for value in seen if value is not None]
            if known:
                lines.setdefault(name, []).append((budget, sum(known) / len(known)))
    return _lines(cells, lines, "recall at k", None, "Share of the exact best rows that were selected, against budget.")


def accuracy_by_bytes(cells: Sequence[Cell]) -> Picture | None:
    """A point a method and budget at the longest length that has all budgets: bytes on the device, of KV and of what the index
    keeps for every key, against accuracy. The index has the share of full attention's KV that it has with 128 dimensions in bf16
    and one KV head."""
    cells = whole(cells)
    longest = max((length for _, length in work(cells)), default=None)
    if longest is None:
        return None
    some = [cell for cell in cells if cell.length == longest]
    full = chosen(some, "full", None)
    most = max(c.kv_device_bytes for c in full)
    axis = _axis()
    for name in _methods(some):
        held = most * _index_share(name)
        points = [((size + held) / 2**20, right) for _, right, size in _points(some, name)]
        axis.plot(*zip(*points, strict=True), **_look(some, name)) if points else None
    axis.plot(most / 2**20, _full(some), "k*", markersize=11, label="full")
    axis.set_xscale("log")
    axis.set_xlabel("KV and index on the device, MiB")
    axis.set_ylabel("accuracy")
    return Picture(_svg(axis), f"Accuracy against bytes of KV and index on the device at {longest:,} tokens, a point a budget.")


@cache
def _index_share(name: str) -> float:
    """Bytes that a method's index keeps on the device, as a share of those of all rows."""
    held: int | None = describe(resolve(name))["bytes_a_key"]
    return (held or 0) / ROW_BYTES


def heat_maps(cells: Sequence[Cell], task: str, budget: int | float) -> Picture | None:
    """Accuracy by depth (down) and length (across), a panel a method. None for a task without depths."""
    some = [(c, c.at_depths()) for c in cells if c.task == task and (c.full or c.budget == budget)]
    panels: dict[str, dict[tuple[float, int], float]] = {}
    for cell, shares in some:
        panels.setdefault(cell.method, {}).update({(depth, cell.length): share for depth, share in shares.items()})
    depths, lengths = sorted({d for _, shares in some for d in shares}), sorted({c.length for c, _ in some})
    if not depths:
        return None
    text = f"{task} with {budget} tokens: accuracy by depth (down) and length (across), red 0 to green 100 %."
    return Picture(heat(panels, depths, lengths), text)


def _methods(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.method for cell in cells if not cell.full))


def _budgets(cells: Sequence[Cell]) -> list[int | float]:
    return sorted({cell.budget for cell in cells if cell.budget is not None})


def _right(cells: Sequence[Cell]) -> float:
    return sum(sum(c.scores.values()) for c in cells) / sum(c.n for c in cells)


def _full(cells: Sequence[Cell]) -> float | None:
    full = chosen(cells, "full", None)
    return _right(full) if full else None


def _points(cells: Sequence[Cell], name: str) -> list[tuple[float, float, int]]:
    """Budget, accuracy and bytes of a method, by budget."""
    found = [(budget, chosen(cells, name, budget)) for budget in _budgets(cells)]
    return [(budget, _right(some), max(c.kv_device_bytes for c in some)) for budget, some in found if some]


def _axis() -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(9, 4.8), layout="constrained").add_subplot()


def _look(cells: Sequence[Cell], name: str) -> dict[str, Any]:
    subject, number = name in _BLUES, _methods(cells).index(name)
    return {
        "label": name,
        "color": _BLUES.get(name, f"C{number % 10}"),
        "marker": _MARKS[number % len(_MARKS)],
        "linewidth": 2.4 if subject else 0.9,
        "alpha": 1.0 if subject else 0.7,
        "markersize": 6 if subject else 4,
    }


def _lines(
    cells: Sequence[Cell], lines: dict[str, list[tuple[float, float]]], what: str, full: float | None, text: str
) -> Picture | None:
    if not any(lines.values()):
        return None
    axis = _axis()
    for name, points in lines.items():
        if points:
            axis.plot(*zip(*points, strict=True), **_look(cells, name))
    if full is not None:
        axis.axhline(full, color="black", linestyle="--", linewidth=1, label="full")
    budgets = _budgets(cells)
    axis.set_xscale("log", base=2)
    axis.set_xticks(budgets, [str(budget) for budget in budgets])
    axis.set_xlabel("budget, tokens per KV head and step")
    axis.set_ylabel(what)
    return Picture(_svg(axis), text)


def _svg(axis: Any) -> str:
    """An axis' figure as an SVG element, the same for the same numbers."""
    import matplotlib

    axis.set_ylim(-0.03, 1.03)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    out = io.StringIO()
    about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": "kvthaw"}):
        axis.figure.savefig(out, format="svg", metadata=about)
    return re.sub(r"^.*?(?=<svg )", "", out.getvalue(), flags=re.DOTALL)
