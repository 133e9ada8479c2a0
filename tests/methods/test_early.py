"""Rows that a layer chooses while the layer before computes its MLP, with a predicted query."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
import zoo
from kvthaw.cache.index_api import Index, Selection
from kvthaw.cache.retriever import Retriever
from kvthaw.cache.sparse_attention import SparseAttention
from kvthaw.cache.transfer import BulkCopy
from kvthaw.engine.graph_runner import GraphRunner
from kvthaw.errors import ConfigError, UnsupportedModelError
from kvthaw.index.codes import CodesIndex
from kvthaw.methods import resolve
from kvthaw.testing import check_method

EARLY = "thaw:prefetch=True"
FOUR: dict[str, Any] = {"num_hidden_layers": 4}


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of four layers; the last two choose early."""
    return zoo.build("llama", **FOUR)


class Asked:
    """What the indexes were asked with, by layer: by a predicted query, and afterwards by the layer's own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.early: dict[int, list[Tensor]] = {}
        self.own: dict[int, list[Tensor]] = {}
        select, complete = CodesIndex.select_early, CodesIndex.complete

        def spy(index: CodesIndex, query: Tensor, budget: int) -> Selection:
            self.early.setdefault(index.context.layer, []).append(query.clone())
            return select(index, query, budget)

        def completed(index: CodesIndex, found: Selection, query: Tensor) -> Selection:
            self.own.setdefault(index.context.layer, []).append(query.clone())
            return complete(index, found, query)

        patch.setattr(CodesIndex, "select_early", spy)
        patch.setattr(CodesIndex, "complete", completed)


def generate(model: PreTrainedModel, ids: Tensor, tokens: int = 8) -> Tensor:
    found: Tensor = model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return found[:, ids.shape[1] :]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gpt_oss"])
def test_a_query_is_that_of_the_residual_stream_before_the_mlp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next layer's norm and attention turn it into the query; the first two layers have their own."""
    model, asked, streams = zoo.build(name, **FOUR), Asked(monkeypatch), dict[int, list[Tensor]]()
    turns, hooks = list[tuple[Tensor, Tensor]](), []
    for i, layer in enumerate(model.model.layers):

        def keep(module: Any, args: Any, i: int = i) -> None:
            if args[0].shape[1] == 1:
                streams.setdefault(i, []).append(args[0])

        hooks.append(layer.post_attention_layernorm.register_forward_pre_hook(keep))

    def turn(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["hidden_states"].shape[1] == 1:
            turns.append(kwargs["position_embeddings"])

    hooks.append(model.model.layers[0].self_attn.register_forward_pre_hook(turn, with_kwargs=True))
    with kvthaw.attach(model, EARLY, budget=48, dense_layers=0):
        generate(model, zoo.prompt(2, 150), 6)
    for hook in hooks:
        hook.remove()
    served = sorted(asked.own)
    assert served
    assert served[0] >= 2
    for i in served:
        layer = model.model.layers[i]
        for step, query in enumerate(asked.early[i]):
            hidden = layer.input_layernorm(streams[i - 1][step])
            with torch.no_grad():
                expected = _query(layer.self_attn, hidden, turns[step])
            torch.testing.assert_close(query, expected[:, :, 0])
            assert not torch.equal(query, asked.own[i][step])


def _query(attention: Any, hidden: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    dim = attention.head_dim
    made = attention.qkv_proj(hidden)[..., : attention.config.num_attention_heads * dim] if hasattr(attention, "qkv_proj") else (
        attention.q_proj(hidden)
    )  # fmt: skip
    made = made.unflatten(2, (-1, dim))
    made = attention.q_norm(made) if hasattr(attention, "q_norm") else made
    query = made.transpose(1, 2)
    rotated: Tensor = sys.modules[type(attention).__module__].apply_rotary_pos_emb(query, query, *turn)[0]
    return rotated


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("gpt_neox", {"num_hidden_layers": 3}), ("gpt2", {"num_hidden_layers": 3, "n_layer": 3}), ("llama4", {})],
)
def test_a_model_with_another_residual_stream_is_refused(name: str, sizes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"prefetch must be\s+False"):
        kvthaw.attach(zoo.build(name, **sizes), EARLY, budget=48)


def test_packed_projections_are_left_out_by_their_size(llama: PreTrainedModel) -> None:
    """Of weights of 4 bits the first dimension is not that of the output."""
    ids = zoo.prompt(1, 150)
    with kvthaw.attach(llama, EARLY, budget=48, dense_layers=0):
        expected = generate(llama, ids)
        for layer in llama.model.layers:
            layer.self_attn.k_proj = Packed(layer.self_attn.k_proj)
        assert torch.equal(generate(llama, ids), expected)


class Packed(torch.nn.Linear):
    """A projection whose weight is stored as one column."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = torch.nn.Parameter(of.weight.detach().reshape(-1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.view(self.out_features, self.in_features))


def test_two_layers_have_nothing_to_choose_early(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = zoo.build("llama", num_hidden_layers=2), Asked(monkeypatch)
    with kvthaw.attach(model, EARLY, budget=48):
        generate(model, zoo.prompt(1, 100), 3)
    assert not asked.own


def test_layers_with_rotary_angles_of_their_own_keep_their_own_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's full layers follow layers with windows, whose angles differ."""
    asked, model = Asked(monkeypatch), zoo.build("gemma3", num_hidden_layers=4, layer_types=["full_attention"] * 4)
    with kvthaw.attach(model, EARLY, budget=48, dense_layers=0):
        generate(model, zoo.prompt(1, 150), 3)
    assert sorted(asked.own) == [2, 3]
    asked.own.clear()
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    mixed = zoo.build("gemma3", num_hidden_layers=4, layer_types=kinds)
    with kvthaw.attach(mixed, EARLY, budget=48, dense_layers=0):
        generate(mixed, zoo.prompt(1, 150), 3)
    assert sorted(asked.own) == [3]


def test_a_budget_that_covers_everything_is_full_attention(llama: PreTrainedModel) -> None:
    ids = zoo.prompt(2, 150)
    expected = generate(llama, ids, 10)
    with kvthaw.attach(llama, EARLY, budget=400, dense_layers=0):
        assert torch.equal(generate(llama, ids, 10), expected)


def test_a_row_of_a_batch_is_the_row_alone(llama: PreTrainedModel) -> None:
    ids, pads = zoo.prompt(3, 200), (0, 30, 7)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        mask[row, :pad] = 0
    with kvthaw.attach(llama, EARLY, budget=48, dense_layers=0):
        together = llama.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)[:, 200:]
        for row, pad in enumerate(pads):
            assert torch.equal(generate(llama, ids[row : row + 1, pad:])[0], together[row])


def test_several_tokens_at_once_choose_as_one_by_one(llama: PreTrainedModel) -> None:
    ids = zoo.prompt(1, 150)
    one, many = (kvthaw.Cache(llama, EARLY, budget=48, dense_layers=0) for _ in range(2))
    with torch.no_grad():
        for cache in (one, many):
            llama(ids[:, :140], past_key_values=cache)
        apart = torch.cat([llama(ids[:, i : i + 1], past_key_values=one).logits for i in range(140, 150)], dim=1)
        together = llama(ids[:, 140:], past_key_values=many).logits
    torch.testing.assert_close(together, apart, atol=2e-4, rtol=1e-4)


STAGES = {
    "search": (CodesIndex, "select_early"),
    "admit": (Retriever, "_admit"),
    "fetch": (BulkCopy, "fetch"),
    "attention": (CodesIndex, "complete"),
}
"""Where a step fails: what it calls."""


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_is_repeated(llama: PreTrainedModel, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it fails, rows that have slots and were not fetched are fetched again."""
    ids, (owner, name) = zoo.prompt(2, 160), STAGES[stage]
    function, calls = getattr(owner, name), [-1]

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls[0] -= 1
        if calls[0] == 0:
            raise RuntimeError("on purpose")
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, breaks)
    rows = []
    for failing in ((), (2, 5)):
        cache = kvthaw.Cache(llama, EARLY, budget=48, dense_layers=0)
        with torch.no_grad():
            token = llama(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
            found = [token]
            for step in range(8):
                if step in failing:
                    calls[0] = 2 if stage in ("search", "attention") else 4  # of the last layer, whose rows are chosen early
                    with pytest.raises(RuntimeError, match="on purpose"):
                        llama(token, past_key_values=cache)
                token = llama(token, past_key_values=cache).logits.argmax(-1)
                found.append(token)
        rows.append(torch.cat(found, dim=1))
    assert torch.equal(*rows)


def test_an_early_choice_keeps_its_rows_and_takes_the_own_query(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """select() with the predicted query gives the rows. Scores and attention follow the own query."""
    made: list[tuple[Index, Selection, Tensor, Selection]] = []
    complete = CodesIndex.complete

    def spy(index: CodesIndex, found: Selection, query: Tensor) -> Selection:
        early = Selection(found.rows.clone(), found.counts.clone(), estimated=found.estimated)
        made.append((index, early, query, complete(index, found, query)))
        return made[-1][-1]

    monkeypatch.setattr(CodesIndex, "complete", spy)
    with kvthaw.attach(llama, EARLY, budget=48, dense_layers=0):
        generate(llama, zoo.prompt(2, 150), 3)
        index, early, query, late = made[-1]
        assert torch.equal(early.rows, late.rows)
        own = index.select(query, early.rows.shape[2])
    assert late.estimated is not None
    assert own.estimated is not None
    same = (late.estimated.places == own.estimated.places) & (late.estimated.places >= 0)
    both = same[:, :, None] & (late.estimated.scores > -torch.inf) & (own.estimated.scores > -torch.inf)
    assert both.any()
    torch.testing.assert_close(late.estimated.scores[both], own.estimated.scores[both])


def test_it_keeps_the_contract() -> None:
    check_method(EARLY)


def test_an_attention_that_needs_more_than_angles_is_refused() -> None:
    """Ministral 3 scales queries by their positions, which a prediction does not take into account."""
    with pytest.raises(UnsupportedModelError, match=r"prefetch must be\s+False"):
        kvthaw.attach(zoo.build("ministral3", **FOUR), EARLY, budget=48)


def test_a_failed_step_does_not_keep_its_cache(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, attend, calls = zoo.prompt(1, 100), SparseAttention.attend, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError("on purpose")
        return attend(*args, **kwargs)

    monkeypatch.setattr(SparseAttention, "attend", fails)
    cache = kvthaw.Cache(llama, EARLY, budget=48, dense_layers=0)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        with pytest.raises(torch.OutOfMemoryError):
            llama(ids[:, :1], past_key_values=cache)
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None


def test_layers_that_follow_fetch_their_own_rows() -> None:
    """Under a budget that covers everything they attend as under full attention."""
    model, ids = zoo.build("llama", num_hidden_layers=6), zoo.prompt(1, 150)
    method = replace(resolve("pariskv-plus"), prefetches="mlp", anchors=2)
    expected = generate(model, ids, 10)
    with kvthaw.attach(model, method, budget=400, dense_layers=0):
        assert torch.equal(generate(model, ids, 10), expected)


def test_an_index_on_the_host_searches_early(llama: PreTrainedModel) -> None:
    ids = zoo.prompt(1, 150)
    method = replace(resolve("icecache-digest"), prefetches="mlp")
    expected = generate(llama, ids, 10)
    with kvthaw.attach(llama, method, budget=400, dense_layers=0):
        assert torch.equal(generate(llama, ids, 10), expected)


def test_other_predictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefetches is True"):
        replace(resolve("thaw"), prefetches=True)  # type: ignore[arg-type]


def test_a_cache_outlives_detaching(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, asked = zoo.prompt(1, 100), Asked(monkeypatch)
    cache = kvthaw.Cache(llama, EARLY, budget=48)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
        kvthaw.detach(llama)
        kvthaw.Cache(llama, EARLY, budget=48)
        GraphRunner(llama.forward, cache, capture=False)(ids[:, :1], torch.full((1, 1), 100))
    assert asked.own


def test_nothing_stays_on_the_model(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, EARLY, budget=48):
        generate(llama, zoo.prompt(1, 100), 3)
        assert any(module._forward_pre_hooks for module in llama.model.modules())
    assert not any(module._forward_pre_hooks for module in llama.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_captured_steps_are_eager_ones(name: str) -> None:
    model = zoo.build(name, **FOUR).to("cuda")
    ids = zoo.prompt(2, 400).to("cuda")
    tokens = []
    for capture in (False, True):
        with kvthaw.attach(model, EARLY, budget=64, dense_layers=0, capture=capture) as handle:
            tokens.append(generate(model, ids, 60))
            assert (handle.stats().captures > 0) == capture
    assert torch.equal(*tokens)


@pytest.mark.gpu
def test_an_mlp_that_needs_the_host_ends_the_capture_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture fails while the next layer's rows are being fetched."""
    model = zoo.build("llama", **FOUR).to("cuda")
    ids = zoo.prompt(2, 400).to("cuda")
    with kvthaw.attach(model, EARLY, budget=64, dense_layers=0, capture=False):
        expected = generate(model, ids, 20)
    mlp = model.model.layers[2].mlp
    forward = mlp.forward

    def waits(x: torch.Tensor) -> torch.Tensor:
        return forward(x) * (1.0 if x.isfinite().all().item() else 0.0)

    monkeypatch.setattr(mlp, "forward", waits)
    with kvthaw.attach(model, EARLY, budget=64, dense_layers=0) as handle:
        assert torch.equal(generate(model, ids, 20), expected)
        assert handle.stats().captures == 0
