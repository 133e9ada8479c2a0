"""Clients that wait at the same time get the same service, up to what is given at a time."""

from __future__ import annotations

import random
from collections import Counter
from unittest.mock import Mock

import pytest

from kvthaw.engine.fair_share import KEPT, FairQueue, FairShare

LARGEST = 50


class Queue:
    """Clients whose requests wait for a number of slots, a token after the other. had: what each was given in all."""

    def __init__(self, slots: int) -> None:
        self.share, self.slots = FairShare(), slots
        self.waiting, self.placed = list[str](), list[tuple[str, int]]()
        self.had = dict.fromkeys("abcd", 0)

    def submit(self, client: str) -> None:
        self.share.wait(client, set(self.waiting))
        self.waiting.append(client)

    def step(self, rng: random.Random) -> None:
        while self.waiting and len(self.placed) < self.slots:
            client = min(self.waiting, key=self.share.had)
            self.waiting.remove(client)
            self.share.choose(client)
            self.placed.append((client, rng.randint(1, LARGEST)))
        for client, _ in self.placed:
            self.share.serve(client, 1)
            self.had[client] += 1
        self.placed = [(client, left - 1) for client, left in self.placed if left > 1]
        self.share.forget({*self.waiting, *(client for client, _ in self.placed)})


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_two_that_wait_get_the_same(slots: int, seed: int) -> None:
    """Over any interval in which both wait, except for two times what the slots hold: at its beginning and at its end."""
    rng, queue = random.Random(f"{slots} {seed}"), Queue(slots)
    ahead: dict[tuple[str, str], tuple[int, int]] = {}  # by pair that waits: the least and the largest difference since both do
    worst, eager = 0, dict.fromkeys("abcd", 0.0)
    for step in range(3000):
        if step % 300 == 0:  # some flood, some rest
            eager = {client: rng.choice((0, 0.01, 0.5)) for client in "abcd"}
        for client in "abcd":
            if rng.random() < eager[client] and queue.waiting.count(client) < 30:
                queue.submit(client)
        queue.step(rng)
        for one, other in ("ab", "ac", "ad", "bc", "bd", "cd"):
            if one in queue.waiting and other in queue.waiting:
                now = queue.had[one] - queue.had[other]
                least, most = ahead.get((one, other), (now, now))
                ahead[one, other] = min(least, now), max(most, now)
                worst = max(worst, max(most, now) - min(least, now))
            else:
                ahead.pop((one, other), None)
    assert 0 < worst <= 2 * slots * LARGEST


def test_rest_earns_no_credit() -> None:
    share = FairShare()
    share.wait("late", [])
    share.wait("busy", ["late"])
    share.serve("busy", 1000)
    share.choose("busy")
    share.wait("late", ["busy"])
    assert share.had("late") == share.had("busy")
    share.serve("late", 5)
    share.wait("third", ["late", "busy"])
    assert share.had("third") == 1000, "the least of those that wait"


def test_a_client_that_leaves_keeps_what_it_had_over() -> None:
    share = FairShare()
    share.wait("other", [])
    share.wait("greedy", ["other"])
    share.serve("greedy", 1000)
    share.forget({"other"})
    share.wait("greedy", ["other"])
    assert share.had("greedy") == 1000


def test_few_are_remembered() -> None:
    share = FairShare()
    for number in range(KEPT + 500):
        share.serve(str(number), number + 1)
    share.forget({"0"})
    assert share.had("400") == 0, "it had the least of those that are too many"
    assert share.had(str(KEPT + 400)) == KEPT + 401
    share.forget(())
    assert share.had(str(KEPT + 400)) == 0


@pytest.mark.parametrize("seed", range(8))
def test_the_first_request_is_the_first_of_all_in_order(seed: int) -> None:
    rng, queue = random.Random(seed), FairQueue(credit=10.0)
    for _ in range(30):
        request = Mock()
        request.spec.client = rng.choice("abcd")
        queue.submit(request, rng.randrange(3))
        queue.share.serve(request.spec.client, rng.randrange(40))
    left = Counter({client: rng.randrange(50) for client in "abcd"})
    while queue.waiting:
        first = queue.first(left)
        assert first is queue.in_order(left)[0]
        queue.waiting.remove(first)
        left[first.spec.client] += rng.randrange(20)
