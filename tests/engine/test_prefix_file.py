"""Blocks of a prefix cache that memory has no room for go to a file, and come back for the prompts that begin with them."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_prefix import BLOCK, DEVICE, batch_of, shared_model, tokens_of
from transformers import PreTrainedModel

from kvthaw import ConfigError, PrefixCache, Scheduler
from kvthaw.cache.prefix_kept import BlockFile, PrefixBlocks
from kvthaw.cache.ranks import Ranks
from kvthaw.errors import CacheError
from zoo import build, prompt

DOCUMENTS = [prompt(1, 320, seed=seed)[0] for seed in range(3)]
"""Of ten blocks each."""


@pytest.fixture
def model() -> PreTrainedModel:
    return shared_model()


@pytest.fixture(scope="module")
def fresh() -> list[list[int]]:
    return [tokens_of(batch_of(shared_model(), "oracle", None), ids)[0] for ids in DOCUMENTS]


def asked(batch: Any) -> list[tuple[list[int], int]]:
    return [tokens_of(batch, ids) for ids in DOCUMENTS]


FP8 = 7680
"""As BLOCK, of rows in 8 bits."""


@pytest.mark.parametrize("more", [{}, {"device_memory": DEVICE}, {"host_bytes": 30 * BLOCK}, {"kv_dtype": "fp8"}])
def test_documents_come_back_from_the_file(
    model: PreTrainedModel, fresh: list[list[int]], tmp_path: Path, more: dict[str, Any]
) -> None:
    """Memory has room for one of three; none is prefilled twice."""
    size = FP8 if "kv_dtype" in more else BLOCK
    prefix = PrefixCache(host_bytes=12 * size, kv_dir=tmp_path / "kept")
    batch = batch_of(model, "oracle", prefix, **more)
    first = asked(batch)
    if size == BLOCK:
        assert [tokens for tokens, _ in first] == fresh
    for _ in range(2):
        assert asked(batch) == [(tokens, 320 - 128) for tokens, _ in first]
    stats = prefix.stats()
    assert (stats.kept_tokens, stats.evicted_tokens) == (960, 0)
    assert stats.kept_bytes <= 12 * size
    assert 960 // 32 * size - stats.kept_bytes <= stats.disk_bytes <= 960 // 32 * size
    assert os.listdir(tmp_path / "kept") == [], "the file has no name"
    prefix.clear()
    stats = prefix.stats()
    assert (stats.kept_bytes, stats.disk_bytes) == (0, 0)
    del batch
    gc.collect()


def test_others_leave_memory_before_what_comes_back(
    model: PreTrainedModel, fresh: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no more than host_bytes is kept at any time."""
    prefix, seen, read = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path), list[int](), PrefixBlocks.read
    batch = batch_of(model, "oracle", prefix)
    asked(batch)

    def reading(kept: PrefixBlocks, nodes: Any, memory: Any) -> Any:
        found = read(kept, nodes, memory)
        seen.append(prefix.kept_bytes)
        return found

    monkeypatch.setattr(PrefixBlocks, "read", reading)
    assert asked(batch) == [(tokens, 192) for tokens in fresh]
    assert len(seen) >= 3
    assert max(seen) <= 12 * BLOCK


def test_the_file_has_a_limit(model: PreTrainedModel, fresh: list[list[int]], tmp_path: Path) -> None:
    """The least recently used blocks are dropped."""
    prefix = PrefixCache(host_bytes=10 * BLOCK, kv_dir=tmp_path, disk_bytes=10 * BLOCK)
    batch = batch_of(model, "oracle", prefix)
    assert asked(batch) == [(tokens, 0) for tokens in fresh]
    stats = prefix.stats()
    assert stats.disk_bytes == 10 * BLOCK
    assert stats.evicted_tokens == 320
    assert tokens_of(batch, DOCUMENTS[1]) == (fresh[1], 192)
    assert tokens_of(batch, DOCUMENTS[0]) == (fresh[0], 0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_cannot_be_written_costs_the_prefix_alone(
    model: PreTrainedModel,
    fresh: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: int,
) -> None:
    prefix = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path)
    batch, left = batch_of(model, "oracle", prefix), [9]
    write = os.pwrite

    def pwrite(*given: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return write(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    other = batch.join(prompt(1, 60, seed=9)[0], max_new_tokens=50, stop=())
    assert [tokens for tokens, _ in asked_beside(batch)] == fresh
    assert other.tokens == tokens_of(batch_of(model, "oracle", None), other.spec.ids, 50)[0][: len(other.tokens)]
    assert [tokens for tokens, _ in asked_beside(batch)] == fresh
    assert prefix.stats().evicted_tokens
    said = [record.getMessage() for record in caplog.records]
    assert number == errno.ENOSPC or [os.strerror(number) in one for one in said] == [True]


def asked_beside(batch: Any) -> list[tuple[list[int], int]]:
    """As asked(), in a batch that decodes another request."""
    found = []
    for ids in DOCUMENTS:
        request = batch.join(ids, max_new_tokens=4, stop=())
        while not request.finished:
            batch.step()
        found.append((request.tokens, request.cached_tokens))
    return found


@pytest.mark.parametrize("damage", ["truncated", "changed", "unreadable"])
def test_what_cannot_be_read_is_prefilled_again(
    model: PreTrainedModel,
    fresh: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    """Never wrong KV; what came before the damage is used."""
    prefix = PrefixCache(host_bytes=10 * BLOCK, kv_dir=tmp_path)
    batch = batch_of(model, "oracle", prefix)
    asked(batch)
    file = prefix._kept.file
    assert file is not None
    number = file._file
    if damage == "truncated":
        os.ftruncate(number, file.size // 2)
    elif damage == "changed":
        path = prefix._tree.match(DOCUMENTS[0], "")[0]
        os.pwrite(number, b"\xff\x01", prefix._kept.slots[path[3]].number * file.size + 100)
    else:
        monkeypatch.setattr(os, "preadv", lambda *given: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
    found = tokens_of(batch, DOCUMENTS[0])
    assert found == (fresh[0], 96 if damage == "changed" else 0)
    assert str(tmp_path) in caplog.text
    assert prefix.stats().evicted_tokens
    monkeypatch.undo()
    assert tokens_of(batch, DOCUMENTS[0]) == (fresh[0], 192)
    assert tokens_of(batch, DOCUMENTS[1])[0] == fresh[1]


def test_requests_that_give_their_place_up_go_on_with_their_prompts_kv(model: PreTrainedModel, tmp_path: Path) -> None:
    """Host memory is short of what two of them hold; what one leaves is in the file until its turn comes again."""
    prefix = PrefixCache(host_bytes=60 * BLOCK, kv_dir=tmp_path)
    batch = batch_of(model, "oracle", prefix, host_bytes=26 * BLOCK)
    scheduler = Scheduler(batch, step_tokens=400)
    requests = [scheduler.submit(ids, max_new_tokens=60, stop=()) for ids in DOCUMENTS]
    for _ in range(400):
        if not scheduler.busy:
            break
        if len(scheduler.decoding) == 2 and not scheduler.preemptions:
            last = scheduler.decoding[-1]
            batch.preempt(last, keep=False)
            scheduler._wait_again(last)
        scheduler.step()
    assert [request.tokens for request in requests] == [
        tokens_of(batch_of(model, "oracle", None), ids, 60)[0] for ids in DOCUMENTS
    ]
    assert scheduler.preemptions
    assert batch.stats().cached_tokens >= 192
    assert prefix.stats().evicted_tokens == 0


def test_others_decode_while_a_document_comes_back(
    model: PreTrainedModel, fresh: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path)
    batch, read = batch_of(model, "oracle", prefix), list[tuple[int, int]]()
    asked(batch)
    scheduler = Scheduler(batch, step_tokens=66)
    other = scheduler.submit(prompt(1, 40, seed=9)[0], max_new_tokens=60, stop=())
    while not other.tokens:
        scheduler.step()
    whole = PrefixBlocks.read

    def counted(self: PrefixBlocks, nodes: Any, memory: Any) -> Any:
        read.extend([(len(nodes), len(other.tokens))] if nodes else [])
        return whole(self, nodes, memory)

    monkeypatch.setattr(PrefixBlocks, "read", counted)
    request = scheduler.submit(DOCUMENTS[0], max_new_tokens=4, stop=())
    while not request.finished:
        scheduler.step()
    assert (request.tokens, request.cached_tokens) == (fresh[0], 192)
    assert [nodes for nodes, _ in read] == [2, 2, 2]
    assert len({tokens for _, tokens in read}) == 3, "a token of the other lies between"


def test_processes_of_a_split_model_begin_a_prompt_together(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each drops blocks for itself: one may have all in memory where another waits for its file."""
    prefix = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path)
    batch = batch_of(model, "oracle", prefix)
    asked(batch)
    assert prefix.fetch(batch.cache.kv, DOCUMENTS[0], 64)
    told = list[int]()
    monkeypatch.setattr(Ranks, "least", lambda ranks, own: told.append(own) or 0)
    assert not prefix.fetch(batch.cache.kv, DOCUMENTS[0], 64)
    assert not prefix.fetch(batch.cache.kv, DOCUMENTS[0], 320)
    assert told == [True, False]


def test_a_read_that_fails_in_another_way_pins_nothing(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path)
    batch = batch_of(model, "oracle", prefix)
    asked(batch)

    def lost(*_: object) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(PrefixBlocks, "read", lost)
    with pytest.raises(RuntimeError, match="lost"):
        prefix.fetch(batch.cache.kv, DOCUMENTS[0], 64)
    assert prefix.pinned_bytes == 0


def test_a_folder_in_which_no_file_can_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match=r"kv_dir is '.*file'; no file can be made there: "):
        PrefixCache(kv_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="disk_bytes is 1,024 and kv_dir None"):
        PrefixCache(disk_bytes=1024)


def test_slots_are_used_again(tmp_path: Path) -> None:
    file, some = BlockFile(tmp_path, 3 * 24), [torch.arange(4, dtype=torch.int16), torch.ones(2, 2)]
    slots = [file.write([each + i for each in some]) for i in range(3)]
    with pytest.raises(OSError, match="72 bytes of blocks are there"):
        file.write(some)
    file.free(slots[1])
    slots[1] = file.write([each + 7 for each in some])
    for slot, more in zip(slots, (0, 7, 2), strict=True):
        found = [torch.zeros_like(each) for each in some]
        file.read(slot, found)
        assert all(torch.equal(one, each + more) for one, each in zip(found, some, strict=True))
    assert os.fstat(file._file).st_size == 72
    os.ftruncate(file._file, 60)
    with pytest.raises(CacheError, match="are not what was written"):
        file.read(slots[2], found)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["full", "quest", "icecache-digest"])
def test_documents_come_back_to_a_gpu(method: str, tmp_path: Path) -> None:
    """From blocks on the device, on the host, and on both."""
    model = build("llama", num_hidden_layers=3).cuda()
    for memory in (None,) if method == "full" else (None, DEVICE, 1 << 30):
        prefix = PrefixCache(host_bytes=12 * BLOCK, kv_dir=tmp_path)
        batch = batch_of(model, method, prefix, **({} if memory is None else {"device_memory": memory}))
        first = asked(batch)
        for found, before in zip(asked(batch), first, strict=True):
            assert found[1] == 192
            assert found[0][0] == before[0][0]
        assert prefix.stats().evicted_tokens == 0
        assert prefix.stats().disk_bytes


def test_a_folder_that_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        PrefixCache(host_bytes=1, kv_dir=tmp_path / "kv")
    finally:
        os.umask(before)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
