"""Models that see: their tokens are as with transformers' own cache, images and all."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import kvthaw
from kvthaw import CacheError
from zoo import prompt, settings_of, sharpen

IMAGE, BEGIN, END = 5, 6, 7
IDS = torch.where((prompt(1, 90) >= IMAGE) & (prompt(1, 90) <= END), 8, prompt(1, 90))
WITH_IMAGE = IDS.clone()
WITH_IMAGE[0, 19:25] = torch.tensor([BEGIN, *[IMAGE] * 4, END])


def gemma3() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = Gemma3Config(
        text_config=settings_of("gemma3"),
        vision_config=vision | {"patch_size": 8},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    kinds = {"token_type_ids": (WITH_IMAGE == IMAGE).long()}
    return Gemma3ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 32, 32), **kinds}


def qwen3_vl() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    turns = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
    config = Qwen3VLConfig(
        text_config=settings_of("qwen3") | {"rope_parameters": turns},
        vision_config=vision | {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
        video_token_id=9,
    )
    kinds = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "mm_token_type_ids": (WITH_IMAGE == IMAGE).int()}
    return Qwen3VLForConditionalGeneration(config), {"pixel_values": torch.randn(16, 96), **kinds}


def llama4() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 16}
    config = Llama4Config(
        text_config=settings_of("llama4"),
        vision_config=vision
        | {
            "patch_size": 4,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "pixel_shuffle_ratio": 0.5,
        },
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    return Llama4ForConditionalGeneration(config), {"pixel_values": torch.randn(1, 3, 16, 16)}


SEEING = [gemma3, qwen3_vl, llama4]


def ready(make: Callable[[], tuple[PreTrainedModel, dict[str, Tensor]]]) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    model, image = make()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return sharpen(model, 0).eval().requires_grad_(False), image


def logits(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    """Of six tokens that are generated, [B, 6, V]."""
    how = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return torch.stack(model.generate(input_ids=ids, **how, **given).logits, dim=1)


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "method"),
    [(gemma3, "oracle"), (gemma3, "full"), (qwen3_vl, "streaming"), (qwen3_vl, "oracle"), (llama4, "oracle")],
)
def test_an_image_in_the_prompt(make: Any, method: str) -> None:
    model, image = ready(make)
    expected = logits(model, WITH_IMAGE, **image)
    others = [image | {"pixel_values": -image["pixel_values"]}]
    if make is gemma3:
        others.append({"pixel_values": image["pixel_values"]})  # as if it attended causally
    assert not any(same(logits(model, WITH_IMAGE, **other), expected) for other in others)
    with kvthaw.attach(model, method, budget=512, prefill_chunk=40) as handle:
        assert same(logits(model, WITH_IMAGE, **image), expected)
        assert handle.stats().tokens == 95
    cache = kvthaw.Cache(model, method, budget=512)
    assert same(logits(model, WITH_IMAGE, past_key_values=cache, **image), expected)
    with kvthaw.attach(model, method, budget=32) as handle:
        logits(model, WITH_IMAGE, **image)
        assert method == "full" or handle.stats().attended_max <= 32


@pytest.mark.parametrize("make", SEEING)
def test_text_alone_in_a_running_batch(make: Any) -> None:
    model, _ = ready(make)
    batch = kvthaw.Batch(model, "oracle", max_seqs=1, capacity=120, prefill_chunk=40, budget=512)
    text = batch.join(IDS, max_new_tokens=6, stop=())
    while batch.requests:
        batch.step()
    assert text.tokens == logits(model, IDS).argmax(dim=-1)[0].tolist()


def test_an_image_and_padding() -> None:
    model, image = ready(gemma3)
    ids = torch.cat((torch.cat((torch.zeros(1, 30, dtype=torch.long), IDS[:, :60]), dim=1), WITH_IMAGE))
    mask = (torch.arange(90) >= torch.tensor([[30], [0]])).long()
    given = image | {"attention_mask": mask, "token_type_ids": (ids == IMAGE).long()}
    expected = logits(model, ids, **given)
    with kvthaw.attach(model, "oracle", budget=512):
        assert same(logits(model, ids, **given), expected)


@pytest.mark.parametrize("make", SEEING)
def test_text_alone_goes_in_chunks(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = ready(make)
    given = {"token_type_ids": torch.zeros_like(IDS)} if make is gemma3 else {}
    expected = logits(model, IDS, **given)
    cache = kvthaw.Cache(model, "oracle", budget=512)
    assert same(logits(model, IDS, past_key_values=cache, **given), expected)
    with caplog.at_level(logging.WARNING), kvthaw.attach(model, "oracle", budget=512, prefill_chunk=40):
        assert same(logits(model, IDS, **given), expected)
    assert not caplog.records, "no prompt of text alone goes through in one pass"


def test_an_image_that_attends_both_ways_comes_with_the_first_prompt() -> None:
    model, image = ready(gemma3)
    cache = kvthaw.Cache(model, "oracle", budget=512)
    kinds = torch.cat((torch.zeros_like(IDS), image["token_type_ids"]), dim=1)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(CacheError, match=r"an image attend both ways; kvthaw takes such tokens with the first prompt"):
            model(WITH_IMAGE, past_key_values=cache, pixel_values=image["pixel_values"], token_type_ids=kinds)
