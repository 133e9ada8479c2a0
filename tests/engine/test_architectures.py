"""Every architecture that kvthaw names: equal to DynamicCache at full budget, rows of a batch equal to the rows alone below it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from zoo import MODELS, build, build_exact, ragged

SPARSE = [name for name in ("oracle", "icecache") if name in kvthaw.METHODS]
NEW = 20
LENGTHS = [97, 61, 80]
QUICK = ("llama", "gemma3", "gemma4", "gpt_oss", "qwen3_next", "gpt2")


def tokens(model: PreTrainedModel, inputs: dict[str, Tensor], **more: object) -> Tensor:
    """The new tokens of greedy decoding."""
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **more)
    return out[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_full_budget_equals_dynamic_cache(name: str) -> None:
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

    assert torch.equal(tokens(model, batch), expected), "the model was not given back as it was"


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_rows_of_a_batch_generate_what_they_do_alone(name: str) -> None:
    """The longest and the shortest row; alone they have no padding."""
    model, batch = build_exact(name, attention="eager" if name in ("gemma2", "gpt_oss") else None), ragged(LENGTHS)
    for method in SPARSE:
        with kvthaw.attach(model, method, budget=32) as handle:
            deferred = tokens(model, batch)
            for row, length in enumerate(LENGTHS[:2]):
                alone = {key: value[row : row + 1, max(LENGTHS) - length :] for key, value in batch.items()}
                assert torch.equal(tokens(model, alone)[0], deferred[row])
            stats = handle.stats()
            assert stats.retrieved > 0
            assert stats.attended_max <= 32
