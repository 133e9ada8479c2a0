"""Processes of a split model, spawned by the first of them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch
import torch.distributed as dist

from kvthaw.engine.cores import bound, cores_near, divide
from kvthaw.errors import ConfigError, KvthawError

_log = logging.getLogger(__name__)
_PATIENCE = 10.0  # seconds that the others have to end, and that this process has after one of them failed


@contextmanager
def spawned(size: int, work: Callable[..., None], *args: Any) -> Iterator[None]:
    """Start `size` - 1 other processes and join their group as rank 0, each with its share of the cores near its GPU.

    The others run work(*args), which returns once this process ends. They ignore SIGINT and SIGTERM. If one of them fails,
    this process exits with code 1: it may be waiting in a collective, which nothing else ends.
    """
    if size == 1:
        yield
        return
    if dist.is_torchelastic_launched():
        raise ConfigError(f"tp is {size} under torchrun; start one process without it, which starts the others")
    if torch.cuda.is_available() and torch.cuda.device_count() < size:
        raise ConfigError(f"tp is {size}; there are {torch.cuda.device_count()} GPUs")
    store = meeting()
    cores = divide([cores_near(rank) for rank in range(size)])
    context, ending = multiprocessing.get_context("spawn"), threading.Event()
    others = [
        context.Process(target=_run, args=(rank, size, store.port, cores[rank], work, args), daemon=True)
        for rank in range(1, size)
    ]
    try:
        for other in others:
            other.start()
        threading.Thread(target=_watch, args=(others, ending), daemon=True).start()
        with bound(cores[0]), _variables(**_loopback()), member(0, store=store, rank=0, world_size=size):
            yield
        for other in others:
            other.join(_PATIENCE)
    finally:
        ending.set()
        for other in others:
            other.kill()


def meeting() -> dist.TCPStore:
    """Return the store at which the processes meet. It listens only on the loopback interface; by default it would on all."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    how = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}  # the store closes the socket
    return dist.TCPStore("127.0.0.1", port, **how)


@contextmanager
def member(number: int, **how: Any) -> Iterator[None]:
    """Join a process group, with a GPU.

    number: of the GPU.
    how: as for init_process_group; by default torchrun's environment.
    """
    device = None
    if torch.cuda.is_available():
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device is None else "nccl", device_id=device, **how)
    with _variables(LOCAL_RANK=str(number)):  # set by torchrun; transformers reads it if there are GPUs
        yield
    dist.destroy_process_group()  # not after an error: the other processes may wait for this one


def _loopback() -> dict[str, str]:
    """Return variables that make gloo and NCCL listen on the loopback interface.

    By default gloo listens at the address of the host's name, and NCCL on another interface.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}"} if names else {}


@contextmanager
def _variables(**values: str) -> Iterator[None]:
    """Set environment variables for which torch and transformers have no argument, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _run(rank: int, size: int, port: int, cores: Sequence[int], work: Callable[..., None], args: Sequence[Any]) -> None:
    """Run one of the other processes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal or a service manager: rank 0 decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_outlive, daemon=True).start()
    try:
        store = dist.TCPStore("127.0.0.1", port)
        with bound(cores), _variables(**_loopback()), member(rank, store=store, rank=rank, world_size=size):
            work(*args)
    except KvthawError as error:
        _log.error("process %d: %s", rank, error)
        sys.exit(1)


def _outlive() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
    os._exit(1)


def _watch(others: Sequence[SpawnProcess], ending: threading.Event) -> None:
    """Exit this process if one of the others fails, unless it ends by itself."""
    left = list(others)
    while left:
        wait([other.sentinel for other in left])
        left = [other for other in left if other.exitcode is None]
        if any(other.exitcode for other in others) and not ending.wait(_PATIENCE):
            _log.critical("a process of the split model has failed")
            os._exit(1)
