"""Small heat maps side by side, as SVG: thousands of cells are a few kilobytes, and drawn in no time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from html import escape

_ACROSS = 8
_WIDE, _TALL = 16, 4  # a cell, in pixels
_LEFT, _TOP, _GAP, _BELOW = 34, 16, 14, 14  # room for depths, a name, between panels, and for lengths
_LEVELS = 20


def heat(panels: Mapping[str, Mapping[tuple[float, int], float]], depths: Sequence[float], lengths: Sequence[int]) -> str:
    """An SVG element: a panel a name, of shares (0..1, red to green) by (depth, length); what is not known stays grey.

    Depths go down, lengths across, both ascending. Raises ValueError without panels, depths or lengths.
    """
    if not (panels and depths and lengths):
        raise ValueError("a heat map needs panels, depths and lengths")
    width, height = _WIDE * len(lengths), _TALL * len(depths)
    step, row = width + _GAP + 22, _TOP + height + _BELOW + _GAP
    parts = []
    for number, (name, shares) in enumerate(panels.items()):
        down, across = divmod(number, _ACROSS)
        x, y = _LEFT + across * step, down * row + _TOP
        ends = [(x, "start", lengths[0]), (x + width, "end", lengths[-1])] if len(lengths) > 1 else [(x, "start", lengths[0])]
        parts += [
            f'<g transform="translate({x} {y})">{_panel(shares, depths, lengths)}</g>',
            f'<text x="{x}" y="{y - 4}" font-size="9" fill="#1c2127">{escape(name)}</text>',
            *(f'<text x="{at}" y="{y + height + 9}" text-anchor="{to}">{_short(n)}</text>' for at, to, n in ends),
        ]
        if not across:
            for at, depth in ((y + 7, depths[0]), (y + height, depths[-1])):
                parts.append(f'<text x="{x - 4}" y="{at}" text-anchor="end">{100 * depth:.0f} %</text>')
    rows, most = -(-len(panels) // _ACROSS), min(len(panels), _ACROSS)
    wide, tall = _LEFT + most * step, rows * row
    view = f'width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}"'
    look = 'font-family="sans-serif" font-size="8" fill="#4b5563"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view} {look}>{"".join(parts)}</svg>'


def _panel(shares: Mapping[tuple[float, int], float], depths: Sequence[float], lengths: Sequence[int]) -> str:
    """One path a colour; equal cells below each other are one rectangle."""
    paths: dict[str, list[str]] = {}
    for column, length in enumerate(lengths):
        colours = [_colour(shares.get((depth, length))) for depth in depths]
        at = 0
        for colour, run in itertools.groupby(colours):
            tall = len(list(run))
            paths.setdefault(colour, []).append(f"M{column * _WIDE} {at * _TALL}h{_WIDE}v{tall * _TALL}h-{_WIDE}z")
            at += tall
    return "".join(f'<path fill="{colour}" d="{"".join(path)}"/>' for colour, path in paths.items())


def _colour(share: float | None) -> str:
    return "#e5e7eb" if share is None else f"hsl({120 * round(share * _LEVELS) // _LEVELS} 60% 58%)"


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
