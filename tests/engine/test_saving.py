"""A saved cache gives the tokens of the one that was saved, and nothing where anything about it is not as it was."""

from __future__ import annotations

import copy
import errno
import json
import os
import random
import resource
import stat
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvthaw import Cache, CacheError
from kvthaw.engine.hf import saving, tensor_file
from kvthaw.engine.hf.kept import fill, keep
from kvthaw.index.forest import TreeIndex
from kvthaw.native import Checksum
from zoo import KINDS, build, prompt, ragged

SETTINGS: dict[str, Any] = {"budget": 48, "dense_layers": 1, "block_size": 16}


def decode(model: PreTrainedModel, cache: Cache, token: torch.Tensor, steps: int = 6) -> torch.Tensor:
    """The logits of some greedy steps."""
    found = []
    for _ in range(steps):
        logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
        token = logits.argmax(dim=-1, keepdim=True)
        found.append(logits)
    return torch.stack(found)


@pytest.fixture
def llama() -> PreTrainedModel:
    """Of three layers, two of which are not dense."""
    return build("llama", num_hidden_layers=3)


@pytest.fixture
def saved(tmp_path: Path, llama: PreTrainedModel) -> tuple[Path, torch.Tensor]:
    cache, ids = Cache(llama, "oracle", **SETTINGS), prompt(1, 90)
    with torch.no_grad():
        llama(ids, past_key_values=cache)
    cache.save(tmp_path / "kv", ids)
    return tmp_path / "kv", ids


"""Methods that evict cannot be saved."""


@pytest.mark.parametrize("method", KINDS)
@torch.no_grad()
def test_a_loaded_cache_is_a_fork(tmp_path: Path, llama: PreTrainedModel, method: str) -> None:
    """Under the same method, to the last bit; the index is built of the same rows."""
    settings = {"dense_layers": 1} if method == "full" else SETTINGS
    cache, ids = Cache(llama, method, **settings), prompt(1, 90)
    llama(ids, past_key_values=cache)
    cache.save(tmp_path / "kv", ids[0])
    fork, loaded = cache.fork(method), Cache.load(tmp_path / "kv", llama, method, **settings)
    assert torch.equal(Cache.saved_tokens(tmp_path / "kv"), ids)
    token = torch.tensor([[5]])
    assert torch.equal(decode(llama, loaded, token), decode(llama, fork, token))
    other = Cache.load(tmp_path / "kv", llama, "full")
    assert torch.allclose(decode(llama, other, token), decode(llama, cache.fork("full", budget=None), token), atol=1e-5)


@pytest.mark.parametrize("method", ["full", "oracle", "icecache-digest", "clusterkv-plus"])
@torch.no_grad()
def test_a_row_whose_first_tokens_were_decode_steps_has_forks_and_is_saved(
    tmp_path: Path, llama: PreTrainedModel, method: str
) -> None:
    """A padded row that begins in a prompt's last few tokens has no queries of a prompt."""
    cache, inputs = Cache(llama, method, budget=512), ragged([90, 3])
    mask = inputs["attention_mask"]
    for begin, end in ((0, 87), (87, 90)):
        llama(inputs["input_ids"][:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
    cache.save(tmp_path / "kv", inputs["input_ids"])
    copies = [cache.fork(method), cache.fork("full"), Cache.load(tmp_path / "kv", llama, method, budget=512), cache]
    mask, token = torch.cat([mask, mask[:, -1:]], dim=1), torch.tensor([[5], [6]])
    found = [llama(token, attention_mask=mask, past_key_values=each).logits for each in copies]
    for logits in found:
        torch.testing.assert_close(logits, found[-1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("room", "near"), [(1 << 20, 5), (240_000, 3), (100_000, 0)])
@torch.no_grad()
def test_blocks_lie_where_those_of_a_prompt_would(
    saved: tuple[Path, torch.Tensor], llama: PreTrainedModel, room: int, near: int
) -> None:
    """The first ones on the device, as far as it has room."""
    prefilled, token = Cache(llama, "oracle", device_memory=room, **SETTINGS), torch.tensor([[5]])
    llama(saved[1], past_key_values=prefilled)
    loaded = Cache.load(saved[0], llama, "oracle", device_memory=room, **SETTINGS)
    for layer in (*prefilled.kv.offloaded, *loaded.kv.offloaded):
        assert layer.store.table.which_on_host()[0, :5].tolist() == [False] * near + [True] * (5 - near)
    assert torch.equal(decode(llama, loaded, token), decode(llama, prefilled, token))


@pytest.mark.parametrize("architecture", ["gemma3", "gpt_oss"])
@torch.no_grad()
def test_rows_of_several_lengths_and_windows(tmp_path: Path, architecture: str) -> None:
    model, ids = build(architecture), prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    cache = Cache(model, "quest", **SETTINGS)
    model(ids, attention_mask=mask, past_key_values=cache)
    first = torch.tensor([[3], [4]])
    longer = torch.cat((mask, torch.ones(2, 1, dtype=torch.int64)), dim=1)
    model(first, attention_mask=longer, past_key_values=cache)
    cache.save(tmp_path / "kv", torch.cat((ids, first), dim=1))
    loaded = Cache.load(tmp_path / "kv", model, "quest", **SETTINGS)
    fork = cache.fork("quest")
    following = torch.cat((longer, torch.ones(2, 1, dtype=torch.int64)), dim=1)
    out = [model(first, attention_mask=following, past_key_values=one).logits for one in (loaded, fork)]
    assert torch.equal(*out)


def test_a_file_is_what_was_written_and_its_owners_alone(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(99), "b": torch.arange(33, dtype=torch.uint8), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
    digest = tensor_file.write(tmp_path / "file", tensors)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    assert digest == Checksum((tmp_path / "file").read_bytes()).hexdigest()
    found = tensor_file.TensorFile(tmp_path / "file", digest).read({})
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_tensor_is_read_into_parts_of_memory(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5000, dtype=torch.int32), "b": torch.arange(77)}
    digest = tensor_file.write(tmp_path / "file", tensors)
    given = torch.full((20000,), 99, dtype=torch.uint8)
    ends = [*range(0, 3000, 2), 3000, 3000, 12000, 20000]
    places = torch.cat([tensor_file.memory(given[start:stop]) for start, stop in pairwise(ends)])
    found = tensor_file.TensorFile(tmp_path / "file", digest).read({"a": places})
    assert found.keys() == {"b"}
    assert torch.equal(found["b"], tensors["b"])
    assert bytes(given.numpy()) == tensors["a"].numpy().tobytes()
    with pytest.raises(CacheError, match="is not what was saved"):
        tensor_file.TensorFile(tmp_path / "file", digest).read({"a": places[1:]})


def test_a_file_too_large_for_the_system_says_so(tmp_path: Path) -> None:
    """What the system says, which safetensors hides, reaches the caller."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(OSError, match="File too large") as refused:
            tensor_file.write(tmp_path / "file", {"a": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.errno == errno.EFBIG


@pytest.mark.parametrize("offsets", [[0, 1 << 40], [1 << 62, 1 << 62], [-8, 16], [16, 8], [0, 1 << 70], [0.0, 8.0], [0, 12]])
def test_offsets_that_are_not_those_of_the_file_are_refused(offsets: list[Any], tmp_path: Path) -> None:
    """Also of a file whose digest is right."""
    header = json.dumps({"rows": {"dtype": "F32", "shape": [4], "data_offsets": offsets}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(CacheError, match="is not what was saved"):
        tensor_file.TensorFile(tmp_path / "file", Checksum(data).hexdigest()).read({})


def sign(path: Path, header: dict[str, Any]) -> None:
    """Write a header with a digest that fits."""
    given = {name: value for name, value in header.items() if name != "sha256"}
    (path / "header.json").write_text(json.dumps(given | {"sha256": saving._digest(given)}))


def test_a_header_that_is_signed_must_be_whole_too(saved: tuple[Path, torch.Tensor], llama: PreTrainedModel) -> None:
    """As another program, or another version of this one, might write it."""
    path = saved[0]
    header = json.loads((path / "header.json").read_text())
    for version in (saving.FORMAT - 1, saving.FORMAT + 1, None):
        sign(path, header | {"format": version})
        with pytest.raises(CacheError, match=f"is of format {version}; this version of kvthaw reads {saving.FORMAT}"):
            Cache.load(path, llama, "oracle", **SETTINGS)
    tokens = len(header["token_ids"][0])
    wrong: list[dict[str, Any]] = [
        *({name: 1} for name in ("model", "index", "files", "embedded", "token_ids", "left_pad")),
        {"token_ids": []},
        {"token_ids": [[-1] * tokens]},
        {"token_ids": [*header["token_ids"], [1]]},
        {"left_pad": [tokens]},
        {"left_pad": [*header["left_pad"], 0]},
        {"files": {name: {"scale": 1.0} for name in header["files"]}},
        {"files": {name: {"xxh64": "", "scale": 1} for name in header["files"]}},
    ]
    for change in wrong:
        sign(path, header | change)
        with pytest.raises(CacheError, match="lacks a field, or has one of another kind"):
            Cache.load(path, llama, "oracle", **SETTINGS)
    sign(path, header)
    Cache.load(path, llama, "oracle", **SETTINGS)


def test_no_layer_is_read_behind_a_damaged_one() -> None:
    begun = list[int]()

    def work(number: int) -> int:
        begun.append(number)
        if number == 0:
            raise CacheError("damaged")
        time.sleep(0.02)
        return number

    with pytest.raises(CacheError, match="damaged"):
        list(saving._some_at_once(range(100), work, 2, 100))
    assert len(begun) < 20
    assert dict(saving._some_at_once(range(1, 9), work, 2, 3)) == {number: number for number in range(1, 9)}


def test_any_damage_is_seen(saved: tuple[Path, torch.Tensor], llama: PreTrainedModel) -> None:
    path, rng = saved[0], random.Random(0)
    files = sorted(path.iterdir())
    assert len(files) == len(llama.model.layers) + 1
    for i in range(60):
        file = files[i % len(files)]
        whole = file.read_bytes()
        damaged = bytearray(whole)
        at = rng.randrange(len(damaged))
        damaged[at] ^= 1 << rng.randrange(8)
        file.write_bytes(whole[:at] if i % 7 == 0 else bytes(damaged))
        with pytest.raises(CacheError, match=r"damaged|another model|no saved cache|format"):
            Cache.load(path, llama, "oracle", **SETTINGS)
        file.write_bytes(whole)
    header = json.loads((path / "header.json").read_text())
    for name in header:
        changed = copy.deepcopy(header)
        changed[name] = None if header[name] is not None else 1
        (path / "header.json").write_text(json.dumps(changed))
        with pytest.raises(CacheError, match="damaged"):
            Cache.load(path, llama, "oracle", **SETTINGS)
    (path / "header.json").write_text(json.dumps(header))
    files[0].rename(path / "elsewhere")
    with pytest.raises(CacheError, match=r"damaged|no saved cache"):
        Cache.load(path, llama, "oracle", **SETTINGS)


@torch.no_grad()
def test_another_model_is_refused(saved: tuple[Path, torch.Tensor], llama: PreTrainedModel) -> None:
    other = copy.deepcopy(llama)
    other.model.layers[1].mlp.up_proj.weight.data += 0.01
    with pytest.raises(CacheError, match=r"another model: its weights of model\.layers\.1 differ"):
        Cache.load(saved[0], other, "oracle", **SETTINGS)
    with pytest.raises(CacheError, match="another model: dtype"):
        Cache.load(saved[0], copy.deepcopy(llama).bfloat16(), "oracle", **SETTINGS)
    with pytest.raises(CacheError, match="another model"):
        Cache.load(saved[0], build("qwen3"), "oracle", **SETTINGS)


@torch.no_grad()
def test_a_save_that_fails_leaves_what_was_there_or_the_new_one(
    saved: tuple[Path, torch.Tensor], llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the system refuses something; and nothing lies about afterwards."""
    path, ids = saved
    cache = Cache.load(path, llama, "oracle", **SETTINGS)
    llama(torch.tensor([[7]]), past_key_values=cache)
    longer = torch.cat((ids, torch.tensor([[7]])), dim=1)
    honest = {name: getattr(os, name) for name in ("fsync", "rename")}
    left = 0
    found = []
    while True:
        calls = left

        def refuse(name: str, *given: Any) -> Any:
            nonlocal calls
            calls -= 1
            if calls == -1:
                raise OSError(28, "No space left on device")
            return honest[name](*given)

        with monkeypatch.context() as patch:
            for name in honest:
                patch.setattr(os, name, partial(refuse, name))
            try:
                cache.save(path, longer)
            except OSError:
                left += 1
        tokens = Cache.saved_tokens(path)
        assert torch.equal(tokens, ids) or torch.equal(tokens, longer)
        Cache.load(path, llama, "oracle", **SETTINGS)
        assert [entry.name for entry in path.parent.iterdir()] == ["kv"]
        found.append(tokens.shape[1])
        if calls >= 0:
            break
    assert len(found) > len(llama.model.layers) + 3
    assert found[:-2] == [90] * (len(found) - 2)
    assert found[-1] == 91


@torch.no_grad()
def test_what_cannot_be_saved(tmp_path: Path, llama: PreTrainedModel) -> None:
    cache, ids = Cache(llama, "oracle", **SETTINGS), prompt(1, 40)
    llama(ids, past_key_values=cache)
    with pytest.raises(CacheError, match=r"token_ids has the shape \[1, 39\]; the cache holds \[1, 40\]"):
        cache.save(tmp_path / "kv", ids[:, :-1])

    with pytest.raises(CacheError, match="is no saved cache"):
        Cache.load(tmp_path / "kv", llama)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_what_cannot_go_back_is_prefilled_anew(tmp_path: Path) -> None:
    """Of a kept prompt the last token is computed again, which a window that has moved on cannot forget."""
    model, warnings = build("gemma3", layer_types=["sliding_attention", "full_attention"] * 2), list[str]()
    ids, cache = prompt(1, 100), Cache(model, "oracle", budget=32)
    model(ids, past_key_values=cache)
    path = tmp_path / "kv"
    keep(cache, path, ids[0].tolist())
    again = Cache(model, "oracle", budget=32)
    assert fill(again, path, ids[0].tolist(), warnings.append) == again.get_seq_length() == 0
    assert fill(again, path, [*ids[0].tolist(), 1], warnings.append) == 100, "what only goes on needs no way back"
    assert len(warnings) == 1


@torch.no_grad()
@pytest.mark.parametrize(("shared", "taken"), [(50, 50), (49, 0)])
def test_what_is_kept_is_read_where_half_of_it_can_be_used(
    tmp_path: Path, llama: PreTrainedModel, shared: int, taken: int
) -> None:
    ids, cache = prompt(1, 100), Cache(llama, "oracle", **SETTINGS)
    llama(ids, past_key_values=cache)
    path, other = tmp_path / "kv", ids[0].tolist()
    keep(cache, path, other)
    other[shared] += 1
    assert fill(Cache(llama, "oracle", **SETTINGS), path, other) == taken


@torch.no_grad()
def test_a_saved_tree_is_not_built_again(
    tmp_path: Path, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of two rows, after some steps; under other options, and where its numbers are of no tree, it is built."""
    built = list[int]()
    build, state = TreeIndex.build, TreeIndex.state

    def counted(index: TreeIndex, seq: int, *given: Any) -> None:
        built.append(seq)
        build(index, seq, *given)

    cache, ids = Cache(llama, "icecache-digest", **SETTINGS), prompt(2, 90)
    llama(ids, past_key_values=cache)
    token = torch.tensor([[5], [6]])
    for _ in range(30):
        llama(token, past_key_values=cache)
    ids = torch.cat((ids, token.expand(-1, 30)), dim=1)
    cache.save(tmp_path / "kv", ids)
    monkeypatch.setattr(TreeIndex, "build", counted)
    loaded = Cache.load(tmp_path / "kv", llama, "icecache-digest", **SETTINGS)
    assert torch.equal(decode(llama, loaded, token).argmax(-1), decode(llama, cache, token).argmax(-1))
    assert not built
    decode(llama, Cache.load(tmp_path / "kv", llama, "icecache-digest:outliers=1", **SETTINGS), token, 1)
    assert sorted(built) == [0, 0, 1, 1]
    cache.keep(120)
    monkeypatch.setattr(TreeIndex, "state", lambda *given: {**state(*given), "members": state(*given)["members"] * 0})
    cache.save(tmp_path / "kv", ids)
    assert not caplog.messages
    decode(llama, Cache.load(tmp_path / "kv", llama, "icecache-digest", **SETTINGS), token, 1)
    assert sorted(built[4:]) == [0, 0, 1, 1]
    assert len([message for message in caplog.messages if "rebuilt" in message]) == 4
