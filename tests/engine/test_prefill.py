"""A prompt in chunks is the prompt."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import kvthaw
from kvthaw.cache import kv_prefetcher
from kvthaw.cache.host import HostStore
from kvthaw.engine.hf import chunks
from kvthaw.engine.prefill import prefill
from kvthaw.errors import ConfigError, HostMemoryError
from kvthaw.index.bounds import BoundIndex
from kvthaw.index.clusters import ClusterIndex
from kvthaw.index.forest import TreeIndex
from kvthaw.kernels import dense
from shapes import close
from zoo import DISTINCT, build, build_exact, prompt, ragged

BATCH = ragged([120, 90, 33])
WHOLE = 1 << 20


def answer(model: PreTrainedModel, method: str, chunk: int, given: dict[str, Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their logits."""
    with kvthaw.attach(model, method, prefill_chunk=chunk, **settings):
        out = model.generate(
            **given, max_new_tokens=4, min_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return out.sequences, torch.stack(out.logits, dim=1)


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("llama", 7), ("gemma2", 40), ("gpt_oss", 40), ("gemma4", 40), ("llama4", 17), ("gpt2", 40)],
)
def test_chunks_give_what_one_pass_gives(monkeypatch: pytest.MonkeyPatch, name: str, chunk: int) -> None:
    """Padding, sliding windows, softcap, sinks, layers that share KV; parts of the past that end inside a block."""
    for length, tokens in (("BLOCK", 16), ("RUN", 32)):
        monkeypatch.setattr(kv_prefetcher, length, tokens)
        monkeypatch.setattr(dense, length, tokens)
    model = build(name)
    for method, settings in (("oracle", {"budget": 512, "block_size": 24}), ("full", {})):
        tokens, logits = answer(model, method, WHOLE, BATCH, **settings)
        found, close_to = answer(model, method, chunk, BATCH, **settings)
        assert torch.equal(found, tokens)
        close(close_to, logits)


@pytest.mark.parametrize("pads", [[40], [16, 50]])
def test_a_chunk_of_padding_alone(llama: PreTrainedModel, pads: list[int]) -> None:
    given = {"input_ids": prompt(len(pads), 100), "attention_mask": (torch.arange(100) >= torch.tensor(pads)[:, None]).long()}
    tokens, logits = answer(llama, "quest", WHOLE, given, budget=64)
    found, close_to = answer(llama, "quest", 16, given, budget=64)
    assert torch.equal(found, tokens)
    close(close_to, logits)


def test_of_chunks_the_first_is_short() -> None:
    llama, lengths = build("llama", num_hidden_layers=1), []
    llama.model.layers[0].register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    with kvthaw.attach(llama, "full", prefill_chunk=400), torch.no_grad():
        llama(prompt(1, 420), use_cache=True)
    assert lengths == [20, 400]


@pytest.mark.parametrize("method", ["full", "quest", "snapkv"])
def test_a_prompt_of_no_tokens_leaves_the_cache_empty(method: str, llama: PreTrainedModel) -> None:
    cache = kvthaw.Cache(llama, method)
    assert prefill(llama, cache, []).numel() == 0
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", DISTINCT)
def test_every_method_is_indexed_as_in_one_pass(name: str) -> None:
    """A small budget, so that the answer hangs on what the index chose; a last chunk that is no longer than a few steps."""
    llama, given = build_exact("llama", num_hidden_layers=2), {"input_ids": prompt(1, 300)}
    tokens, logits = answer(llama, name, WHOLE, given, budget=None if name == "full" else 64)
    found, close_to = answer(llama, name, 99, given, budget=None if name == "full" else 64)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(close_to, logits, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("method", "index", "builds", "appends"), [("quest", BoundIndex, 1, 3), ("clusterkv", ClusterIndex, 1, 0)]
)
def test_nothing_is_indexed_twice(
    monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel, method: str, index: type, builds: int, appends: int
) -> None:
    """What grows is appended to; what is better whole is built with the last chunk, before anything is decoded."""
    calls: list[tuple[str, int]] = []
    for name, at in (("build", 2), ("append", 1)):
        before = getattr(index, name)

        def counted(self: Any, *args: Any, name: str = name, at: int = at, before: Any = before) -> None:
            calls.append((name, args[at].shape[-2]))
            inside = len(calls)
            before(self, *args)
            del calls[inside:]  # build() may append by itself

        monkeypatch.setattr(index, name, counted)
    with kvthaw.attach(llama, method, budget=64, prefill_chunk=80) as handle:
        llama(prompt(1, 300), logits_to_keep=1)
        layers = len(handle.cache.kv.offloaded)
        region = handle.cache.kv.offloaded[0].indexed(0) - handle.cache.kv.offloaded[0].plan.regions.sink
    assert [name for name, _ in calls].count("build") == builds * layers
    assert [name for name, _ in calls].count("append") == appends * layers
    assert sum(n for _, n in calls) == layers * region


TENSORS = [torch.tensor([3, 4]), torch.tensor([80, 3, 41, 3]), torch.tensor([-1, -50]), torch.arange(0)]


@pytest.mark.parametrize("keep", [0, 1, 20, 35, 100, -1, -3, -40, -200, *TENSORS], ids=str)
def test_logits_that_were_asked_for(llama: PreTrainedModel, keep: int) -> None:
    with kvthaw.attach(llama, "oracle", budget=512, prefill_chunk=30), torch.no_grad():
        found = llama(prompt(2, 100), logits_to_keep=keep).logits
    with kvthaw.attach(llama, "oracle", budget=512), torch.no_grad():
        close(found, llama(prompt(2, 100), logits_to_keep=keep).logits)


def test_layers_that_share_kv_asked_with_the_last_queries_only() -> None:
    model = build("gemma4")
    with kvthaw.attach(model, "oracle", budget=512), torch.no_grad():
        close(model(prompt(1, 100), logits_to_keep=20).logits, model(prompt(1, 100)).logits[:, -20:])


class Largest(TorchDispatchMode):
    """The most elements that any result had."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.most = max([self.most, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


def test_no_tensor_grows_with_the_prompt(monkeypatch: pytest.MonkeyPatch, llama: PreTrainedModel) -> None:
    for name in ("BLOCK", "RUN"):
        monkeypatch.setattr(kv_prefetcher, name, 64)

    def largest(tokens: int, chunk: int) -> int:
        with kvthaw.attach(llama, "icecache-digest", budget=64, prefill_chunk=chunk, block_size=32), Largest() as seen:
            llama(prompt(1, tokens), logits_to_keep=1)
        return seen.most

    assert largest(450, 64) == largest(200, 64) < largest(200, WHOLE)


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_prompt(device: torch.device) -> None:
    model = build("llama", max_position_embeddings=1 << 20, num_key_value_heads=4, head_dim=64).to(device, torch.bfloat16)

    def peak(tokens: int) -> int:
        with kvthaw.attach(model, "icecache-digest", budget=64, prefill_chunk=1024):
            torch.cuda.reset_peak_memory_stats()
            model(prompt(1, tokens).to(device), logits_to_keep=1)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()

    peak(65536)
    assert peak(131072) < 1.05 * peak(65536)


def test_the_prompt_is_known_from_its_first_chunk_on(llama: PreTrainedModel) -> None:
    """A budget that is a share of it, and the room it takes on the host."""
    with kvthaw.attach(llama, "oracle", budget=0.5, prefill_chunk=50) as handle:
        llama(prompt(1, 200))
        assert handle.stats().budget == 100
    with kvthaw.attach(llama, "oracle", budget=64, prefill_chunk=50, host_bytes=100_000, block_size=50) as handle:
        llama(prompt(1, 100))
        with pytest.raises(HostMemoryError, match="are free"):
            llama(prompt(1, 200))
        assert handle.cache.get_seq_length() == 0


def test_a_long_continuation_comes_in_chunks_too(llama: PreTrainedModel) -> None:
    ids, logits = prompt(1, 250), []
    for chunk in (WHOLE, 40):
        with kvthaw.attach(llama, "pariskv", budget=512, prefill_chunk=chunk) as handle, torch.no_grad():
            llama(ids[:, :100])
            logits.append(llama(ids[:, 100:], past_key_values=handle.cache).logits)
    close(logits[1], logits[0])


def test_what_cannot_be_continued_goes_through_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = build("qwen3_next")
    with caplog.at_level(logging.WARNING), kvthaw.attach(model, "oracle", budget=64, prefill_chunk=40), torch.no_grad():
        found = model(prompt(1, 100)).logits
    assert "LinearAttention" in caplog.text
    with kvthaw.attach(model, "oracle", budget=64), torch.no_grad():
        close(found, model(prompt(1, 100)).logits)


def test_a_chunk_has_tokens(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="prefill_chunk is 0; it must be at least 1"):
        kvthaw.attach(llama, prefill_chunk=0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", ["clusterkv", "pariskv-plus"])
def test_earlier_rows_come_once_for_attention_and_index(method: str, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that is built whole takes them as they pass in the last chunk; a step that fails then is taken again."""
    model, ids, read = build_exact("llama"), prompt(1, 150), list[int]()
    with kvthaw.attach(model, method, budget=48, dense_layers=0):
        expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    cache = kvthaw.Cache(model, method, budget=48, dense_layers=0)
    rows_of = HostStore.read

    def counted(store: HostStore, seq: int, start: int, stop: int) -> Tensor:
        read.append(stop - start)
        return rows_of(store, seq, start, stop)

    def lost(*_: object) -> None:
        raise RuntimeError("lost")

    with torch.no_grad(), cache.prompt(150):
        for start, stop in ((0, 50), (50, 100), (100, 150)):
            if fails and stop == 150:
                hook = model.model.layers[-1].register_forward_pre_hook(lost)
                with pytest.raises(RuntimeError, match="lost"):
                    model(ids[:, start:stop], past_key_values=cache)
                hook.remove()
            read.clear()
            monkeypatch.setattr(HostStore, "read", counted)
            logits = model(ids[:, start:stop], past_key_values=cache).logits
            monkeypatch.undo()
    assert [rows for rows in read if rows > 20] == [100] * len(cache.kv.offloaded), (
        "few fill a ring again after a step that failed"
    )
    tokens = [int(logits[0, -1].argmax())]
    with torch.no_grad():
        while len(tokens) < 20:
            tokens.append(int(model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    assert tokens == expected[0, 150:].tolist()


@pytest.mark.parametrize("fails", [False, True])
def test_trees_are_built_beside_the_last_chunk(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer's tree begins before the last layer has attended; a step that fails then leaves nothing behind."""
    model, ids, begun, waited = build_exact("llama"), prompt(1, 150), threading.Event(), []
    with kvthaw.attach(model, "icecache", budget=48, dense_layers=0):
        expected = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0)
    build = TreeIndex.build

    def told(index: TreeIndex, *given: Any) -> None:
        begun.set()
        build(index, *given)

    def wait(*_: object) -> None:
        waited.append(begun.wait(0.05 if len(waited) < 2 else 20.0))
        if fails and len(waited) == 3:
            raise RuntimeError("lost")

    monkeypatch.setattr(TreeIndex, "build", told)
    cache = kvthaw.Cache(model, "icecache", budget=48, dense_layers=0)
    hook = model.model.layers[-1].register_forward_pre_hook(wait)
    with torch.no_grad(), cache.prompt(150):
        for start, stop in ((0, 50), (50, 100), (100, 150)):
            if fails and stop == 150:
                with pytest.raises(RuntimeError, match="lost"):
                    model(ids[:, start:stop], past_key_values=cache)
            logits = model(ids[:, start:stop], past_key_values=cache).logits
    hook.remove()
    assert waited[:3] == [False, False, True]
    tokens = [int(logits[0, -1].argmax())]
    with torch.no_grad():
        while len(tokens) < 20:
            tokens.append(int(model(torch.tensor([tokens[-1:]]), past_key_values=cache).logits[0, -1].argmax()))
    assert tokens == expected[0, 150:].tolist()


@pytest.mark.parametrize(
    ("gib", "inner", "chunk"), [(24, 14336, 8192), (80, 14336, 16384), (24, 9728, 16384), (8, 28672, 4096)]
)
def test_a_chunk_fits_what_a_small_gpu_keeps_for_activations(
    gib: int, inner: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(intermediate_size=inner, hidden_size=8192 if inner == 28672 else 4096)
    config.get_text_config = lambda decoder: config
    model: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, config=config)
    monkeypatch.setattr(chunks, "available", lambda device: (0, gib << 30))
    assert chunks.default_chunk(model) == chunk
    config.intermediate_size = [inner // 2, inner]
    assert chunks.default_chunk(model) == chunk
    model.device = torch.device("cpu")
    assert chunks.default_chunk(model) == chunks.CHUNK
