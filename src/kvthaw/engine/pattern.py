"""Regular expressions of schemas: what of them a grammar can follow, what they cost as a grammar, and how xgrammar reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?:)?|\)|\||\{(\d*)(,?)(\d*)\}|[*+?]|.", re.DOTALL)
MOST_COUNT = 128
"""The largest count in a pattern. xgrammar represents larger ones separately, which makes masks slow."""
_BROAD = 16  # a class of at least this many characters counts as matching any text
_BEYOND = frozenset(chr(0x10FF00 + i) for i in range(_BROAD))  # for all characters beyond ASCII
_WRITTEN = frozenset(chr(code) for code in range(32, 127)) - {'"', "\\"}  # what JSON writes as itself
_DIGITS = frozenset("0123456789")
_WORDS = frozenset(char for char in _WRITTEN if char.isalnum()) | {"_"}
_ALL = _WRITTEN | _BEYOND
_SHORTHANDS: dict[str, AbstractSet[str]] = {
    "d": _DIGITS, "D": _ALL - _DIGITS, "w": _WORDS, "W": _ALL - _WORDS, "s": {" "}, "S": _ALL - {" "},
    **dict.fromkeys("nrtvf0b", frozenset()),
}  # fmt: skip
_ITEMS = re.compile(r"(\\.|[^\\])-(\\.|[^\\])|(\\.|[^\\])", re.DOTALL)  # of a class
_MOST_COPIES = 257  # limit on copies to examine; a pattern with this number is refused
_PLAIN = {"]": r"\]", "[^]": "."}
"""Parts that xgrammar makes no state machine of, and equal ones."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a part of a pattern.

    A character counts in `broad`, `pairs` and `first` by the share of all text that it matches, at most 1.

    size: characters, with counts written out.
    count: the largest count.
    broad: sum of the characters' shares.
    pairs: pairs of characters that may follow each other.
    first, last: characters that it may begin and end with.
    empty: whether it may match the empty string.
    """

    size: int = 0
    count: int = 0
    broad: float = 0.0
    pairs: float = 0.0
    first: float = 0.0
    last: int = 0
    empty: bool = True

    @property
    def passes(self) -> float:
        """How often compiling tries all tokens: once for each character that may follow another. Three times if a text may go many
        ways."""
        return self.pairs * min(3.0, max(1.0, self.pairs / max(1.0, self.broad)))

    def then(self, other: Cost) -> Cost:
        """Return the cost of this part followed by another."""
        both = self.or_else(other)
        return replace(
            both,
            pairs=both.pairs + self.last * other.first,
            first=self.first + (other.first if self.empty else 0),
            last=other.last + (self.last if other.empty else 0),
            empty=self.empty and other.empty,
        )

    def or_else(self, other: Cost) -> Cost:
        """Return the cost of this part or another."""
        return Cost(
            self.size + other.size,
            max(self.count, other.count),
            self.broad + other.broad,
            self.pairs + other.pairs,
            self.first + other.first,
            self.last + other.last,
            self.empty or other.empty,
        )

    def repeated(self, least: int, most: int | None) -> Cost:
        """Return the cost of this part repeated `least` to `most` times.

        most: None: unlimited.
        """
        copies = _NOTHING
        bound = max(least, most or 0)
        if most is None:
            again = replace(self, pairs=self.pairs + self.last * self.first)
            copies = replace(again, empty=self.empty or not least)
            least -= 1
        else:
            for _ in range(min(_MOST_COPIES, most - least)):
                copies = replace(self.then(copies), empty=True)
        for _ in range(min(_MOST_COPIES, least)):
            copies = self.then(copies)
        return replace(copies, count=max(self.count, bound))


_NOTHING = Cost()


def cost(pattern: str) -> Cost:
    """Return the cost of a pattern; arbitrary for a malformed one."""
    open_groups: list[list[list[Cost]]] = [[[]]]  # the alternatives of each group, and the parts of each
    for part in _PARTS.finditer(pattern):
        text, alternatives = part[0], open_groups[-1]
        if text in ("(", "(?:"):
            open_groups.append([[]])
        elif text == ")" and len(open_groups) > 1:
            group = _either(open_groups.pop())
            open_groups[-1][-1].append(group)
        elif text == "|":
            alternatives.append([])
        elif text in ("*", "+", "?") or (part[2] is not None and part[1] + part[3]):
            if alternatives[-1]:
                alternatives[-1].append(alternatives[-1].pop().repeated(*_counts(text, part)))
        else:
            share = min(1.0, len(_matched(text)) / _BROAD)
            alternatives[-1].append(Cost(size=1, broad=share, first=share, last=1, empty=False))
    while len(open_groups) > 1:
        group = _either(open_groups.pop())
        open_groups[-1][-1].append(group)
    whole = _either(open_groups[0])
    return replace(whole, pairs=whole.pairs + whole.first)


def anchored(pattern: str) -> bool:
    """Return whether a pattern has an anchor, which xgrammar ignores."""
    return any(part[0] in ("^", "$", r"\b", r"\B") for part in _PARTS.finditer(pattern))


def without_characters(pattern: str) -> str | None:
    """Return the first part of a pattern that matches no character, or only characters that JSON writes as escapes; None if there
    is none."""
    return next((part[0] for part in _PARTS.finditer(pattern) if not _matched(part[0])), None)


def plain(pattern: str) -> str:
    """Return an equal pattern of ASCII. xgrammar makes a state machine of it.

    Without a state machine masks take up to seconds, and JSON may have quotes that end no string. `?` becomes {0,1}: xgrammar
    matches b by (b+c)?. Marks of lazy repetition are left out.
    """
    written, repeats = list[str](), False
    for part in _PARTS.finditer(pattern):
        once = "" if repeats else "{0,1}"
        written.append(once if part[0] == "?" else _PLAIN.get(part[0], part[0]))
        repeats = part[0] in ("*", "+", "?") or part[2] is not None
    return re.sub(r"\\?([^\0-\x7f])", lambda found: f"\\u{{{ord(found[1]):x}}}", "".join(written))


def _matched(text: str) -> AbstractSet[str]:
    """Return what a part of a pattern matches, as a part of _ALL and the first characters of ranges beyond ASCII."""
    if text[0] == "[" and len(text) > 1:
        negated = text[1] == "^"
        found = frozenset[str]().union(*(_item(*item.groups()) for item in _ITEMS.finditer(text[1 + negated : -1])))
        return _ALL - found if negated else found
    if text[0] == "\\" and text[1:] in _SHORTHANDS:
        return _SHORTHANDS[text[1:]]
    return _ALL if text == "." else set(text[-1]) if text >= " " else set()


def _item(first: str | None, last: str | None, single: str | None) -> AbstractSet[str]:
    """Return what a range or a single item of a class matches."""
    if single is not None:
        return _matched(single)
    begin, end = (first or "")[-1], (last or "")[-1]
    beyond = range(max(ord(begin), 127), ord(end) + 1)[:_BROAD]
    return {char for char in _WRITTEN if begin <= char <= end} | {chr(code) for code in beyond}


def _either(alternatives: Iterable[Sequence[Cost]]) -> Cost:
    found = None
    for parts in alternatives:
        one = _NOTHING
        for part in parts:
            one = one.then(part)
        found = one if found is None else found.or_else(one)
    return found or _NOTHING


def _counts(text: str, part: re.Match[str]) -> tuple[int, int | None]:
    if text in ("*", "+", "?"):
        return (1 if text == "+" else 0), (1 if text == "?" else None)
    least, most = int(part[1] or 0), int(part[3]) if part[3] else None
    return least, (most if part[2] else least)
