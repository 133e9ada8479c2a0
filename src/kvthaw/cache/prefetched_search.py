"""Searches with the next layer's queries, predicted one layer early."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from kvthaw.cache.index_api import Selection


class PrefetchedSearch:
    """Predicted queries [B, Hq, T, D] for the coming T tokens, and the running searches for the first of them.

    The other tokens are searched when they come, because the index changes before.
    """

    def __init__(self, queries: Tensor, searches: Sequence[Future[Selection]] = ()) -> None:
        self.queries, self.searches = queries, searches

    def search(self, token: int) -> Future[Selection] | None:
        """Return a token's search, if it has started."""
        return self.searches[token] if token < len(self.searches) else None

    def drop(self) -> None:
        """Cancel the searches that have not started, and wait for the one that reads the index."""
        for search in self.searches:
            search.cancel()
        wait(self.searches)

    def __deepcopy__(self, memo: dict[int, object]) -> PrefetchedSearch:
        return PrefetchedSearch(self.queries)
