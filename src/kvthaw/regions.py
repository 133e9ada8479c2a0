"""Where a token stands: sink | retrieval | local window | update buffer. Arithmetic only; no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from kvthaw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Regions:
    """Sizes in tokens of the regions that are always attended.

    sink: the first tokens. window: the most recent ones. buffer: how far the window may grow before its oldest `buffer` tokens
    leave together for the retrieval region. Window and buffer are one ring of `ring` places.
    """

    sink: int
    window: int
    buffer: int

    def __post_init__(self) -> None:
        for name, least in (("sink", 0), ("window", 1), ("buffer", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"regions.{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def ring(self) -> int:
        """Places in the ring: window + buffer."""
        return self.window + self.buffer

    @property
    def held(self) -> int:
        """Tokens attended whatever the index says, with the buffer at its fullest."""
        return self.sink + self.ring

    def for_budget(self, budget: int) -> Regions:
        """These regions where they fit in half the budget; else shrunk to sink <= budget / 16, window <= budget / 4 and
        buffer <= budget / 8. Raises ConfigError where nothing would be left to retrieve."""
        least = 16
        if budget < least:
            raise ConfigError(f"budget is {budget}; the smallest that leaves room for retrieval is {least} tokens")
        if 2 * self.held <= budget:
            return self
        return Regions(
            min(self.sink, budget // 16), max(1, min(self.window, budget // 4)), max(1, min(self.buffer, budget // 8))
        )

    def first_indexed(self, length: int) -> int:
        """Where the ring begins after a dense pass over `length` tokens: everything in [sink, this) is indexed."""
        return max(self.sink, length - self.window)

    def full(self, start: int, length: int) -> bool:
        """Whether the next token finds the ring full, if it began at `start` when decoding began."""
        over = length - start - self.ring
        return over >= 0 and over % self.buffer == 0

    def indexed(self, start: int, length: int) -> int:
        """Where the ring begins at `length` tokens if it began at `start` when decoding began: the oldest `buffer` tokens leave
        whenever a new token finds the ring full. A pure function, so that every layer and every lane agrees."""
        over = length - start - self.ring
        return start if over <= 0 else start + self.buffer * -(-over // self.buffer)
