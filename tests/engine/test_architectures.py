"""Every architecture that kvthaw names: equal to DynamicCache at full budget, rows of a batch equal to the rows alone below it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from zoo import MODELS, build, build_exact, prompt, ragged

SPARSE = ("oracle", "icecache-digest")
"""Methods that take turns at the architectures: one searches on the device, one on the host."""
NEW = 6
LENGTHS = [97, 61, 80]
COMMON = (
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "glm4",
    "phi3",
    "granite",
    "ministral3",
    "seed_oss",
    "minimax_m2",
    "cohere2",
)
"""Those whose kinds of layers and positions another architecture has too: what a running batch must know of a model."""
QUICK = ("llama", "gemma3", "gemma4", "gpt_oss", "qwen3_next", "gpt2")
TURNS = [
    pytest.param(name, SPARSE[turn % 2], marks=() if name in QUICK else pytest.mark.slow, id=name)
    for turn, name in enumerate(MODELS)
]


def tokens(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Tensor:
    """The new tokens of greedy decoding."""
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return out[:, inputs["input_ids"].shape[1] :]


def attention_of(name: str) -> str | None:
    """The implementation that a model begins with: softcaps and sinks are lost in others."""
    return "eager" if name in ("gemma2", "gpt_oss") else None


@pytest.mark.parametrize(("name", "method"), TURNS)
def test_full_budget_equals_dynamic_cache(name: str, method: str) -> None:
    model, batch = build(name, attention=attention_of(name)), ragged(LENGTHS)
    expected = tokens(model, batch)
    assert sum(len(set(row.tolist())) for row in expected) > NEW, f"greedy output is degenerate: {expected}"
    with kvthaw.attach(model, method, budget=160) as handle:
        assert torch.equal(tokens(model, batch), expected)
        stats = handle.stats()
        assert stats.sparse_steps > 0
        assert 0 < stats.retrieved <= stats.attended_max <= 160
    assert model(batch["input_ids"][:1]).logits[0, -1].argmax() == expected[0, 0], "the model was not given back as it was"


@pytest.mark.parametrize(("name", "method"), [turn for turn in TURNS if turn.id in QUICK])
def test_a_row_of_a_batch_generates_what_it_does_alone(name: str, method: str) -> None:
    """The shorter row; alone it has no padding. Of other architectures padding is tested at full budget."""
    model, batch = build_exact(name, attention=attention_of(name)), ragged(LENGTHS[:2])
    alone = {key: value[1:, LENGTHS[0] - LENGTHS[1] :] for key, value in batch.items()}
    with kvthaw.attach(model, method, budget=32) as handle:
        assert torch.equal(tokens(model, batch)[1], tokens(model, alone)[0])
        stats = handle.stats()
        assert stats.retrieved > 0
        assert stats.attended_max <= 32


@pytest.mark.parametrize(("name", "method"), [turn for turn in TURNS if turn.id not in COMMON])
def test_a_running_batch_gives_each_request_its_own_tokens(name: str, method: str) -> None:
    """Prompts that come in chunks beside decode steps, in places that others have had."""
    model = build_exact(name, attention=attention_of(name))
    asked = [(prompt(1, n, seed=n)[0], new) for n, new in ((90, 3), (30, 6), (7, 4))]
    with kvthaw.attach(model, method, budget=32, block_size=16):
        alone = [model.generate(ids[None], max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist() for ids, new in asked]
    batch = kvthaw.Batch(model, method, max_seqs=2, capacity=100, budget=32, block_size=16)
    scheduler = kvthaw.Scheduler(batch, step_tokens=32)
    requests = [scheduler.submit(ids, max_new_tokens=new, stop=()) for ids, new in asked]
    while scheduler.busy:
        scheduler.step()
    assert [request.tokens for request in requests] == alone
    assert batch.stats().retrieved is not None
    assert batch.stats().kv_host_bytes == 0
