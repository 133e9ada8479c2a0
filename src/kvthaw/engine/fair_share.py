"""Share a batch between clients: how much service each has had."""

from __future__ import annotations

from collections.abc import Collection

KEPT = 1024
"""Clients without a request whose service is remembered at most."""


class FairShare:
    """Count the service of each client, so that the one with the least comes next (virtual token counter; Sheng et al., 2024).

    Service counts tokens of prompts, and output tokens by the caller's weight. A client without a waiting request earns little
    credit: it starts again at most `credit` below the least service of the clients that wait. If none waits, that is the service
    that the latest chosen client had.

    credit: keeps a client that asks for little, whose requests rarely wait, ahead of clients whose requests always wait.
    """

    def __init__(self, credit: float = 0.0) -> None:
        self._had, self._credit = dict[str, float](), credit
        self._floor = 0.0  # the service of the latest chosen client

    def had(self, client: str) -> float:
        """Return the service of a client so far."""
        return self._had.get(client, self._floor - self._credit)

    def serve(self, client: str, tokens: float) -> None:
        """Count service."""
        self._had[client] = self.had(client) + tokens

    def wait(self, client: str, waiting: Collection[str]) -> None:
        """A request of a client starts to wait.

        waiting: clients of the requests that wait already.
        """
        if client not in waiting:
            least = min(map(self.had, waiting), default=self._floor)
            self._had[client] = max(self.had(client), least - self._credit)

    def choose(self, client: str) -> None:
        """A waiting request of a client is chosen."""
        self._floor = max(self._floor, self.had(client))

    def forget(self, active: Collection[str]) -> None:
        """Forget clients that would start at the same service again, and all of them once none is active.

        active: clients that have requests.
        """
        if not active:
            self._had, self._floor = {}, 0.0
            return
        idle = sorted((client for client in self._had if client not in active), key=self.had, reverse=True)
        for place, client in enumerate(idle):
            if place >= KEPT or self._had[client] <= self._floor - self._credit:
                del self._had[client]
