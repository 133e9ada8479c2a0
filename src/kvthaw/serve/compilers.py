"""Grammars of the JSON and the calls that requests ask for, compiled in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from kvthaw.engine.grammar import Grammar, Grammars, Source
from kvthaw.errors import ConfigError
from kvthaw.serve.errors import ApiError
from kvthaw.serve.lanes import NICE, Lane

Read = Callable[[Grammars], tuple[Source, int]]
SHORT, LONG = 2, 1
"""Threads for schemas that compile in a second or two, and for the others."""
SHORT_TRIES = 5_000_000
"""How often compiling one of the former tries a token."""
SECONDS = 30.0
"""Longest time in seconds that a request waits for its schema."""


class Compilers:
    """Compile schemas for a tokenizer and a model with a vocabulary of `vocabulary` tokens.

    The work of a schema is estimated before and bounded, because a compilation cannot be cancelled. Long compilations wait
    only for each other, and clients take turns.

    The tokens' texts are read when the object is made: in a thread, while steps run, that would keep all requests waiting for a
    second where the vocabulary is large.

    begins: called in a thread with the source of a grammar, before its compilation.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, begins: Callable[[Source], None] = lambda source: None) -> None:
        self._begins, self._short, self._long = begins, Lane(SHORT), Lane(LONG, NICE)
        self._grammars: Grammars | None = None
        self._lacks = ""
        try:
            self._grammars = Grammars(tokenizer, vocabulary)
        except ConfigError as error:
            self._lacks = str(error)

    async def grammar(self, read: Read, field: str, client: str) -> Grammar:
        """Return the grammar that a field asks for. Raises ApiError for an invalid schema or a timeout.

        read: returns the grammar's source, and how often compiling it tries a token.
        """
        try:
            return await asyncio.wait_for(self._grammar(read, client), SECONDS)
        except TimeoutError:
            says = f"{field}: the schema was not compiled within {SECONDS:g} s; ask again, or make it simpler"
            raise ApiError(503, says, param=field, code="schema_timeout", headers={"Retry-After": "10"}) from None
        except ConfigError as error:
            raise ApiError(400, f"{field}: {error}", param=field) from None

    async def _grammar(self, read: Read, client: str) -> Grammar:
        grammars = self._grammars
        if grammars is None:
            raise ConfigError(self._lacks)
        source, tries = await self._short.run(partial(read, grammars), client)
        lane = self._short if tries <= SHORT_TRIES or grammars.known(source) else self._long
        return await lane.run(partial(self._compile, grammars, source), client)

    def _compile(self, grammars: Grammars, source: Source) -> Grammar:
        if grammars.known(source) is None:
            self._begins(source)
        return grammars.compile(source)
