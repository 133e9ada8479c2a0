"""HTTP connections that take bounded memory and time before their requests are whole."""

from __future__ import annotations

import asyncio
import socket
import time
from types import ModuleType
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

HEAD_BYTES = 64 << 10
"""Most bytes of the request line, headers and everything else but the body. A single read may exceed it."""
FRAMED = 16
"""Most framing bytes for each byte of a body: chunks of one byte each."""
HEAD_SECONDS, IDLE_SECONDS, WHOLE_SECONDS = 10.0, 15.0, 120.0
"""Seconds that a client has to send the headers of a request, each next part of its body, and all of it."""
CONNECTIONS, OTHER_FILES = 1024, 40
"""Most open connections, and file descriptors reserved for other uses. Beyond that, the server closes the connection that has
waited longest for its complete request."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens and whose connections send without delay. Raises OSError if the address is taken."""
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio sets it only for sockets that it made itself
    return listener


def most_connections() -> int:
    """Return how many connections there may be: CONNECTIONS, or fewer where the process may have few descriptors."""
    if resource is None:
        return CONNECTIONS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(CONNECTIONS, files - OTHER_FILES))


class BoundedProtocol(HttpToolsProtocol):
    """Close connections whose requests are too long or arrive too slowly.

    httptools limits neither, so that a client without a key could use up memory and descriptors.
    """

    def __init__(self, *given: Any, **how: Any) -> None:
        super().__init__(*given, **how)
        self.since = time.monotonic()
        self._taken = self._body = 0
        self.whole = self._headed = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close another if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            waiting = [one for one in self.connections if isinstance(one, BoundedProtocol) and not one.whole]
            min(waiting, key=lambda one: one.since).transport.abort()
        self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, unless all but the body is too large."""
        self._taken += len(data)
        super().data_received(data)
        if self._taken - FRAMED * self._body > HEAD_BYTES + len(data) and not self.whole:
            self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        """Begin to count a request."""
        super().on_message_begin()
        self._taken = self._body = 0
        self.whole = self._headed = False
        self.since = time.monotonic()
        self._expect(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Accept a header, except one that follows a body."""
        if not self._headed:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Extend the client's time for the body."""
        self._headed = True
        self._expect(IDLE_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count a part of the body."""
        self._body += len(body)
        self._expect(max(0.0, min(IDLE_SECONDS, self.since + WHOLE_SECONDS - time.monotonic())))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the count."""
        self.whole = True
        self._stop()
        super().on_message_complete()

    def _expect(self, seconds: float) -> None:
        self._stop()
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float) -> None:
        if self.flow.read_paused:  # the server is what waits
            self._expect(max(seconds, 1.0))
        else:
            self._refuse(b"408 Request Timeout")

    def _refuse(self, status: bytes) -> None:
        """Close the connection, after a status where no answer has begun."""
        self._stop()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
        else:
            self.transport.abort()
