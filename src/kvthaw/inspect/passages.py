"""The sentences of a prompt that an answer came from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kvthaw.inspect.recorder import Recording

LONGEST, SHORTEST = 64, 6
"""Tokens of a passage: longer sentences are cut, shorter ones belong to the next."""
_END = re.compile(r"[.!?][\"'”’)\]]*(?=\s)|\n\s*\n")
_WORD = re.compile(r"\w+")
RECENT = 48
"""Tokens at the end of a prompt that count as the question if its beginning is not given."""
_LEAST = 0.2
"""A passage scores at least this share of the best one's score."""


def before_question(prompt: Sequence[int]) -> Sequence[int]:
    """Return the tokens of a prompt before the ones that count as its question."""
    return prompt[: len(prompt) - min(RECENT, len(prompt) // 2)]


@dataclass(frozen=True, slots=True)
class Passage:
    """Neighbouring tokens that an answer came from. At most a `share` of the KV heads recalled one of them as the answer said its
    word."""

    start: int
    stop: int
    share: float
    text: str


def passages(recording: Recording, pieces: Sequence[str], said: Sequence[str], most: int = 5) -> list[Passage]:
    """Return the passages of a prompt that an answer came from, best first; empty if every step attended to everything.

    Heads recall headings and the end of a prompt for any question, so that the number of recalls alone says little. A token
    scores at a step whose answer token is its word or the next one. Its score is the number of heads that recall it then, less
    the average. It scores more after other words of the answer, and less if its word occurs often in the prompt. If the answer
    has no word of the prompt, every token scores by the number of heads that recall it, less the average.

    pieces: texts of the prompt's tokens.
    said: texts of the answer's tokens.
    """
    words, steps = [_word(piece) for piece in pieces], [step for step in recording.selected if step]
    scores, shares, places = torch.zeros(len(pieces)), torch.zeros(len(pieces)), dict[str, list[int]]()
    if not steps or not words:
        return []
    for at, word in enumerate(words):
        if word:
            places.setdefault(word, []).append(at)
    runs = dict[int, int]()
    for step, piece in zip(recording.selected, said, strict=False):
        hits = places.get(_word(piece), [])
        runs = {hit: runs.get(hit - 1, 0) + 1 for hit in hits}
        if step and hits:
            recalled = _shares(step, len(pieces))
            more = (recalled - recalled.mean()).clamp_min(0) / len(hits)
            for hit, run in runs.items():
                near = slice(max(0, hit - 1), hit + 1)
                scores[near] += run * more[near]
                shares[near] = torch.maximum(shares[near], recalled[near])
    if not scores.any():
        shares = torch.stack([_shares(step, len(pieces)) for step in steps]).mean(dim=0)
        scores = (shares - shares.mean()).clamp_min(0)
    cuts = sentences(pieces)
    edges = torch.tensor(cuts)
    sums = torch.cat([scores.new_zeros(1), scores.cumsum(0)])[edges].diff()
    found = []
    for at in sums.argsort(descending=True, stable=True)[:most].tolist():
        if sums[at] > _LEAST * sums.max():
            start, stop = cuts[at], cuts[at + 1]
            found.append(Passage(start, stop, float(shares[start:stop].max()), "".join(pieces[start:stop])))
    return found


def sentences(pieces: Sequence[str]) -> list[int]:
    """Return where sentences begin among tokens with these texts, and where the last one ends."""
    ends = [0, *accumulate(map(len, pieces))]
    cuts, at = [0], 0
    for mark in [*(match.end() for match in _END.finditer("".join(pieces))), ends[-1]]:
        while ends[at] < mark:
            at += 1
            if at - cuts[-1] == LONGEST:
                cuts.append(at)
        if at - cuts[-1] >= SHORTEST:
            cuts.append(at)
    if cuts[-1] < len(pieces):
        cuts.append(len(pieces))
    return cuts


def _shares(step: dict[int, Tensor], tokens: int) -> Tensor:
    """Return the share of a step's KV heads that recalled each token of the prompt."""
    rows = torch.cat([rows.flatten() for rows in step.values()]).long()
    inside = (rows >= 0) & (rows < tokens)
    return torch.bincount(rows[inside], minlength=tokens) / sum(map(len, step.values()))


def _word(piece: str) -> str:
    return "".join(_WORD.findall(piece.casefold()))
