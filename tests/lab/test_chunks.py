"""The benchmark of single chunks: what it says of them."""

from __future__ import annotations

import pytest
import torch

from kvthaw import Batch, Scheduler
from lab.arrivals import random_prompt
from lab.bench.shapes import build
from lab.chunks import _covered, end_of, timed
from lab.fill import prompts_drawn
from lab.joining import Watch


@pytest.mark.parametrize(("method", "indexed"), [("pariskv-plus", [0, 2]), ("clusterkv-plus", [0, 0, 2])])
def test_the_end_of_a_prompt_and_single_chunks(method: str, indexed: list[int]) -> None:
    """Clusters are built in a step of their own, codes with the last chunk."""
    batch = Batch(build("tiny", torch.device("cpu"), layers=2), method, max_seqs=2, capacity=400, budget=64)
    scheduler = Scheduler(batch, step_tokens=40)
    with prompts_drawn(batch.model):
        scheduler.submit(random_prompt(batch.vocabulary, 50, 0), max_new_tokens=200, stop=())
        while not batch.decoding:
            scheduler.step()
    found = end_of(scheduler, 300, 250)
    assert [step["chunks"] for step in found["steps"]] == [[(39, 250)], [(11, 289)], []][: len(indexed)]
    assert [step["indexed"] for step in found["steps"]] == indexed
    assert found["max_ms"] == max(step["ms"] for step in found["steps"])
    request = batch.join(random_prompt(batch.vocabulary, 300, 1), stop=())
    line = timed(batch, request, 20, decoding=True)
    assert (line["depth"], request.prefilled) == (0, 60)
    assert line["host_ms"] > 0


def test_a_request_that_joins_in_a_step_is_watched() -> None:
    scheduler = Scheduler(Batch(build("tiny", torch.device("cpu"), layers=1), "full", max_seqs=1, capacity=100))
    scheduler.submit(range(1, 31), max_new_tokens=3, stop=())
    watch = Watch(scheduler)
    watch.step()
    assert watch.steps[0]["chunks"] == [(30, 0)]


def test_time_in_which_anything_ran() -> None:
    assert _covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (6.0, 6.5)]) == 5.0
