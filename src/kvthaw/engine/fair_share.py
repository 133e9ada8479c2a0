"""Share a batch between clients: how much service each has had, and the order of their requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Mapping
from itertools import takewhile

from kvthaw.engine.request import Request

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
        """The first request of a client starts to wait.

        waiting: clients of the requests that wait already.
        """
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


class FairQueue:
    """The requests of a scheduler. Their order is priority, service of the client, arrival.

    share: the service of their clients.
    waiting: requests without a slot, by priority, then by arrival.
    """

    def __init__(self, credit: float) -> None:
        self.share, self.waiting = FairShare(credit), list[Request]()
        self._rank: dict[Request, tuple[int, int]] = {}  # of unfinished requests: priority, number of arrival
        self._arrived = 0

    def __contains__(self, request: Request) -> bool:
        return request in self._rank

    def submit(self, request: Request, priority: int) -> None:
        """Add a request, which waits."""
        self._rank[request] = priority, self._arrived
        self._arrived += 1
        self.wait(request)

    def wait(self, request: Request) -> None:
        """Queue a request for a slot."""
        client = request.spec.client
        if not any(one.spec.client == client for one in self.waiting):
            self.share.wait(client, {one.spec.client for one in self.waiting})
        insort(self.waiting, request, key=self._rank.__getitem__)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        del self._rank[request]
        self.share.forget({one.spec.client for one in self._rank})

    def rank(self, request: Request) -> tuple[int, int]:
        """Return the priority of a request and the number of its arrival."""
        return self._rank[request]

    def order(self, request: Request, coming: int = 0) -> tuple[int, float, int]:
        """Return what requests are ordered by.

        coming: tokens to add to the service.
        """
        priority, arrived = self._rank[request]
        return priority, self.share.had(request.spec.client) + coming, arrived

    def first(self, left: Mapping[str, int]) -> Request:
        """Return the first of in_order(): the earliest of the lowest number of some client."""
        lowest, clients = self._rank[self.waiting[0]][0], dict[str, Request]()
        for one in takewhile(lambda one: self._rank[one][0] == lowest, self.waiting):
            clients.setdefault(one.spec.client, one)
        return min(clients.values(), key=lambda one: self.order(one, left[one.spec.client]))

    def in_order(self, left: Mapping[str, int]) -> list[Request]:
        """Return the waiting requests in the order in which they get slots.

        left: tokens of prompts in slots that are yet to be prefilled, by client; they count as service.
        """
        return sorted(self.waiting, key=lambda one: self.order(one, left[one.spec.client]))
