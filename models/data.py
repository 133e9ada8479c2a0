"""Batches of rows as arrays of fixed size, wholly determined by their seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from facts import Pieces
from rows import Maker


@dataclass
class Batch:
    """A batch as arrays of fixed size: ids [B, L]; flat target positions of answers and of text, 0 where there are none."""

    ids: np.ndarray
    answer: np.ndarray  # [Ka] int64 flat position of the token to predict, 0: none
    group: np.ndarray  # [Ka] which answer it belongs to, the last number: none
    task: np.ndarray  # [Ka]
    text: np.ndarray  # [Kt]


def make_batch(pieces: Pieces, length: int, tokens: int, seed: str, answers: int, texts: int) -> Batch:
    """One batch of `tokens` tokens in rows of `length`, wholly determined by the seed."""
    rng = random.Random(seed)
    maker = Maker(pieces, rng)
    n = tokens // length
    ids = np.zeros((n, length), np.uint16)
    answer, task = np.zeros(answers, np.int64), np.zeros(answers, np.int64)
    group = np.full(answers, answers - 1)
    used = groups = 0
    spans: list[np.ndarray] = []
    for i in range(n):
        row = maker.row(length)
        ids[i] = row.ids
        for start, end, kind in row.answers:
            m = end - start
            if used + m > answers:
                continue
            answer[used : used + m] = np.arange(start, end) + i * length
            group[used : used + m] = groups
            task[used : used + m] = kind
            used += m
            groups += 1
        spans += [np.arange(s, e) + i * length for s, e in row.text if e > s]
    text = np.zeros(texts, np.int64)
    if spans:
        flat = np.concatenate(spans)
        pick = np.random.default_rng(rng.getrandbits(32)).choice(flat, min(texts, len(flat)), replace=False)
        text[: len(pick)] = np.sort(pick)
    return Batch(ids, answer, group, task, text)


def batches(pieces: Pieces, length: int, tokens: int, seed: str, worker: int, answers: int, texts: int) -> Iterator[Batch]:
    """Batches without end for one worker."""
    i = 0
    while True:
        yield make_batch(pieces, length, tokens, f"{seed}/{length}/{worker}/{i}", answers, texts)
        i += 1
