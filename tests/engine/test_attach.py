"""What attach() puts on a model belongs to that model alone, and detach() gives back exactly what was there."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel

import kvthaw
from kvthaw import CacheError, UnsupportedModelError
from zoo import build, prompt

IDS = prompt(1, 60)


def decode(model: Any) -> torch.Tensor:
    return model.generate(input_ids=IDS, max_new_tokens=3, do_sample=False)


class Delegating(nn.Module):
    """As PEFT's models and torch.compile's modules: generate() is the inner model's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Parallel(nn.Module):
    """As DistributedDataParallel: nothing but forward()."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "delegating": Delegating,
    "delegating twice": lambda model: Delegating(Delegating(model)),
    "parallel": Parallel,
    "parallel over delegating": lambda model: Parallel(Delegating(model)),
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_thaws(llama: PreTrainedModel, wrapper: str) -> None:
    wrapped = WRAPPERS[wrapper](llama)
    with kvthaw.attach(wrapped, "oracle", budget=32) as handle, torch.no_grad():
        wrapped(IDS)
        assert handle.stats().tokens == 60
        decode(llama if isinstance(wrapped, Parallel) else wrapped)
        assert handle.stats().sparse_steps == 4
        for other in (wrapped, llama):
            with pytest.raises(CacheError, match="attached"):
                kvthaw.attach(other, "oracle")
            with pytest.raises(CacheError, match="attached"):
                kvthaw.Batch(other, "oracle", max_seqs=1, capacity=100)
        cache = kvthaw.Cache(wrapped, "oracle", budget=32)
        assert wrapped(IDS, past_key_values=cache).logits.isfinite().all()
        assert wrapped(IDS[:, :1], past_key_values=cache).logits.shape[1] == 1
    assert llama.config._attn_implementation == "sdpa"


def test_a_copied_model_runs_its_own_weights(llama: PreTrainedModel) -> None:
    other = build("llama", seed=9)
    with kvthaw.attach(llama, "infinigen", budget=32) as handle:
        decode(llama)
        twin = copy.deepcopy(llama)
        twin.load_state_dict(other.state_dict())
        tokens = handle.stats()
        assert torch.equal(decode(twin), decode(other))
        assert handle.stats() == tokens, "the copy is not attached"
        with kvthaw.attach(twin, "infinigen", budget=32) as second:
            sparse = decode(twin)
            assert second.stats().sparse_steps > 0
    with kvthaw.attach(other, "infinigen", budget=32):
        assert torch.equal(decode(other), sparse)
    assert torch.equal(decode(twin), decode(other))
    assert torch.equal(decode(copy.deepcopy(twin)), decode(other))
    assert twin.config._attn_implementation == "sdpa"


def own_forward(model: PreTrainedModel) -> Any:
    before = model.forward
    return lambda *args, **kwargs: before(*args, **kwargs)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_the_models_own_is_given_back(
    llama: PreTrainedModel, compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.compile(llama.forward, backend="eager") if compiled else own_forward(llama)
    expected = decode(llama)
    llama.forward = before
    with caplog.at_level(logging.WARNING), kvthaw.attach(llama, "oracle", budget=512, prefill_chunk=20) as handle:
        assert torch.equal(decode(llama), expected)
        assert handle.stats().sparse_steps > 0
    assert (
        [record.message for record in caplog.records if "compile" in record.message] != [] if compiled else not caplog.records
    )
    assert llama.forward is before


def test_a_forward_put_around_the_attached_one_stays(llama: PreTrainedModel) -> None:
    expected = decode(llama)
    with kvthaw.attach(llama, "oracle", budget=512) as handle:
        around = llama.forward = own_forward(llama)
        assert torch.equal(decode(llama), expected)
        assert handle.stats().sparse_steps > 0
        with pytest.raises(CacheError, match="attached"):
            kvthaw.attach(llama, "oracle")
    assert llama.forward is around
    assert torch.equal(decode(llama), expected)
    assert llama.config._attn_implementation == "sdpa"


def test_modules_compiled_in_place_run_as_they_are(llama: PreTrainedModel) -> None:
    llama.compile(backend="eager")
    with kvthaw.attach(llama, "oracle", budget=32) as handle:
        decode(llama)
        assert handle.stats().sparse_steps > 0


def test_a_compiled_part_of_a_model_is_refused(llama: PreTrainedModel) -> None:
    llama.model = torch.compile(llama.model, backend="eager")
    with (
        kvthaw.attach(llama, "oracle", budget=32),
        pytest.raises(CacheError, match=r"compiled by torch\.compile.*leave it uncompiled"),
    ):
        decode(llama)


def test_arguments_by_position(llama: PreTrainedModel) -> None:
    with kvthaw.attach(llama, "oracle", budget=512), torch.no_grad():
        expected = llama(IDS, torch.ones_like(IDS), use_cache=True).logits
        cache = kvthaw.Cache(llama, "oracle", budget=512)
        assert torch.equal(llama(IDS, None, None, cache).logits, expected)
        assert cache.get_seq_length() == 60


@pytest.mark.parametrize(
    "shared", [copy.deepcopy, lambda m: m.model, lambda m: type(m)(m.config)], ids=["copy", "inner", "config"]
)
def test_a_config_that_says_kvthaw_already(shared: Callable[[Any], Any]) -> None:
    model = build("llama", attention="eager")
    kvthaw.Cache(model, "oracle", budget=32)
    other = shared(model).eval()
    with kvthaw.attach(other, "oracle", budget=32) as handle, torch.no_grad():
        other(IDS)
        assert handle.stats().tokens == 60
        with kvthaw.attach(model, "oracle", budget=32):
            decode(model)
        other(IDS)  # still attends through kvthaw
    kvthaw.detach(model)
    assert model.config._attn_implementation == other.config._attn_implementation == "eager"


@pytest.mark.parametrize("method", ["infinigen", "icecache-digest:prefetch=True"])
def test_detach_leaves_the_hooks_of_a_model_with_the_same_layers(method: str) -> None:
    """Two models have one decoder. Where the hooks are gone, queries are not predicted, and other rows are chosen."""
    model = build("llama", num_hidden_layers=4)
    other = type(model)(model.config).eval()
    other.model, other.lm_head = model.model, model.lm_head
    ids, found = prompt(1, 150), list[torch.Tensor]()
    for detaches in (False, True):
        caches = [kvthaw.Cache(each, method, budget=32, dense_layers=0) for each in (model, other)]
        with torch.no_grad():
            for each, cache in zip((model, other), caches, strict=True):
                each(ids[:, :-8], past_key_values=cache)
            if detaches:
                kvthaw.detach(other)
            found.append(torch.cat([model(each, past_key_values=caches[0]).logits for each in ids[:, -8:].split(1, dim=1)]))
    assert torch.equal(*found)
    kvthaw.detach(model)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_detach_gives_back_what_a_cache_took(llama: PreTrainedModel) -> None:
    kvthaw.Cache(llama, "infinigen", budget=32)
    kvthaw.detach(llama)
    kvthaw.detach(llama)
    assert llama.config._attn_implementation == "sdpa"
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_a_dropped_handle_is_in_nobodys_way(llama: PreTrainedModel) -> None:
    kvthaw.attach(llama, "oracle", budget=32)
    decode(llama)
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        decode(llama)
        assert handle.stats().budget == 64
    kvthaw.attach(llama, "oracle", budget=32)
    kvthaw.detach(llama)
    assert llama.config._attn_implementation == "sdpa"
    assert "forward" not in vars(llama)


def test_detach_closes_the_handle(llama: PreTrainedModel) -> None:
    handle = kvthaw.attach(llama, "oracle", budget=32)
    decode(llama)
    kvthaw.detach(llama)
    assert handle.stats().sparse_steps == 4
    handle.detach()
    with pytest.raises(CacheError, match="closed"):
        handle.cache  # noqa: B018


def test_a_cache_that_was_filled_before(llama: PreTrainedModel) -> None:
    plain = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(IDS, past_key_values=plain)
    with kvthaw.attach(llama, "oracle", budget=32), torch.no_grad():
        with pytest.raises(CacheError, match=r"DynamicCache that holds 60 tokens.* attach the model before the prompt"):
            llama(IDS[:, :1], past_key_values=plain)
        assert plain.get_seq_length() == 60
    with torch.no_grad():
        assert llama(IDS[:, :1], past_key_values=plain).logits.isfinite().all()


def test_classes_and_other_modules_are_refused() -> None:
    for model in (PreTrainedModel, nn.Linear(2, 2), Parallel(nn.Linear(2, 2)), "a name"):
        with pytest.raises(UnsupportedModelError, match=r"model is .*; it must be a model of transformers that is loaded"):
            kvthaw.attach(model, "oracle")


def test_more_processes_than_kv_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(type(model), "tp_size", 4)
    with pytest.raises(UnsupportedModelError, match="split over 4 processes and has 2 KV heads"):
        kvthaw.attach(model, "oracle", budget=48)


def test_layers_on_several_devices_are_refused() -> None:
    model = build("llama")
    for number, layer in enumerate(model.model.layers):
        with FakeTensorMode():
            layer.self_attn.k_proj.weight = nn.Parameter(torch.empty(32, 64, device=f"cuda:{number}"))
    with pytest.raises(UnsupportedModelError, match=r"layers on cpu, cuda:0, cuda:1 .*tp_size"):
        kvthaw.attach(model, "oracle", budget=48)


def test_a_batch_of_a_model_whose_weights_are_offloaded_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="offloaded"):
        kvthaw.Batch(build("llama").to("meta"), "oracle", max_seqs=1, capacity=64, budget=48)


def test_a_prompt_inside_generate_tells_how_far_it_is(llama: PreTrainedModel) -> None:
    told: list[tuple[int, int]] = []
    prefix = kvthaw.PrefixCache()
    with kvthaw.attach(llama, "oracle", budget=64, prefill_chunk=40, prefix_cache=prefix, progress=lambda *at: told.append(at)):
        llama.generate(prompt(1, 100), max_new_tokens=3, do_sample=False)
        assert told == [(done, 100) for done in (0, 10, 20, 40, 60, 80, 100)]  # two layers
        told.clear()
        llama.generate(torch.cat([prompt(1, 100), prompt(1, 30)], dim=1), max_new_tokens=2, do_sample=False)
        assert (told[0], told[-1]) == ((0, 128), (128, 128))  # the last 128 of 130 always go through the model


def test_an_error_of_progress_ends_the_prompt(llama: PreTrainedModel) -> None:
    def stop(done: int, total: int) -> None:
        if done > 30:
            raise InterruptedError

    with kvthaw.attach(llama, "oracle", budget=64, prefill_chunk=40, progress=stop):
        with pytest.raises(InterruptedError):
            llama.generate(prompt(1, 100), max_new_tokens=3)
        assert llama.generate(prompt(1, 30), max_new_tokens=3, do_sample=False).shape == (1, 33)
    with pytest.raises(kvthaw.ConfigError, match="progress is 'bar'"):
        kvthaw.attach(llama, progress="bar")  # type: ignore[arg-type]
