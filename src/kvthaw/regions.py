"""Arithmetic of the four regions of a sequence: sink | retrieval | local window | update buffer. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvthaw.errors import ConfigError, at_least

BUDGET = 1024
"""Tokens attended per KV head and step, where neither a budget nor a number of rows is given."""
LEAST_BUDGET = 16
"""The smallest budget of a method that retrieves: sink, window and buffer shrink to it and leave rows to retrieve."""


@dataclass(frozen=True)
class Regions:
    """Sizes, in tokens, of the regions that attention always reads.

    sink: the first tokens.
    window: the most recent tokens.
    buffer: how many tokens the window may grow by before its oldest `buffer` tokens move to the retrieval region. Window
        and buffer share one ring buffer of `ring` slots.
    """

    sink: int
    window: int
    buffer: int

    def __post_init__(self) -> None:
        at_least(0, sink=self.sink)
        at_least(1, window=self.window, buffer=self.buffer)

    @cached_property
    def ring(self) -> int:
        """Slots of the ring: window + buffer."""
        return self.window + self.buffer

    @cached_property
    def held(self) -> int:
        """Tokens that attention reads besides the selected ones, with a full buffer: sink + ring."""
        return self.sink + self.ring

    def for_budget(self, budget: int) -> Regions:
        """Return these regions if they fit in half the budget; otherwise shrink them to sink <= budget / 16, window <= budget / 4
        and buffer <= budget / 8. Raises ConfigError if the budget is below LEAST_BUDGET."""
        if budget < LEAST_BUDGET:
            raise ConfigError(f"budget is {budget}; the smallest that leaves room for retrieval is {LEAST_BUDGET} tokens")
        if 2 * self.held <= budget:
            return self
        return Regions(
            min(self.sink, budget // 16), max(1, min(self.window, budget // 4)), max(1, min(self.buffer, budget // 8))
        )

    def first_indexed(self, length: int) -> int:
        """Return the position at which the ring begins after a prefill of `length` tokens. [sink, this) is indexed."""
        return max(self.sink, length - self.window)

    def held_of(self, past: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return what sink and ring take from a prefill of positions past .. length, as (begin, end) each; either may be empty."""
        return (past, max(past, min(self.sink, length))), (max(past, self.first_indexed(length)), length)

    def full(self, start: int, length: int) -> bool:
        """Return whether the ring is full at `length` tokens. It began at position `start` when decoding began."""
        over = length - start - self.ring
        return over >= 0 and over % self.buffer == 0

    def indexed(self, start: int, length: int) -> int:
        """Return the position at which the ring begins at `length` tokens, having begun at `start` when decoding began.

        The oldest `buffer` tokens leave the ring whenever a new token finds it full. A pure function of the lengths, so all layers
        agree."""
        over = length - start - self.ring
        return start if over <= 0 else start + self.buffer * -(-over // self.buffer)
