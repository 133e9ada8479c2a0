"""Searches for the next layer's queries, predicted by the layer before it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from kvthaw.cache.index_api import Selection


class PrefetchedSearch:
    """The queries [B, Hq, T, D] that the coming T tokens ask the index with, and the searches of the first of them, which are under
    way. The others are asked when their tokens come: the index changes before."""

    def __init__(self, queries: Tensor, searches: Sequence[Future[Selection]] = ()) -> None:
        self.queries, self.searches = queries, searches

    def search(self, token: int) -> Future[Selection] | None:
        """That of a token, if it has begun."""
        return self.searches[token] if token < len(self.searches) else None

    def drop(self) -> None:
        """The step does not come: begin no more searches, and wait for the one that reads the index and its rows."""
        for search in self.searches:
            search.cancel()
        wait(self.searches)

    def __deepcopy__(self, memo: dict[int, object]) -> PrefetchedSearch:
        return PrefetchedSearch(self.queries)
