"""Texts to tokens, in threads, without tokenizing those whole that have too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvthaw.engine.text import tokens_after
from kvthaw.serve.errors import ApiError
from kvthaw.serve.lanes import NICE, Lane

Result = TypeVar("Result")
THREADS = 2
"""Threads for short texts, and for long ones."""
SHORT = 1 << 16
"""Characters of a text that counts as short."""
_LONG_TOKEN = 8  # characters of a token; texts that would need longer ones are counted before
_CUT = 1024  # tokens by which a part of a text may have more than as a text


class Reader:
    """Tokenizes texts of at most `limit` tokens."""

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit = tokenizer, limit
        self._short, self._long = Lane(THREADS), Lane(THREADS, NICE)

    async def run(self, work: Callable[[], Result], size: int, client: str) -> Result:
        """Run work on `size` characters in a thread and return its result. Clients take turns; short texts do not wait for
        long ones."""
        lane = self._short if size <= SHORT else self._long
        return await lane.run(work, client)

    def tokens(self, text: str, param: str, *, special: bool = False, behind: Sequence[int] = ()) -> list[int]:
        """Return the tokens of a text.

        behind: tokens that precede the text, see `tokens_after`.

        Raises ApiError, with param, for a text with too many tokens. That takes about the time of tokenizing the limit.
        """
        if len(text) > _LONG_TOKEN * max(self._limit, _CUT):
            self._count(text, param)
        return tokens_after(self._tokenizer, text) if behind else self._encode(text, special)

    def _count(self, text: str, param: str) -> None:
        """Raise ApiError if a text certainly has too many tokens. Count tokens of its parts. A tokenizer may drop characters
        or merge any number into one unknown token, so that the length alone proves nothing."""
        found, part = 0, min(SHORT, _LONG_TOKEN * max(self._limit, _CUT))
        for start in range(0, len(text), part):
            found += max(0, len(self._encode(text[start : start + part], special=False)) - _CUT)
            if found > self._limit:
                says = f"the prompt has more than {found} tokens; the context length of this server is {self._limit} tokens"
                raise ApiError(400, says, param=param, code="context_length_exceeded")

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return ids
