"""uvicorn's server, which lets requests finish before it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Sequence
from types import FrameType
from typing import Any

import uvicorn

from kvthaw.engine.warm import frozen
from kvthaw.errors import KvthawError
from kvthaw.serve.app import create_app
from kvthaw.serve.protocol import CONNECTIONS, OTHER_FILES, BoundedProtocol, most_connections
from kvthaw.serve.service import Service

_log = logging.getLogger(__name__)
SWITCH = 0.0005
"""The interpreter's switch interval in seconds. The worker needs the interpreter lock after each operation of a step. With
Python's default of 5 ms it would mostly wait for threads that read requests."""
LATE = 10.0
"""Seconds beyond its grace that a server has to end."""


class Server(uvicorn.Server):
    """Serves until a signal, and for at most `grace` seconds more: then requests end with "abort". A second signal ends them.

    api_keys, hosts: see `Guard`.
    """

    def __init__(
        self, service: Service, *, grace: float, api_keys: Sequence[str] = (), hosts: Collection[str] | None = None
    ) -> None:
        app = create_app(service, api_keys=api_keys, hosts=hosts)
        how: dict[str, Any] = {"ws": "none", "http": BoundedProtocol, "server_header": False}
        if most_connections() < CONNECTIONS:
            how["backlog"] = OTHER_FILES // 4  # accepted at once, before others are closed
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, **how))
        self.signal: int | None = None
        self.ends = float("inf")
        self._service, self.worker, self._grace = service, service.worker, grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Accept no more requests; signals call this."""
        self.ends = time.monotonic() + (self._grace if self.signal is None else 0)
        self.signal, self.worker.draining = sig, True

    async def on_tick(self, counter: int) -> bool:
        """Exit if the worker failed. While draining, exit once all prompts are saved, or after the grace period."""
        if self.worker.draining and not self._service.ending.is_set():
            self._service.ending.set()
            if self._service.busy and self._grace:
                _log.info("waiting up to %g s for requests that run; a second signal ends them", self._grace)
        if self.worker.failure is not None or (
            self.worker.draining and (not self._service.busy or time.monotonic() > self.ends)
        ):
            self.worker.abort()
            self.should_exit = True
        return await super().on_tick(counter)


def run(server: Server, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C, as the last action of the process, which then ends even if a thread does not.

    Raises KeyboardInterrupt after Ctrl-C, and KvthawError if the model has failed.
    """
    ended, interval = threading.Event(), sys.getswitchinterval()
    threading.Thread(target=_end, args=(server, ended), daemon=True).start()
    sys.setswitchinterval(SWITCH)
    try:
        with frozen():
            server.run([listener])
    finally:
        sys.setswitchinterval(interval)
        ended.set()
    if server.worker.failure is not None:
        raise KvthawError(f"the model failed: {server.worker.failure}")
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt


def _end(server: Server, ended: threading.Event) -> None:
    """End the process where a server has not ended in its time: a thread may be in a step, or in a library, that no signal ends."""
    while not ended.wait(0.5):
        if time.monotonic() > server.ends + LATE:
            _log.critical("the server ends though a thread still works")
            logging.shutdown()
            os._exit(128 + signal.SIGINT if server.signal == signal.SIGINT else 0)
