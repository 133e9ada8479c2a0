"""Work beside the device: in order, and what goes wrong there is not lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvthaw.cache.host import HostStore
from kvthaw.cache.streams import Streams


def offload(line: Streams, store: HostStore, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append keys and values [H, n, D] to the first sequence."""
    rows = torch.stack((keys, values), dim=2)
    with line.offloading([store], rows):
        store.append(0, rows, non_blocking=rows.is_cuda)


def test_offload_appends() -> None:
    store, line = HostStore(1, 2, 4, torch.float32, block_size=4), Streams()
    keys, values = torch.randn(2, 7, 4), torch.randn(2, 7, 4)
    offload(line, store, keys, values)
    assert store.arriving is None, "done at once without a GPU"
    assert torch.equal(store.read(0, 0, 7), torch.stack((keys, values), dim=2))


@given(st.integers(1, 20))
def test_jobs_run_in_order_on_one_thread(count: int) -> None:
    line, seen, threads = Streams(), [], set()

    def job(i: int) -> None:
        seen.append(i)
        threads.add(threading.current_thread().name)

    futures = [line.submit(None, lambda i=i: job(i)) for i in range(count)]
    for future in futures:
        future.result()
    assert seen == list(range(count))
    assert len(threads) == 1
    assert "kvthaw-index" in threads.pop()


@pytest.mark.parametrize("how", [Streams.submit, Streams.build])
def test_jobs_of_two_groups_run_side_by_side(how: Callable[..., Future[None]]) -> None:
    line, begun = Streams(), threading.Event()
    waiting = how(line, None, lambda: assert_set(begun), group=4)
    how(line, None, begun.set, group=5).result()
    waiting.result()


def assert_set(event: threading.Event) -> None:
    assert event.wait(20)


def test_no_thread_before_the_first_job() -> None:
    before = set(threading.enumerate())
    Streams()
    assert set(threading.enumerate()) <= before  # others may end meanwhile


def test_errors_come_to_whoever_waits() -> None:
    line = Streams()

    def fail() -> None:
        raise RuntimeError("the index broke")

    future = line.submit(None, fail)
    with pytest.raises(RuntimeError, match=r"the index broke"):
        future.result()
    assert line.submit(None, lambda: None).result() is None, "later jobs still run"


@pytest.mark.gpu
def test_offload_from_the_device() -> None:
    store, line = HostStore(1, 2, 64, torch.float16, block_size=32, pinned=True), Streams()
    sent = []
    for _ in range(10):
        keys, values = (torch.randn(2, 50, 64, device="cuda", dtype=torch.float16) for _ in range(2))
        sent.append(torch.stack((keys, values), dim=2).cpu())
        offload(line, store, keys, values)
        del keys, values
    assert store.arriving is not None
    store.wait()
    assert torch.equal(store.read(0, 0, 500), torch.cat(sent, dim=1))


def test_the_stream_of_the_model_is_one_of_those_that_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever thread a freed block's memory is asked for, of which the current stream is another."""
    line, streams = Streams(), ["main", "side", "side"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: len(streams) > 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[0])
    line.follow(torch.device("cpu"))
    line.follow(torch.device("cuda"))
    assert not line.memory.streams, "a capture's own is gone with it"
    for expected in (["side"], ["side"], ["side", "main"]):
        streams[:] = expected[-1:]
        line.follow(torch.device("cuda"))
        assert line.memory.streams == line.device.streams == expected
