"""uvicorn's server, which lets requests finish before it ends."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from types import FrameType

import uvicorn

from kvthaw.engine.warm import frozen
from kvthaw.errors import KvthawError
from kvthaw.serve.app import create_app
from kvthaw.serve.service import Service


class Server(uvicorn.Server):
    """Serves until a signal, and for at most `grace` seconds more: then requests end with "abort". A second signal ends them."""

    def __init__(self, service: Service, *, grace: float, api_keys: Sequence[str] = ()) -> None:
        app = create_app(service, api_keys=api_keys)
        super().__init__(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=5))
        self.signal: int | None = None
        self._worker, self._grace, self._ends = service.worker, grace, float("inf")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no more requests; called by signals."""
        self._ends = time.monotonic() + (self._grace if self.signal is None else 0)
        self.signal, self._worker.draining = sig, True

    async def on_tick(self, counter: int) -> bool:
        """End when all requests have ended, or their time has."""
        if self._worker.failure is not None or (
            self._worker.draining and (not self._worker.open or time.monotonic() > self._ends)
        ):
            self._worker.abort()
            self.should_exit = True
        return await super().on_tick(counter)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, whose connections send without delay; raises OSError where the address is taken."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only for sockets that it made itself
    return listener


def run(service: Service, listener: socket.socket, *, grace: float, api_keys: Sequence[str] = ()) -> None:
    """Serve until SIGTERM or Ctrl-C, as the last thing that the process does. Raises KeyboardInterrupt after the latter and
    KvthawError where the model cannot go on."""
    server = Server(service, grace=grace, api_keys=api_keys)
    with frozen():
        server.run([listener])
    if service.worker.failure is not None:
        raise KvthawError(f"the model cannot go on: {service.worker.failure}")
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt
