"""A step that fails half way, in any layer and phase, is simply taken again: with the tokens that there would have been."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import device_layers, sparse_attention
from kvthaw.cache.device_layers import DenseLayer
from kvthaw.engine.graph_runner import ElasticGraph
from kvthaw.errors import CacheError
from kvthaw.index.batches import Units
from zoo import build, prompt, ragged

METHODS = [
    "full",
    "streaming",
    "oracle",
    "icecache-digest",
    "icecache-digest:reuse=2",
    "clusterkv",
    "pariskv",
    "snapkv",
    "h2o",
    "freekv",
]
IDS = prompt(2, 200)
AMPLE: dict[str, Any] = {"budget": 1024, "dense_layers": 0, "block_size": 16}
PHASES = ["begin", "select", "fetch", "attention", "end", "offload", "append"]


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of three layers: when the last one fails two have taken the step."""
    return build("llama", num_hidden_layers=3)


class BoomError(Exception):
    """What goes wrong."""


def boom(*args: Any, **kwargs: Any) -> None:
    raise BoomError


@contextmanager
def broken(model: PreTrainedModel, cache: kvthaw.Cache, number: int, phase: str) -> Iterator[None]:
    """Within it, one phase of one layer raises."""
    layer, patch = cache.kv.layers[number], pytest.MonkeyPatch()
    group = None if isinstance(layer, DenseLayer) else layer.retriever
    hook = None
    if phase == "begin":
        hook = model.model.layers[number].self_attn.k_proj.register_forward_pre_hook(boom)
    elif phase == "end":
        hook = model.model.layers[number].mlp.register_forward_pre_hook(boom)
    elif phase == "attention":
        for module in (device_layers, sparse_attention):
            real = module.sparse_decode
            patch.setattr(module, "sparse_decode", lambda *args, real=real: boom() if current[0] == number else real(*args))
    elif phase == "offload" and not isinstance(layer, DenseLayer):
        patch.setattr(layer.store, "extend", boom)
    elif group is not None and phase == "fetch":
        patch.setattr(layer.sparse.transfer, "fetch", boom)
    elif group is not None and phase in ("select", "append") and layer.leader is None:
        patch.setattr(group.index, phase, boom, raising=False)
    current = [-1]
    hooks = [
        block.self_attn.register_forward_pre_hook(lambda *args, i=i: current.__setitem__(0, i))
        for i, block in enumerate(model.model.layers)
    ]
    try:
        yield
    finally:
        patch.undo()
        for each in (*hooks, hook):
            if each is not None:
                each.remove()


def step(model: PreTrainedModel, cache: kvthaw.Cache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def close(found: Tensor, expected: Tensor) -> None:
    """But for the order of sums: rows may stand in other slots."""
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(("method", "dense_layers"), [(method, turn % 2) for turn, method in enumerate(METHODS)])
def test_a_decode_step(llama: PreTrainedModel, method: str, dense_layers: int) -> None:
    settings = {"dense_layers": dense_layers, **({} if method == "full" else {"budget": 64, "block_size": 16})}
    plain, cache = (kvthaw.Cache(llama, method, **settings) for _ in range(2))
    batch = ragged([90, 61])
    for each in (plain, cache):
        with torch.no_grad():
            llama(**batch, past_key_values=each)
    runner, failed = ElasticGraph(llama.forward, cache, capture=False), dict.fromkeys(PHASES, 0)
    for t in range(21):
        ids, length = IDS[:, t : t + 1], cache.get_seq_length()
        at = [cache.kv.sequences.length(seq) for seq in range(2)]
        positions = torch.tensor(at)[:, None]
        for k in range(2):
            phase = PHASES[(t + 3 * k) % len(PHASES)]
            number = (t // len(PHASES) + k) % 3
            with broken(llama, cache, number, phase):
                try:
                    logits = runner(ids, positions)
                except BoomError:
                    failed[phase] += 1
                    assert cache.get_seq_length() == length
                    continue
                break
        else:
            logits = runner(ids, positions)
        with torch.no_grad():
            expected = llama(ids, position_ids=positions, past_key_values=plain).logits
        close(logits, expected)
        assert cache.get_seq_length() == length + 1
    assert plain.stats().sparse_steps == cache.stats().sparse_steps
    phases = ("begin", "end", "attention") if method in ("full", "streaming") else PHASES[:5]
    assert all(failed[phase] for phase in phases)


@pytest.mark.parametrize(
    ("method", "then"),
    [
        *(("icecache-digest", then) for then in ("crop", "several", "copy")),
        *(("oracle", then) for then in ("crop", "dense", "reorder")),
        *(("clusterkv", then) for then in ("several", "reorder", "fork")),
        *(("full", then) for then in ("dense", "copy")),
    ],
)
def test_something_else_than_the_step_that_failed(llama: PreTrainedModel, method: str, then: str) -> None:
    """The layers that had taken it go back."""
    ample = then == "crop" or method == "icecache-digest"  # a tree that forgets keys keeps another shape
    settings = {"dense_layers": 0, **({} if method == "full" else {"budget": 1024 if ample else 64, "block_size": 16})}
    plain, cache = (kvthaw.Cache(llama, method, **settings) for _ in range(2))
    for each in (plain, cache):
        step(llama, each, IDS[:, :90])
    for t in range(15):
        tokens = 3 if t % 5 == 4 else 1
        ids = IDS[:, 90 + t : 90 + t + tokens]
        if t % 3 == 2:
            with broken(llama, cache, 2 - t % 2, "end" if t % 2 else "begin"), pytest.raises(BoomError):
                step(llama, cache, prompt(2, tokens, seed=t))
            if then == "copy":
                cache = copy.deepcopy(cache)
            for each in (plain, cache):
                if then == "crop":
                    each.crop(-2)
                elif then == "reorder":
                    each.reorder_cache(torch.tensor([1, 0]))
            if then == "fork":
                close(step(llama, cache.fork("full"), ids), step(llama, plain.fork("full"), ids))
            if then in ("dense", "several"):
                ids = IDS[:, : 20 if then == "dense" else 5]
        close(step(llama, cache, ids), step(llama, plain, ids))


@pytest.mark.parametrize(
    ("method", "number"),
    [
        *(("oracle", 0), ("icecache-digest", 2), ("clusterkv", 2), ("pariskv", 0), ("snapkv", 1)),
        *(("full", 2), ("streaming", 0), ("streaming", 2)),
    ],
)
def test_a_prompt(llama: PreTrainedModel, method: str, number: int) -> None:
    """A first one, in whatever shape it then comes; and one that follows others."""
    settings = {} if method == "full" else {"budget": 32, "sparse_queries": 4, "dense_layers": 0}
    cache, plain = (kvthaw.Cache(llama, method, **settings) for _ in range(2))
    with broken(llama, cache, number, "begin"), pytest.raises(BoomError):
        step(llama, cache, prompt(3, 50))
    for each in (cache, plain):
        step(llama, each, IDS[:, :90])
    with broken(llama, cache, number, "begin"), pytest.raises(BoomError):
        step(llama, cache, IDS[:, 90:150])
    assert cache.get_seq_length() == 90
    parts = ((90, 95), (95, 100), (100, 105), (105, 160))
    for start, stop in (*parts, *((t, t + 1) for t in range(160, 170))):
        ids = IDS[:, start:stop]
        if start in (95, 105):
            with broken(llama, cache, number, "begin"), pytest.raises(BoomError):
                step(llama, cache, ids)
        close(step(llama, cache, ids), step(llama, plain, ids))


@pytest.mark.parametrize("method", ["clusterkv:batch=16", "icecache-digest-device:nodes_per_batch=1"])
@pytest.mark.parametrize("then", ["step", "fork", "crop"])
def test_units_that_could_not_be_formed(
    llama: PreTrainedModel, method: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a prompt are formed again as they would have been; later ones with all tokens of their sequence."""
    cache, plain = (kvthaw.Cache(llama, method, budget=64, dense_layers=0, block_size=16) for _ in range(2))
    for each in (cache, plain):
        step(llama, each, IDS[:, :90])
    with monkeypatch.context() as broken_off:
        broken_off.setattr(Units, "write", boom)
        with pytest.raises(BoomError):
            step(llama, cache, IDS[:, 90:91])
    if then == "crop":
        cache.crop(-1)
        plain.crop(-1)
    elif then == "fork":
        cache = cache.fork(method)
    for t in range(90, 100):
        close(step(llama, cache, IDS[:, t : t + 1]), step(llama, plain, IDS[:, t : t + 1]))


@pytest.mark.parametrize("method", ["clusterkv:batch=16", "icecache-digest-device:nodes_per_batch=1"])
def test_units_of_generated_tokens_that_could_not_be_formed(
    llama: PreTrainedModel, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sequence is indexed again."""
    cache, full = (kvthaw.Cache(llama, name, **how) for name, how in ((method, AMPLE), ("full", {})))
    for each in (cache, full):
        step(llama, each, IDS[:, :90])
    failed = 0
    for t in range(90, 145):
        expected = step(llama, full, IDS[:, t : t + 1])
        with monkeypatch.context() as broken_off:
            if t > 91:
                broken_off.setattr(Units, "write", boom)
            try:
                found = step(llama, cache, IDS[:, t : t + 1])
            except BoomError:
                failed += 1
                broken_off.undo()
                found = step(llama, cache, IDS[:, t : t + 1])
        close(found, expected)
    assert failed


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_layers_that_are_not_kvthaws_cannot_take_it_again(name: str) -> None:
    """They have counted the step."""
    model = build(name)
    cache = kvthaw.Cache(model, "oracle", budget=64)
    step(model, cache, IDS[:, :90])
    hook = model.model.layers[2].register_forward_pre_hook(boom)
    with pytest.raises(BoomError):
        step(model, cache, IDS[:, 90:91])
    hook.remove()
    for _ in range(2):
        with pytest.raises(CacheError, match=r"a forward was interrupted; reset\(\) the cache"):
            step(model, cache, IDS[:, 90:91])
    cache.reset()
    step(model, cache, IDS[:, :90])
    assert step(model, cache, IDS[:, 90:91]).isfinite().all()


def test_generate_goes_on_after_an_interruption(llama: PreTrainedModel) -> None:
    """On an attached model also where the last layer's MLP fails, behind the last attention."""
    with kvthaw.attach(llama, "oracle", budget=64) as handle:
        expected = llama.generate(IDS[:1, :90], max_new_tokens=20, do_sample=False)
        handle.cache.reset()
        cache = handle.cache
        ids = IDS[:1, :90]
        with torch.no_grad():
            for t in range(20):
                if t % 3 == 1:
                    with broken(llama, cache, 2, "end"), pytest.raises(BoomError):
                        llama(ids[:, -1:], past_key_values=cache)
                logits = llama(ids if t == 0 else ids[:, -1:], past_key_values=cache).logits
                ids = torch.cat((ids, logits[:, -1:].argmax(dim=-1)), dim=1)
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("method", ["oracle", "icecache-digest", "clusterkv", "thaw"])
def test_rows_of_a_step_that_failed_are_not_counted(llama: PreTrainedModel, method: str) -> None:
    cache = kvthaw.Cache(llama, method, budget=64, block_size=16, dense_layers=0)
    step(llama, cache, prompt(1, 300))
    for number in range(6):
        for _ in range(3):
            hook = llama.model.layers[number % 3].mlp.register_forward_pre_hook(boom)
            with pytest.raises(BoomError):
                step(llama, cache, prompt(1, 1))
            hook.remove()
        step(llama, cache, prompt(1, 1))
    stats = cache.stats()
    assert stats.attended_mean is not None
    assert stats.attended_mean <= 64, (stats.attended_mean, stats.attended_max)
