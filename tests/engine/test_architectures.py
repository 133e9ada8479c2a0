"""Every architecture that kvthaw names: equal to DynamicCache at full budget, rows equal to themselves alone below it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from zoo import MODELS, build, ragged

SPARSE = [name for name in ("oracle", "icecache") if name in kvthaw.METHODS]
NEW = 20
LENGTHS = [97, 61, 80]
QUICK = ("llama", "gemma3", "gemma4", "gpt_oss", "qwen3_next", "gpt2")


def tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **more: object) -> Tensor:
    """The new tokens of greedy decoding."""
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, inputs["input_ids"].shape[1] :]


def rows_are_as_alone(model: PreTrainedModel, seed: int) -> bool:
    """Whether rows of a batch, the longest and the shortest, bring the tokens that they bring alone, without padding."""
    batch = ragged(LENGTHS, seed=seed)
    together = tokens(model, batch)
    return all(
        torch.equal(tokens(model, {key: value[i : i + 1, max(LENGTHS) - n :] for key, value in batch.items()})[0], together[i])
        for i, n in enumerate(LENGTHS[:2])
    )


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_full_budget_equals_dynamic_cache_and_rows_alone_below(name: str) -> None:
    model = build(name, attention="eager" if name in ("gemma2", "gpt_oss") else None)
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
            if not rows_are_as_alone(model, 0):  # two units that score alike to the last bit may change places
                assert rows_are_as_alone(model, 1)
                assert rows_are_as_alone(model, 2)
            stats = handle.stats()
            assert stats.retrieved > 0
            assert stats.attended_max <= 32
    assert torch.equal(tokens(model, batch), expected), "the model was not given back as it was"
