"""RoPE scaling gives a model more positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gguf_model import tiny, write
from kvthaw.engine.hf.model import load, positions
from kvthaw.engine.rope_scaling import RopeScaling
from kvthaw.errors import ConfigError
from zoo import build, prompt


@pytest.mark.parametrize("text", ["yarn", "yarn:", "yarn:1", "yarn:0.5", "yarn:nan", "yarn:65", "dynamic:4", "4", ""])
def test_what_is_no_scaling_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r'rope_scaling is .*must be yarn and a factor above 1, at most 64, as "yarn:4"'):
        RopeScaling.read(text)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
def test_a_scaled_model_reads_more_and_turns_slow_frequencies_less(name: str) -> None:
    model = build(name)
    plain, config = model.config.get_text_config(decoder=True), type(model.config).from_dict(model.config.to_dict())
    RopeScaling.read("yarn:4").apply(config)
    assert positions(config) == 4 * plain.max_position_embeddings
    scaled = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    scaled.load_state_dict(model.state_dict())

    def slowest(of: Any) -> dict[str, float]:
        return {
            key: float(value[-1]) for key, value in of.named_buffers() if key.endswith("inv_freq") and "original" not in key
        }

    ratios = {key: was / slowest(scaled)[key] for key, was in slowest(model).items()}
    assert all(value == pytest.approx(1 if "sliding" in key else 4) for key, value in ratios.items())
    assert 4 in map(round, ratios.values())
    with torch.no_grad():
        assert scaled(prompt(1, 600)).logits.isfinite().all()
    with pytest.raises(ConfigError, match="scales its rotary positions already: yarn"):
        RopeScaling(2).apply(config)


def test_a_model_without_rotary_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="rope_scaling is yarn:4; a GPT2Config has no rotary positions"):
        RopeScaling(4).apply(build("gpt2").config)


def test_a_gguf_file_is_scaled_too(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "tiny.gguf"
    write(file, tiny())
    model, _ = load(str(file), dtype="float32", rope_scaling="yarn:3")
    assert positions(model) == 3 * 512
    assert model.config.rope_parameters["rope_type"] == "yarn"
