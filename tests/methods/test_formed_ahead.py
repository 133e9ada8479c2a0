"""Units of generated tokens are formed while the last of these stand in the ring, and come when they would have come."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from one_layer import OneLayer
from transformers import PreTrainedModel

import kvthaw
from kvthaw.index.batches import BatchedIndex, Formation
from zoo import build, prompt

SMALL = {"clusterkv-plus": {"batch": 24, "clusters_per_batch": 3}, "icecache-digest-device": {"nodes_per_batch": 1}}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of each formation whose units enter the tables: how much of its work is left then."""
    found: list[int] = []
    real = Formation.write

    def write(self: Formation, *args: object) -> None:
        found.append(len(self.work.jobs))
        real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Formation, "write", write)
    return found


@pytest.mark.parametrize("method", SMALL)
def test_every_step_selects_what_it_did(method: str, left: list[int]) -> None:
    """And no step does more of it than its share."""
    layers = []
    for _ in range(2):
        torch.manual_seed(3)
        layers.append(OneLayer(method, 130, 130, **SMALL[method]))  # type: ignore[arg-type]
    ahead, due = layers
    assert due.layer.retriever is not None
    due.layer.retriever.index.upcoming = lambda seq: 0  # type: ignore[attr-defined]
    waiting = ahead.cache.streams.aux
    for _ in range(130):
        before = sum(len(work.jobs) for work in waiting._waiting)
        assert ahead.step() == due.step()
        assert torch.equal(ahead.out, due.out)
        assert before - sum(len(work.jobs) for work in waiting._waiting) <= 3
    assert len(left) >= 3
    assert not any(left)


def test_what_could_not_be_formed_is_formed_when_it_is_due(left: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    outs = []
    for fails in (False, True):
        torch.manual_seed(3)
        one = OneLayer("clusterkv-plus", 130, 60, **SMALL["clusterkv-plus"])  # type: ignore[arg-type]
        if fails:

            def short(self: Formation, *, last: bool = False) -> None:
                if self.groups:
                    self.groups.clear()
                    raise torch.OutOfMemoryError("no memory")

            monkeypatch.setattr(Formation, "advance", short)
        for _ in range(60):
            one.step()
            outs.append(one.out)
    assert len(left) >= 2
    assert all(torch.equal(a, b) for a, b in zip(outs[:60], outs[60:], strict=True))


def test_requests_that_come_wait_and_leave_get_their_tokens(llama: PreTrainedModel, left: list[int]) -> None:
    """Of a formation that others go on with, what belongs to a sequence that was taken out enters no table."""
    settings = {"max_seqs": 3, "capacity": 256, "budget": 64, "dense_layers": 0, **SMALL["clusterkv-plus"]}
    found = []
    for foresees in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not foresees:
                patch.setattr(BatchedIndex, "upcoming", lambda self, seq: 0)
            batch = kvthaw.Batch(llama, "clusterkv-plus", **settings)
            requests = [batch.join(prompt(1, 100 + 8 * (i % 2), seed=i)[0], max_new_tokens=90, stop=()) for i in range(3)]
            for step in range(90):
                if step in (37, 60):
                    batch.preempt(requests[step == 37], keep=step == 37)
                elif step in (45, 63):
                    batch.join(requests[step == 45])
                elif step == 52:
                    batch.leave(requests[2])
                    requests.append(batch.join(prompt(1, 77)[0], max_new_tokens=60, stop=()))
                batch.step()
            found.append([request.tokens for request in requests])
    assert found[0] == found[1]
    assert len(left) >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [False, True])
def test_captured_steps_attend_to_what_was_formed_beside_them(capture: bool) -> None:
    """Of 320 generated tokens each; as steps do that form all of it at once."""
    llama, settings = build("llama", max_position_embeddings=4096).to("cuda"), {"max_seqs": 3, "capacity": 2048, "budget": 128}
    found = []
    for ahead in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not ahead:
                patch.setattr(BatchedIndex, "upcoming", lambda self, seq: 0)
            batch = kvthaw.Batch(llama, "clusterkv-plus", capture=ahead and capture, **settings)
            requests = []
            for i in range(3):
                requests.append(batch.join(prompt(1, 700 + 5 * i, seed=i)[0].cuda(), max_new_tokens=700, stop=()))
                batch.prefill(requests[-1], 2048)
                for _ in range(20):
                    batch.step()
            while batch.requests:
                batch.step()
            found.append([request.tokens for request in requests])
    assert found[0] == found[1]
