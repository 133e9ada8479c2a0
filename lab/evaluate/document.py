"""A report of a few kinds of blocks, as one self-contained HTML page and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

from lab.evaluate.assets import read_own


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95 % interval and its number of samples.

    signed: a difference.
    """

    value: float
    low: float
    high: float
    n: int
    signed: bool = False

    @property
    def text(self) -> str:
        """In percent."""
        return _percent(self.value, self.signed) if self.signed else f"{100 * self.value:.1f}".removesuffix(".0")

    @property
    def detail(self) -> str:
        """The interval and n."""
        return f"{_percent(self.low, self.signed)} to {_percent(self.high, self.signed)}, n={self.n}"

    @property
    def colour(self) -> str:
        """Orange through white to blue, over the page's own background; differences from white to one of them."""
        apart = self.value if self.signed else 2 * self.value - 1
        return f"hsl({210 if apart >= 0 else 28} 85% 50% / {45 * min(1.0, abs(apart)):.0f}%)"


Value = Share | str


class Part(NamedTuple):
    """A part of a report in both forms, HTML and Markdown."""

    html: str
    markdown: str


def heading(text: str, level: int = 2) -> Part:
    """Return a title; level 1 is the page's."""
    return Part(f"<h{level}>{escape(text)}</h{level}>", f"{'#' * level} {_plain(text)}")


def paragraph(text: str) -> Part:
    """Return a paragraph."""
    return Part(f"<p>{escape(text)}</p>", _plain(text))


def picture(svg: str, text: str) -> Part:
    """Return a drawing, inline SVG; HTML only.

    text: its description.
    """
    drawn = f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>"
    return Part(drawn, f"*(In the HTML report: {_plain(text)})*")


def fold(title: str, block: Part) -> Part:
    """Return a block that opens on a click."""
    opens = f"<details><summary>{escape(title)}</summary>\n{block.html}\n</details>"
    return Part(opens, f"**{_plain(title)}**\n\n{block.markdown}")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under columns."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def html(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in self.rows)
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def markdown(self) -> str:
        lines = [[_plain(column) for column in self.columns], ["---"] * len(self.columns)]
        lines += [[f"{v.text} ({v.detail})" if isinstance(v, Share) else _plain(v) for v in row] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def part(self) -> Part:
        """Return it as a part of a report."""
        return Part(self.html(), self.markdown())


@dataclass(frozen=True, slots=True)
class Document:
    """All of a report."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """Return the report as one self-contained page, without scripts."""
        body = "\n".join(part.html for part in (heading(self.title, 1), *self.parts))
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{read_own('report.css')}</style></head><body>\n{body}\n</body></html>\n"
        )

    def markdown(self) -> str:
        """Return the same without the pictures."""
        return "\n\n".join(part.markdown for part in (heading(self.title, 1), *self.parts)) + "\n"


def _plain(text: str) -> str:
    """Escape a text for one line of Markdown, in which HTML would count."""
    return escape(" ".join(text.split()), quote=False).replace("|", "\\|")


def _cell(value: Value) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    return f'<td class="share" style="background:{value.colour}">{value.text}<small>{value.detail}</small></td>'


def _percent(value: float, signed: bool) -> str:
    return f"{100 * value:+.1f}" if signed else f"{100 * value:.0f}"
