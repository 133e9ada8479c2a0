"""The arithmetic of the regions: the budget's promise, and where the ring begins, against a ring taken literally."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvthaw
from kvthaw.cache.plan import Settings
from kvthaw.errors import ConfigError
from kvthaw.regions import Regions

regions = st.builds(Regions, st.integers(0, 40), st.integers(1, 60), st.integers(1, 40))


@given(regions=regions, budget=st.integers(16, 2000))
def test_a_budget_is_never_exceeded(regions: Regions, budget: int) -> None:
    fitted = regions.for_budget(budget)
    assert fitted.held < budget
    assert fitted.sink <= regions.sink
    assert fitted.window <= regions.window
    assert fitted.buffer <= regions.buffer
    if 2 * regions.held <= budget:
        assert fitted == regions
    else:
        assert fitted.sink <= budget // 16
        assert fitted.window <= budget // 4
        assert fitted.buffer <= budget // 8


@given(regions=regions, budget=st.integers(-5, 15))
def test_a_budget_without_room_is_refused(regions: Regions, budget: int) -> None:
    with pytest.raises(ConfigError, match=rf"budget is {budget}; the smallest .* is 16"):
        regions.for_budget(budget)


@pytest.mark.parametrize("sizes", [(-1, 1, 1), (0, 0, 1), (0, 1, 0)])
def test_sizes_out_of_range(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match=r"(sink|window|buffer) is (-1|0); it must be at least (0|1)"):
        Regions(*sizes)


@given(regions=regions, prompt=st.integers(0, 200), steps=st.integers(0, 200))
def test_the_ring_step_by_step(regions: Regions, prompt: int, steps: int) -> None:
    """A prompt's last `window` tokens are the ring; a token that finds it full sends the oldest `buffer` away first."""
    begin = regions.first_indexed(prompt)
    ring = list(range(begin, prompt))
    assert len(ring) <= regions.window
    assert sorted([*range(min(regions.sink, prompt)), *range(regions.sink, begin), *ring]) == list(range(prompt))
    for position in range(prompt, prompt + steps):
        assert regions.full(begin, position) == (len(ring) == regions.ring)
        if position >= regions.sink:
            if len(ring) == regions.ring:
                del ring[: regions.buffer]
            ring.append(position)
        expected = ring[0] if ring else regions.sink
        assert regions.indexed(begin, position + 1) == expected
        assert len(ring) <= regions.ring


@given(method=st.sampled_from(sorted(kvthaw.METHODS)), budget=st.integers(16, 4000), prompt=st.integers(1, 100_000))
def test_plans_keep_the_budget(method: str, budget: int, prompt: int) -> None:
    chosen = kvthaw.METHODS[method]()
    plan = Settings(chosen, budget=budget).plan(prompt)
    assert plan.regions.held + plan.rows == plan.budget <= budget
    assert (plan.rows > 0) == (chosen.index is not None)
    share = budget / 10_000
    if 0 < share < 1 and int(share * prompt) >= 16:
        plan = Settings(chosen, budget=share).plan(prompt)
        assert plan.budget <= -(-share * prompt // 1) + 1e-6


def test_retrieved_is_what_the_index_may_bring() -> None:
    method = kvthaw.METHODS["oracle"]()
    plan = Settings(method, retrieved=100).plan(5000)
    assert plan.rows == 100
    assert plan.regions == method.regions
