"""Rows of 8 bits: everything is as with the same rows, once rounded, in the model's dtype."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvthaw
from kvthaw import Batch, Cache, CacheError, ConfigError, PrefixCache, Scheduler
from kvthaw.cache import offloaded_layer
from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.layer_base import AttentionParams
from kvthaw.cache.plan import Settings
from kvthaw.config import KvDtype
from kvthaw.kernels.row_format import E4M3, RowFormat
from kvthaw.methods import METHODS, resolve
from kvthaw.methods.options import digest
from zoo import build, prompt, ragged

SETTINGS: dict[str, Any] = {"budget": 32, "dense_layers": 0, "block_size": 16}
STORES = [name for name, make in METHODS.items() if not make().dense]
HEADS, DIM, HOW = 2, 16, AttentionParams(0.25)


class Rounded(RowFormat):
    """Rows in the model's dtype, rounded when they are stored: what rows of 8 bits are to be."""

    def encode(self, rows: Tensor) -> Tensor:
        eight = E4M3(self.dim, self.dtype)
        return eight.decode(eight.encode(rows))

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return E4M3(self.dim, self.dtype).rounded(keys, values)


def rounded_format(kv_dtype: KvDtype | None, dim: int, dtype: torch.dtype) -> RowFormat:
    return Rounded(dim, dtype)


@functools.cache
def model() -> PreTrainedModel:
    return build("llama", num_hidden_layers=1)


def logits_of(method: str, kv_dtype: KvDtype | None, new: int = 8) -> tuple[Tensor, int]:
    """The logits of some tokens after ragged prompts, and the bytes of blocks."""
    with kvthaw.attach(model(), method, kv_dtype=kv_dtype, **SETTINGS) as handle:
        how = {"max_new_tokens": new, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        found = model().generate(**ragged([70, 37]), **how)
        return torch.stack(found.scores), handle.stats().kv_host_bytes


@pytest.mark.parametrize("method", STORES)
@torch.no_grad()
def test_logits_are_those_of_rounded_rows(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, bytes_ = logits_of(method, "fp8")
    monkeypatch.setattr(offloaded_layer, "row_format", rounded_format)
    expected, full = logits_of(method, None)
    assert torch.equal(found, expected)
    assert bytes_ * 2 * DIM * 4 == full * E4M3(DIM, torch.float32).row_bytes


def steps_of(kv_dtype: KvDtype | None, tokens: list[tuple[Tensor, ...]], **more: Any) -> tuple[list[Tensor], KVCache]:
    settings = Settings(resolve("quest:page=4"), budget=24, block_size=8, kv_dtype=kv_dtype, **more)
    cache = KVCache(settings, [0], 1)
    pads = [0, 21]
    outs = []
    for at, (query, key, value) in enumerate(tokens):
        if at == 30 and more:
            cache.streams.device.bytes = cache.streams.device.fixed[0] + 3 * HEADS * 8 * E4M3(DIM, torch.float32).row_bytes
        if at == 60 and more:
            cache.streams.device.bytes = 1 << 20
        outs.append(cache.attend(cache.layers[0], query, key, value, HOW, pads))
    return outs, cache


@pytest.fixture
def tokens() -> list[tuple[Tensor, ...]]:
    """A prompt and single tokens of two sequences, keys and values rounded already."""
    made = []
    for n in (60, *[1] * 80):
        key, value = E4M3(DIM, torch.float32).rounded(torch.randn(2, HEADS, n, DIM), torch.randn(2, HEADS, n, DIM))
        made.append((torch.randn(2, 2 * HEADS, n, DIM), key, value))
    return made


def test_rows_that_were_rounded_attend_as_in_full(tokens: list[tuple[Tensor, ...]]) -> None:
    """Before and after a crop that refills the rings."""
    (found, eight), (expected, full) = steps_of("fp8", tokens), steps_of(None, tokens)
    for cache, outs in ((eight, found), (full, expected)):
        cache.crop(20)
        outs += [cache.attend(cache.layers[0], *step, HOW, [0, 21]) for step in tokens[-20:]]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_blocks_that_move_change_nothing(tokens: list[tuple[Tensor, ...]]) -> None:
    """Blocks of 8 bits begin on the device, spill to the host and come back."""
    expected, _ = steps_of("fp8", tokens)
    found, cache = steps_of("fp8", tokens, device_memory=1 << 20)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    stats, block = cache.stats(), HEADS * 8 * E4M3(DIM, torch.float32).row_bytes
    assert stats.moved_bytes >= 4 * block
    assert stats.moved_bytes % block == stats.device_block_bytes % block == stats.kv_host_bytes % block == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_told(bad: float, tokens: list[tuple[Tensor, ...]]) -> None:
    tokens[0][1][0, 1, 40, 3] = bad
    with pytest.raises(CacheError, match="not finite"):
        steps_of("fp8", tokens)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="full"):
        Cache(model(), "full", kv_dtype="fp8")
    with pytest.raises(ConfigError, match="kv_dtype"):
        Cache(model(), "quest", kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_dtype"):
        resolve("quest:kv_dtype=int8")
    named = Cache(model(), "quest:sink=4:kv_dtype=fp8", **SETTINGS)
    assert named.settings.kv_dtype == named.fork("oracle").settings.kv_dtype == "fp8"
    assert digest(named.settings.method) != digest(resolve("quest:sink=4"))


@torch.no_grad()
def test_saved_loaded_and_forked(tmp_path: Path) -> None:
    """A file holds rows as blocks do, for caches of either dtype."""
    llama, ids, sizes, logits = build("llama"), prompt(1, 90), {}, {}
    for kv_dtype in (None, "fp8"):
        cache, path = Cache(llama, "quest", kv_dtype=kv_dtype, **SETTINGS), tmp_path / str(kv_dtype)
        llama(ids, past_key_values=cache)
        cache.save(path, ids)
        sizes[kv_dtype] = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        loaded = [Cache.load(path, llama, "quest", kv_dtype=other, **SETTINGS) for other in (None, "fp8")]
        forks = [cache.fork("quest", kv_dtype=other) for other in (None, "fp8")]
        logits[kv_dtype] = [llama(ids[:, :1], past_key_values=one).logits for one in (*loaded, *forks)]
    (full_loaded, as8_loaded, full_fork, as8_fork), eight = logits[None], logits["fp8"]
    assert torch.equal(full_loaded, full_fork)
    for one in (as8_loaded, as8_fork, *eight[1:]):
        assert torch.equal(one, eight[0])
    assert not torch.equal(full_fork, eight[0])
    saved = len(llama.model.layers) * HEADS * 90 * (2 * DIM * 4 - E4M3(DIM, torch.float32).row_bytes)
    assert sizes[None] - sizes["fp8"] == pytest.approx(saved, abs=100), "but for the headers"
    dense = Cache(llama, "full")
    llama(ids, past_key_values=dense)
    assert torch.equal(llama(ids[:, :1], past_key_values=dense.fork("quest", **SETTINGS, kv_dtype="fp8")).logits, eight[0])


def test_reuse_of_a_document() -> None:
    document, rest = prompt(1, 200)[0], prompt(1, 60, seed=3)[0]
    ids, prefix, found = torch.cat((document, rest)), PrefixCache(), []
    for kept in (None, prefix):
        batch = Batch(model(), "quest", max_seqs=2, capacity=400, prefix_cache=kept, kv_dtype="fp8", **SETTINGS)
        scheduler = Scheduler(batch, step_tokens=100)
        requests = [scheduler.submit(one, max_new_tokens=6, stop=()) for one in (document, ids)]
        while scheduler.busy:
            scheduler.step()
        found.append(requests[1].tokens)
    assert found[0] == found[1]
    with pytest.raises(CacheError, match="kv_dtype"):
        prefix.fill(Cache(batch.cache.model, "quest", **SETTINGS).kv, ids)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["quest", "pariskv-plus", "icecache-digest", "icecache-digest-device", "prkv", "infinigen"])
@torch.no_grad()
def test_captured_steps_on_a_gpu(method: str) -> None:
    """From blocks on the host, on the device and on both, the tokens of eager steps of rounded rows."""
    llama = build("llama").cuda()
    inputs = {name: one.cuda() for name, one in ragged([300, 170]).items()}
    given = {**SETTINGS, "kv_dtype": "fp8"}
    found = []
    for capture, memory in ((False, None), (True, None), (True, 200_000), (True, 1 << 30)):
        with kvthaw.attach(llama, method, capture=capture, device_memory=memory, **given) as handle:
            found.append(llama.generate(**inputs, max_new_tokens=60, do_sample=False).tolist())
            assert handle.stats().kv_device_bytes > 0
    assert all(tokens == found[0] for tokens in found)
