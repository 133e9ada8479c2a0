"""Keys or values that are not finite while decoding are an error that names the layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

import kvthaw
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.errors import CacheError
from zoo import prompt

IDS = prompt(1, 130)


def poison(model: PreTrainedModel, where: str, bad: float) -> Tensor:
    """Break a layer's projection; return its weight as it was."""
    weight = getattr(model.model.layers[1].self_attn, where).weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[3, 5] = bad
    return good


@pytest.mark.parametrize(
    ("method", "inference"),
    [
        ("full", False),
        ("full", True),
        ("streaming", False),
        ("oracle", True),
        ("icecache", False),
        ("pariskv", False),
        ("h2o", True),
    ],
)
def test_while_decoding(llama: PreTrainedModel, method: str, inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad(), kvthaw.attach(llama, method, budget=64) as handle:
        llama(IDS)
        for t in range(5):
            llama(IDS[:, t : t + 1], past_key_values=handle.cache)
        good = poison(llama, "v_proj", torch.inf)
        with pytest.raises(CacheError, match=r"layer [12]"):
            llama(IDS[:, 5:6], past_key_values=handle.cache)
        llama.model.layers[1].self_attn.v_proj.weight.copy_(good)
        handle.cache.reset()
        llama(IDS, past_key_values=handle.cache)
        assert llama(IDS[:, :1], past_key_values=handle.cache).logits.isfinite().all()


def test_after_a_crop_the_cache_goes_on(llama: PreTrainedModel) -> None:
    cache, plain = (kvthaw.Cache(llama, "oracle", budget=64) for _ in range(2))
    with torch.no_grad():
        for one in (cache, plain):
            llama(IDS, past_key_values=one)
        good = poison(llama, "k_proj", torch.nan)
        llama(IDS[:, :1], past_key_values=cache)
        for _ in range(2):
            with pytest.raises(CacheError, match=r"not finite in layer 1"):
                llama(IDS[:, 1:2], past_key_values=cache)
        assert cache.get_seq_length() == 131
        llama.model.layers[1].self_attn.k_proj.weight.copy_(good)
        cache.crop(-1)
        assert torch.allclose(llama(IDS[:, :1], past_key_values=cache).logits, llama(IDS[:, :1], past_key_values=plain).logits)


def test_a_crop_clears_a_continuation_that_was_not_finite(llama: PreTrainedModel) -> None:
    cache, plain = (kvthaw.Cache(llama, "oracle", budget=64) for _ in range(2))
    with torch.no_grad():
        for one in (cache, plain):
            llama(IDS, past_key_values=one)
        good = poison(llama, "k_proj", torch.nan)
        llama(IDS[:, :40], past_key_values=cache)
        llama.model.layers[1].self_attn.k_proj.weight.copy_(good)
        cache.crop(-40)
        assert torch.allclose(llama(IDS[:, :1], past_key_values=cache).logits, llama(IDS[:, :1], past_key_values=plain).logits)


@pytest.mark.parametrize("method", ["oracle", "full"])
def test_a_crop_before_the_error_is_reported_clears_it(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, budget=None if method == "full" else 64)
    with torch.no_grad():
        llama(IDS, past_key_values=cache)
        good = poison(llama, "k_proj", torch.nan)
        runner = ElasticGraph(llama.forward, cache, capture=False)
        runner(IDS[:, :1], torch.tensor([[IDS.shape[1]]]))
        llama.model.layers[1].self_attn.k_proj.weight.copy_(good)
        cache.crop(-1)
        for t in range(2):
            assert runner(IDS[:, :1], torch.tensor([[IDS.shape[1] + t]])).isfinite().all()


@pytest.mark.parametrize("method", ["oracle", "full"])
def test_in_a_batch(llama: PreTrainedModel, method: str) -> None:
    batch = kvthaw.Batch(llama, method, max_seqs=2, capacity=300, budget=None if method == "full" else 64)
    request = batch.join(IDS, max_new_tokens=20, stop=[])
    batch.step()
    good = poison(llama, "v_proj", torch.nan)
    batch.step()
    assert batch.step() == [request]
    assert (request.finished, batch.requests, batch.free) == ("error", [], 2)
    assert "not finite in layer 1" in str(request.error)
    with torch.no_grad():
        llama.model.layers[1].self_attn.v_proj.weight.copy_(good)
    again = batch.join(IDS, max_new_tokens=2, stop=[])
    batch.step()
    batch.step()
    assert again.finished == "length"


def spoil_the_first(model: PreTrainedModel) -> RemovableHandle:
    """From now on a layer's values of the first row are not finite."""

    def spoil(module: torch.nn.Module, given: Any, out: Tensor) -> None:
        out[0].fill_(torch.nan)

    return model.model.layers[1].self_attn.v_proj.register_forward_hook(spoil)


@pytest.mark.parametrize("leaves", [0, 1])
@pytest.mark.parametrize("method", ["oracle", "full"])
def test_a_request_that_leaves_takes_only_its_own_along(llama: PreTrainedModel, method: str, leaves: int) -> None:
    """The first request's values were not finite in a step, whoever leaves then."""
    batch = kvthaw.Batch(llama, method, max_seqs=2, capacity=300, budget=None if method == "full" else 64)
    requests = [batch.join(IDS, max_new_tokens=20, stop=[]) for _ in range(2)]
    while len(batch.decoding) < 2:
        batch.step()
    hook = spoil_the_first(llama)
    batch.step()
    hook.remove()
    batch.leave(requests[leaves])
    other = requests[1 - leaves]
    for _ in range(2):  # a slot that is emptied has the flags asked for again
        assert batch.step() == [other]
        if other.finished:
            break
    if leaves == 0:
        assert other.error is None
    else:
        assert "not finite in layer 1, sequence 0" in str(other.error)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", ["oracle", "full", "icecache"])
def test_other_requests_go_on(llama: PreTrainedModel, method: str, ahead: bool) -> None:
    """A request whose values were not finite in a step of several fails alone."""
    how = {"max_seqs": 3, "capacity": 300, "budget": None if method == "full" else 64}
    alone = kvthaw.Batch(llama, method, **how)
    expected = alone.join(IDS[:, 1:], max_new_tokens=20, stop=[])
    while not expected.finished:
        alone.step()
    scheduler = kvthaw.Scheduler(kvthaw.Batch(llama, method, **how))
    scheduler.ahead = ahead
    spoilt, *others = (scheduler.submit(ids[0], max_new_tokens=20, stop=[]) for ids in (IDS, IDS[:, 1:], IDS[:, 1:]))
    while len(scheduler.batch.decoding) < 3:
        scheduler.step()
    assert spoilt.seq == 0
    hook = spoil_the_first(llama)
    scheduler.step()
    hook.remove()
    late = scheduler.submit(IDS[0, 1:], max_new_tokens=20, stop=[])
    told = list[kvthaw.Request]()
    while scheduler.busy:
        told += scheduler.step()
    assert spoilt in told
    assert "not finite in layer 1, sequence 0" in str(spoilt.error)
    assert [one.tokens for one in (*others, late)] == [expected.tokens] * 3


@pytest.mark.parametrize("method", ["oracle", "full"])
def test_a_request_that_is_preempted_keeps_what_was_not_finite(llama: PreTrainedModel, method: str) -> None:
    batch = kvthaw.Batch(llama, method, max_seqs=1, capacity=300, budget=None if method == "full" else 64)
    request = batch.join(IDS, max_new_tokens=20, stop=[])
    while not batch.decoding:
        batch.step()
    hook = spoil_the_first(llama)
    batch.step()
    hook.remove()
    assert batch.preempt(request), "not kept"
    other = batch.join(IDS, max_new_tokens=3, stop=[])
    while not other.finished:
        batch.step()
    batch.join(request)
    while not request.finished:
        batch.step()
    assert "not finite in layer 1, sequence 0" in str(request.error)


@pytest.mark.parametrize("tokens", [130, 20])
@pytest.mark.parametrize("method", ["full", "oracle", "clusterkv", "icecache-digest", "pariskv-plus", "streaming"])
def test_the_next_request_of_a_slot_reads_none_of_it(llama: PreTrainedModel, method: str, tokens: int) -> None:
    """Beside a longer one, whose keys are read from as many slots."""
    how = {"max_seqs": 2, "capacity": 300, "budget": None if method == "full" else 64}
    ids, longer = prompt(1, tokens, seed=6), prompt(1, 180, seed=7)
    expected = list[list[int]]()
    for one in (ids, longer):
        alone = kvthaw.Batch(llama, method, **how)
        request = alone.join(one, max_new_tokens=12, stop=[])
        while not request.finished:
            alone.step()
        expected.append(request.tokens)
    batch = kvthaw.Batch(llama, method, **how)
    spoilt = batch.join(IDS, max_new_tokens=40, stop=[])
    while len(spoilt.tokens) < 3:
        batch.step()
    hook = spoil_the_first(llama)
    batch.step()
    hook.remove()
    while not spoilt.finished:
        batch.step()
    requests = [batch.join(one, max_new_tokens=12, stop=[]) for one in (ids, longer)]
    assert requests[0].seq == 0
    while batch.requests:
        batch.step()
    assert [one.tokens for one in requests] == expected
    assert [one.error for one in requests] == [None, None]


def test_beams_take_along_what_was_not_finite(llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, "oracle", budget=64)
    with torch.no_grad():
        llama(IDS.repeat(2, 1), past_key_values=cache)
        hook = spoil_the_first(llama)
        llama(IDS[:, :1].repeat(2, 1), past_key_values=cache)
        hook.remove()
        cache.reorder_cache(torch.tensor([1, 0]))
        with pytest.raises(CacheError, match="not finite in layer 1, sequence 1"):
            llama(IDS[:, :1].repeat(2, 1), past_key_values=cache)


def decode(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor) -> None:
    for token in ids.split(1, dim=1):
        model(token, past_key_values=cache)
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["pariskv", "full", "icecache-digest"])
def test_gpu_within_some_steps(llama: PreTrainedModel, method: str) -> None:
    llama.cuda()
    ids = IDS.cuda()
    with torch.no_grad(), kvthaw.attach(llama, method, budget=64) as handle:
        llama(ids)
        for t in range(20):
            with torch.inference_mode(t < 10):  # what the host looks at outlives the mode of the step that asked first
                llama(ids[:, t : t + 1], past_key_values=handle.cache)
        poison(llama, "v_proj", torch.nan)
        with pytest.raises(CacheError, match=r"layer [12]"):
            decode(llama, handle.cache, ids[:, 20:52])
