"""Layers of recent tokens alone: a prompt has the logits of transformers, and takes time and memory linear in its length."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import create_chunked_causal_mask, create_sliding_window_causal_mask

import kvthaw
from kvthaw.engine.hf import masks
from kvthaw.engine.hf.layer import attention
from kvthaw.errors import UnsupportedModelError
from zoo import build, prompt, ragged

NAMES = ["gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "llama4", "olmo3", "cohere2", "exaone4"]


def logits(model: Any, parts: int = 1, **given: Tensor) -> Tensor:
    """Of every token, whose prompt comes in parts."""
    ids, mask, cache, found = given["input_ids"], given.get("attention_mask"), None, []
    with torch.no_grad():
        for part in ids.tensor_split(parts, dim=1):
            seen = sum(one.shape[1] for one in found) + part.shape[1]
            out = model(part, attention_mask=None if mask is None else mask[:, :seen], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits)
    return torch.cat(found, dim=1)


@pytest.mark.parametrize("name", NAMES)
def test_prompts_have_the_logits_of_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "QUERIES", 32)
    rows = ragged([150, 110])
    real = rows["attention_mask"].bool()
    expected = logits(build(name, attention="eager"), **rows)[real]
    with kvthaw.attach(model := build(name), "full"):
        for parts in (1, 3):
            torch.testing.assert_close(logits(model, parts, **rows)[real], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss", "llama4"])
@pytest.mark.parametrize("pads", [[0], [0, 700]])
def test_a_window_layer_takes_time_and_memory_linear_in_the_prompt(name: str, pads: list[int]) -> None:
    model, cost, module = build(name), [], nn.Identity()
    module.num_key_value_groups = 2
    with kvthaw.attach(model, "full"), torch.no_grad():
        for tokens in (2048, 4096):
            given = {"config": model.config, "inputs_embeds": torch.empty(len(pads), tokens, 8), "past_key_values": None}
            padding = None if pads == [0] else torch.arange(tokens) >= torch.tensor(pads)[:, None]
            create = create_chunked_causal_mask if name == "llama4" else create_sliding_window_causal_mask
            q, k = torch.randn(len(pads), 4, tokens, 8), torch.randn(len(pads), 2, tokens, 8)
            how: dict[str, Any] = {"gemma2": {"softcap": 5.0}, "gpt_oss": {"s_aux": torch.randn(4)}}.get(name, {})
            with Cost() as counted:
                attention(module, q, k, k, create(**given, attention_mask=padding), **how)
            cost.append((counted.largest, counted.scores))
    (largest, scores), (twice, twice_scores) = cost
    assert twice <= 2.1 * largest
    assert twice_scores <= 2.1 * scores


class Cost(TorchDispatchMode):
    """Counts the numbers of the largest tensor that is made, and the scores that attention computes."""

    largest = scores = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in (out if isinstance(out, tuple) else (out,)) if isinstance(one, Tensor)]
        self.largest = max(self.largest, *(one.numel() for one in made), 0)
        if "scaled_dot_product" in str(func):
            self.scores += args[0].shape[2] * args[1].shape[2]
        elif func is torch.ops.aten.bmm.default:
            self.scores += made[0].shape[1] * made[0].shape[2]
        return out


def test_dropout_drops_as_in_transformers() -> None:
    found = []
    for attend in (nullcontext(), None):
        model = build("gemma3", attention="sdpa", attention_dropout=0.5).train()
        with attend or kvthaw.attach(model, "full"):
            torch.manual_seed(3)
            found.append(model(prompt(1, 90), use_cache=False).logits)
    torch.testing.assert_close(found[1], found[0])


def test_a_mask_of_other_keys_is_refused() -> None:
    create, x = create_sliding_window_causal_mask, torch.randn(1, 2, 50, 8)
    with kvthaw.attach(model := build("gemma3"), "full"):
        mask = create(config=model.config, inputs_embeds=x[:, 0], attention_mask=None, past_key_values=None)
        with pytest.raises(UnsupportedModelError, match="attends to 49 tokens by a mask of 50"):
            attention(nn.Identity(), x, x[:, :, 1:], x[:, :, 1:], mask)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4"])
def test_gpu_prompts_have_the_logits_of_transformers(name: str) -> None:
    rows = {key: one.cuda() for key, one in ragged([1300, 700]).items()}
    real = rows["attention_mask"].bool()
    expected = logits(build(name, attention="eager", max_position_embeddings=2048).cuda(), **rows)[real]
    with kvthaw.attach(model := build(name, max_position_embeddings=2048).cuda(), "full"):
        for parts in (1, 3):
            torch.testing.assert_close(logits(model, parts, **rows)[real], expected, atol=1e-3, rtol=1e-3)
