"""Every architecture that kvthaw names: equal to DynamicCache at full budget, rows equal to themselves alone below it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from zoo import MODELS, build, ragged

SPARSE = [name for name in ("oracle", "icecache") if name in kvthaw.METHODS]
NEW = 24
LENGTHS = [97, 61, 80]
SEEDS = {"mixtral": 1}  # with others two pages score alike to the last bit


def tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **more: object) -> Tensor:
    """The new tokens of greedy decoding."""
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", MODELS)
def test_full_budget_equals_dynamic_cache_and_rows_alone_below(name: str) -> None:
    model = build(name, seed=SEEDS.get(name, 0), attention="eager" if name in ("gemma2", "gpt_oss") else None)
    batch = ragged(LENGTHS)
    alone = {key: value[:1] for key, value in batch.items()}
    expected, expected_alone = tokens(model, batch), tokens(model, alone)
    assert sum(len(set(row.tolist())) for row in expected) > NEW, f"greedy output is degenerate: {expected}"

    for method in SPARSE:
        with kvthaw.attach(model, method, budget=160) as handle:
            assert torch.equal(tokens(model, alone), expected_alone)
            assert torch.equal(tokens(model, batch), expected)
            stats = handle.stats()
            assert stats.sparse_steps > 0
            assert stats.retrieved > 0
            assert stats.attended_max <= 160

    for method in SPARSE:
        with kvthaw.attach(model, method, budget=32) as handle:
            together = tokens(model, batch)
            stats = handle.stats()
            assert stats.retrieved > 0
            assert stats.attended_max <= 32
            for row, length in enumerate(LENGTHS):
                one = {key: value[row : row + 1, max(LENGTHS) - length :] for key, value in batch.items()}
                assert torch.equal(tokens(model, one)[0], together[row])
    assert torch.equal(tokens(model, batch), expected), "the model was not given back as it was"
