"""LongGenBench (Wu et al., 2024, arXiv 2409.02076): one document of hundreds of entries, some with required content."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .base import Ask, Benchmark, Generation, Item, Record

KINDS = ("once", "range", "periodic")
JUDGE = "{entry}Does this description include the {what}? Please answer with 'yes' or 'no' only."
_STOP = {"a", "an", "and", "at", "for", "from", "in", "of", "on", "or", "the", "to", "with"}
_STOP |= {"featuring", "attend", "attending", "participating"}


@dataclass(frozen=True)
class LongGenBench(Benchmark):
    """A diary, a menu, a tower or a town with a given number of entries, each starting with `#*#`.

    The counts use the paper's terms. `completion` is the share of the entries that were written. `once`, `range` and
    `periodic` are the shares of each kind's demands that are met in their entry, of all demands (STIC-2 by kind). `score`
    is the mean of the three (IceCache's "Avg. Accuracy"). `stic1` is the same over written entries only. A model judges
    whether an entry meets a demand, as published (`--judge`). Without a judge, an entry meets a demand if it contains all
    its content words.
    """

    def item(self, record: Record, number: int) -> Item:
        """Fields: prompt, checks_once, checks_range, checks_periodic, type, prefix, number."""
        gold: dict[str, Any] = {kind: dict(record[f"checks_{kind}"]) for kind in KINDS}
        gold |= {"type": str(record["type"]), "prefix": str(record["prefix"]), "number": int(record["number"])}
        return Item(str(number), "", str(record["prompt"]), gold)

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Return the shares named above.

        ask: the judge.
        """
        written = entries(item.gold["prefix"] + output, item.gold["type"])
        shares, held, tried = {}, 0, 0
        for kind in KINDS:
            wanted = {int(n): str(what) for n, what in item.gold[kind].items()}
            there = {n: what for n, what in wanted.items() if n in written}
            right = sum(holds(written[n], what, ask) for n, what in there.items())
            held, tried = held + right, tried + len(there)
            if wanted:
                shares[kind] = right / len(wanted)
        done = sum(1 <= n <= item.gold["number"] for n in written) / item.gold["number"]
        average = sum(shares.values()) / len(shares) if shares else 0.0
        return {"score": average, "completion": done, **shares, **({"stic1": held / tried} if tried else {})}


def entries(document: str, kind: str) -> dict[int, str]:
    """Return the entries of a document by number, found by "Floor 12", "Menu Week 3", ... Of two entries with one number, the
    last counts."""
    found = {}
    for block in document.partition("*** finished")[0].split("#*#"):
        named = re.search(rf"{re.escape(kind)} (\d+)", block)
        if named:
            found[int(named.group(1))] = block
    return found


def holds(entry: str, what: str, ask: Ask | None = None) -> bool:
    """Return whether an entry includes something. A judge decides; without one, the entry must contain every content word as a
    whole word, in any case."""
    if ask is not None:
        return "yes" in ask(JUDGE.format(entry=entry, what=what)).lower()
    needed = {word for word in re.findall(r"\w+", what.lower()) if word not in _STOP}
    return needed <= set(re.findall(r"\w+", entry.lower()))


LONGGEN = tuple(
    LongGenBench(
        f"longgenbench_{size}", Generation(tokens, ("*** finished",), 0.95, 0.95), ("mozhu/LongGenBench", None, "train"), file
    )
    for size, tokens, file in (("16k", 16000, "Dataset_short"), ("32k", 32000, "Dataset_long"))
)
