"""Sampling as the makers of a model recommend it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from kvthaw.engine.generation_config import as_generate_does, recommended

QWEN: dict[str, Any] = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


def model_of(**config: Any) -> Any:
    return SimpleNamespace(generation_config=GenerationConfig(**config))


@pytest.mark.parametrize(
    ("config", "all_of_them", "by_generate"),
    [
        ({}, {}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 7}, {}, {}),
        (QWEN, {k: v for k, v in QWEN.items() if k != "do_sample"}, {k: v for k, v in QWEN.items() if k != "do_sample"}),
        ({"do_sample": True, "top_k": 64}, {"top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1}, {"min_p": 0.1}, {"temperature": 1.0, "min_p": 0.1}),
        ({"repetition_penalty": 1.1, "top_p": 0.9}, {"repetition_penalty": 1.1, "top_p": 0.9}, {"repetition_penalty": 1.1}),
    ],
)
def test_settings_of_a_generation_config(
    config: dict[str, Any], all_of_them: dict[str, float], by_generate: dict[str, float]
) -> None:
    assert recommended(model_of(**config)) == all_of_them
    assert as_generate_does(model_of(**config)) == by_generate


def test_what_is_out_of_range_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(do_sample=True, temperature=0.6)
    model.generation_config.top_p = 1.5
    assert recommended(model) == {"temperature": 0.6}
    assert "top_p is 1.5" in caplog.text
    assert recommended(SimpleNamespace()) == as_generate_does(SimpleNamespace()) == {}
