"""Prompts of a running batch that are given as embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw import Batch, ConfigError, PrefixCache, Request
from zoo import build, build_exact, prompt

SIZES: dict[str, Any] = {"budget": 48, "block_size": 16}


def of_an_image(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Embeddings of a prompt some of whose tokens stand for something else."""
    found = model.get_input_embeddings()(ids).detach()
    found[10:20] = torch.randn(10, found.shape[1], dtype=found.dtype, generator=torch.Generator().manual_seed(2))
    return found


def alone(model: PreTrainedModel, method: str, ids: Tensor, embeddings: Tensor, new: int, **sizes: Any) -> list[int]:
    """Tokens behind the embeddings by plain generate()."""
    with kvthaw.attach(model, method, **sizes):
        given = {"inputs_embeds": embeddings[None], "attention_mask": torch.ones_like(ids)[None]}
        return model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0)[0].tolist()


@pytest.mark.parametrize("method", ["full", "clusterkv", "icecache-digest"])
def test_prompts_of_embeddings_and_of_tokens_share_a_batch(method: str) -> None:
    model, sizes = build_exact("llama"), {} if method == "full" else SIZES
    prompts = [prompt(1, n, seed=n)[0] for n in (90, 70)]
    seen = of_an_image(model, prompts[0])
    batch = Batch(model, method, max_seqs=2, capacity=120, prefill_chunk=32, **sizes)
    image = batch.join(prompts[0], embeddings=seen, max_new_tokens=12, stop=())
    text = batch.join(prompts[1], max_new_tokens=12, stop=())
    lost = False
    while batch.requests:
        batch.step()
        if len(image.tokens) == 4 and not lost:  # its prompt comes once more
            lost = True
            batch.preempt(image)
            batch.join(image)
    assert image.tokens == alone(model, method, prompts[0], seen, 12, **sizes)
    own = model.get_input_embeddings()
    assert text.tokens == alone(model, method, prompts[1], own(prompts[1]).detach(), 12, **sizes)
    assert image.tokens != alone(model, method, prompts[0], own(prompts[0]).detach(), 12, **sizes)


def test_they_take_and_leave_no_prefix() -> None:
    model, ids, prefixes = build_exact("llama"), prompt(1, 200)[0], PrefixCache(host_bytes=1 << 26)
    batch = Batch(model, "quest", max_seqs=1, capacity=220, prefix_cache=prefixes, **SIZES)

    def serve(**how: Any) -> Request:
        request = batch.join(ids, max_new_tokens=8, stop=(), **how)
        while batch.requests:
            batch.step()
        return request

    seen = of_an_image(model, ids)
    expected = serve(embeddings=seen)
    assert prefixes.kept_bytes == 0
    assert serve().cached_tokens == 0
    assert serve().cached_tokens > 0
    again = serve(embeddings=seen)
    assert (again.cached_tokens, again.tokens) == (0, expected.tokens)


@pytest.mark.parametrize(
    ("architecture", "shape", "more", "reason"),
    [
        ("llama", (30, 64), {}, r"shape \(30, 64\); they must have \(40, 64\)"),
        ("llama", (40, 32), {}, r"they must have \(40, 64\)"),
        ("llama", (40, 64), {"name": "book"}, "kept by their token ids"),
        ("gemma3n", (40, 64), {}, "needs the tokens' own inputs of each layer"),
    ],
)
def test_embeddings_that_cannot_be_served_are_refused(
    architecture: str, shape: tuple[int, int], more: dict[str, str], reason: str
) -> None:
    batch = Batch(build(architecture), "full", max_seqs=1, capacity=100)
    with pytest.raises(ConfigError, match=reason):
        batch.request(prompt(1, 40)[0], embeddings=torch.zeros(shape), **more)


def test_embeddings_are_a_tensor() -> None:
    with pytest.raises(ConfigError, match="embeddings"):
        Batch(build("llama"), "full", max_seqs=1, capacity=100).request([1], embeddings=[[0.0]])  # type: ignore[typeddict-item]
