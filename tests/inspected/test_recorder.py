"""What the recorder keeps of steps, eager and captured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import bytemodel
import kvthaw
from kvthaw.engine.decode import decode
from kvthaw.engine.hf.model import load
from kvthaw.engine.prefill import prefill
from kvthaw.evaluate.probe import attention_mass, exact_scores, stored_rows
from kvthaw.inspect.recorder import ExactTopK, Recorder
from zoo import prompt


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("method", ["quest", "icecache-digest", "omnikv"])
def test_it_keeps_what_was_selected(tmp_path: Path, method: str, device: str) -> None:
    """On a GPU its steps are captured, and those beside an observer that is not graph-safe are eager."""
    model, _ = load(str(bytemodel.save(tmp_path)), device=device, dtype="float32")
    ids = torch.randint(0, 256, (300,)).tolist()

    def steps(*, eager: bool) -> tuple[list[dict[int, Tensor]], list[dict[int, Tensor]], kvthaw.Cache]:
        cache = kvthaw.Cache(model, method, budget=64, dense_layers=0)
        logits, tokens = prefill(model, cache, ids[:280]), iter(ids[280:])
        recorder, seen, taken = Recorder(cache.kv), list[dict[int, Tensor]](), list[dict[int, Tensor]]()

        def look(layer: Any, query: Tensor, choice: Any) -> None:
            if layer.leader is None:
                seen[-1][layer.number] = choice.selection.rows[0].cpu().clone()

        def choose(_: Tensor) -> list[int] | None:
            if seen:
                taken.append(recorder.take(0))
            seen.append({})
            token = next(tokens, None)
            return None if token is None else [token]

        if eager:
            cache.kv.streams.observers.append(look)
        for _ in decode(model, cache, logits[None], choose):
            pass
        if device == "cuda":
            torch.cuda.synchronize()
        return taken, seen[:-1], cache

    expected, seen, _ = steps(eager=True)
    found, _, cache = steps(eager=False)
    assert len(found) == len(expected) == 20
    for one, other, own in zip(found, expected, seen, strict=True):
        assert one.keys() == other.keys() == own.keys() != set()
        assert all(torch.equal(one[n], other[n]) and torch.equal(other[n], own[n]) for n in own)
    if device == "cuda":
        assert cache.replay is not None
        assert cache.replay.captures >= 1


def test_rows_that_a_query_head_does_not_see_cover_nothing_of_its_softmax(llama: PreTrainedModel) -> None:
    """Of a method whose query heads choose apart: a row of the union belongs to those that chose it."""
    cache, seen = kvthaw.Cache(llama, "clusterkv:preset=code:batch=16:sink=4", budget=48, dense_layers=0), dict[int, Tensor]()
    hidden = list[bool]()

    def look(layer: Any, query: Tensor, choice: Any) -> None:
        if choice is not None:
            hidden.append(bool(choice.selection.log_weight.isinf().any()))
            mass = attention_mass(layer, 0, exact_scores(layer, query[0], stored_rows(layer, 0, query.device)), choice)
            seen[layer.number] = mass.mean(dim=1)

    cache.kv.streams.observers.append(look)
    exact = ExactTopK(cache.kv, [0])
    with torch.no_grad():
        for ids in (prompt(1, 200), prompt(1, 1)):
            llama(ids, past_key_values=cache)
    _, mass = exact.take(0)
    assert any(hidden)
    assert mass.keys() == seen.keys() == {0, 1}
    for number, own in mass.items():
        torch.testing.assert_close(own, seen[number])


def test_rows_for_everything_cover_the_whole_softmax(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=256, dense_layers=0)
    exact = ExactTopK(cache.kv, [0])
    with torch.no_grad():
        for ids in (prompt(1, 120), prompt(1, 1)):
            llama(ids, past_key_values=cache)
    rows, mass = exact.take(0)
    assert rows.keys() == mass.keys() == {0, 1}
    torch.testing.assert_close(torch.stack([*mass.values()]), torch.ones(2, 2))
