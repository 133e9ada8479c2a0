"""What the tests of ClusterKV, Quest, ArkVale and PRKV share: whole tiny models under a method."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.types import Index
from zoo import prompt, ragged


def generate(model: PreTrainedModel, inputs: dict[str, Tensor], new: int = 24) -> Tensor:
    made: Tensor = model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return made


def indices(handle: Any) -> list[Index]:
    return [kv.group.index for kv in handle.cache.frozen_layers]


def full_budget_is_full_attention(model: PreTrainedModel, method: str, **options: Any) -> None:
    batch = ragged([120, 37, 91])
    expected = generate(model, batch)
    with kvthaw.attach(model, method, budget=1024, **options) as handle:
        assert torch.equal(generate(model, batch), expected)
        assert handle.stats().sparse_steps > 0


def budget_is_kept(model: PreTrainedModel, method: str, **options: Any) -> None:
    for budget in (16, 48, 130):
        with kvthaw.attach(model, method, budget=budget, **options) as handle:
            generate(model, {"input_ids": prompt(2, 200)}, 36)
            stats = handle.stats()
        assert stats.attended_max is not None
        assert stats.attended_max <= budget
        assert stats.hit_rate is not None
        assert stats.hit_rate > 0


def rows_alone_are_the_rows_of_a_batch(model: PreTrainedModel, method: str, **options: Any) -> None:
    ids = prompt(3, 150)
    with kvthaw.attach(model, method, budget=64, **options):
        together = generate(model, {"input_ids": ids})
        for row in range(3):
            assert torch.equal(generate(model, {"input_ids": ids[row : row + 1]})[0], together[row])
