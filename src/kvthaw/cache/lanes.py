"""How many tokens each lane of a layer has."""

from __future__ import annotations

from collections.abc import Collection


def roomier(have: int, need: int) -> int:
    """Tokens a lane to make room for where `need` do not fit in `have`: somewhat more than a first prompt, then half as much again.
    All layers reckon alike, so that what a captured step reads moves at one step and not at many."""
    return need + max(256, need // 16) if have == 0 else max(need, have * 3 // 2)


class Lanes:
    """Lengths of the lanes of a layer, as transformers counts them.

    `seen` is the length of the longest lane with its padding, left_pad what of it is padding, so that position p of a lane is its
    p-th token after that. idle: lanes without a row; they have no tokens and a step gives them none. capacity: tokens that a lane
    has room for on the device. era: another object whenever tokens were forgotten or lanes have changed; within one, lanes only
    grow.
    """

    def __init__(self) -> None:
        self.era = object()
        self.seen = 0
        self.left_pad: list[int] = []
        self.idle: frozenset[int] = frozenset()
        self.capacity = 0
        self.prompt = 0
        """Tokens there will be when the prompt that is under way has come; 0: none is, or it was not announced."""

    @property
    def lanes(self) -> int:
        return len(self.left_pad)

    @property
    def longest(self) -> int:
        """Tokens of the longest lane, padding not counted."""
        return self.seen - min(self.left_pad, default=0)

    @property
    def live(self) -> tuple[bool, ...]:
        """Which lanes a step gives a token."""
        return tuple(lane not in self.idle for lane in range(self.lanes))

    def length(self, lane: int) -> int:
        """Tokens of a lane, padding not counted."""
        return self.seen - self.left_pad[lane]

    def expect(self, tokens: int) -> None:
        """The next tokens, so many with their padding, are one prompt however they come; 0: it has ended."""
        self.prompt = self.seen + tokens if tokens else 0

    @property
    def coming(self) -> int:
        """Tokens of the announced prompt that have not come yet."""
        return max(0, self.prompt - self.seen)

    def count_token(self) -> None:
        """Every lane with a row has one token more."""
        self.seen += 1
        if self.idle:
            self.left_pad = [pad + (lane in self.idle) for lane, pad in enumerate(self.left_pad)]

    def set_lengths(self, lengths: list[int], idle: Collection[int]) -> None:
        """Lanes have so many tokens from now on, those that are idle none; padding is no longer than it must be."""
        self.era = object()
        self.seen = max(lengths)
        self.left_pad, self.idle = [self.seen - n for n in lengths], frozenset(idle)
