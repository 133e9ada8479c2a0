"""What a request has before a route sees it: an API key, or a host that is the server's own; a body of JSON, not too large."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvthaw.serve import page
from kvthaw.serve.errors import ApiError
from kvthaw.serve.service import CLIENT

MOST_BYTES = 16 << 20
"""Bytes of a body."""
PROBES = ("/health", "/ready")
"""Paths that reveal nothing, and need no key."""
OPEN_PATHS = (*PROBES, *page.FILES)
"""Those that need no key."""


class Guard:
    """Reject requests without a key, requests for a foreign host, bodies that are not JSON, and too large bodies.

    api_keys: if not empty, every request must have one of them.
    hosts: allowed host names of requests without a key. Loopback addresses are always allowed, and all addresses if `hosts`
        has an address that is not loopback. "*" or None: any host. This stops DNS rebinding, by which another site's page
        points its own name at 127.0.0.1.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], hosts: Collection[str] | None = None) -> None:
        self._app, self._keys = app, [key.encode() for key in api_keys]
        self._hosts = None if hosts is None or "*" in hosts or api_keys else {host.lower().strip("[]") for host in hosts}
        self._addresses = self._hosts is not None and any(_loopback(host) is False for host in self._hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        error = self._refusal(scope)
        if error is not None:
            scope.setdefault("state", {})["error"] = str(error)  # for the log
            return await error.response()(scope, receive, send)
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > MOST_BYTES:
                raise HTTPException(413, f"the body has more than {MOST_BYTES} bytes")
            return message

        return await self._app(scope, counted, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        given = Headers(scope=scope)
        if self._keys and scope["path"] not in OPEN_PATHS:
            key = self._key(given.get("authorization", ""))
            if key is None:
                return ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            if len(self._keys) > 1:
                scope[CLIENT] = f"key {key}"
        if self._hosts is not None and scope["path"] not in PROBES:
            sent = [("Host", host) for host in given.getlist("host")]
            sent += [("Origin", url.partition("://")[2]) for url in given.getlist("origin")]
            for name, host in sent:
                if not self._own(self._hosts, host):
                    says = f"{name} is {host[:100]!r}; --allowed-host names it, or --api-key-file protects all"
                    return ApiError(403, says, code="host_not_allowed")
        if scope["method"] == "POST":
            kind = given.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                return ApiError(415, f"Content-Type is {kind[:100]!r}; a body is sent as 'application/json'")
        return None

    def _key(self, given: str) -> int | None:
        """Return the number of the key in a header; None without one."""
        scheme, _, key = given.partition(" ")
        if scheme.lower() != "bearer":
            return None
        right = [hmac.compare_digest(key.strip().encode("latin-1"), each) for each in self._keys]
        return right.index(True) if sum(right) else None  # compares all of them, whichever is right

    def _own(self, hosts: Collection[str], given: str) -> bool:
        """Return whether a host, with or without its port, is this server's."""
        try:
            host = (urlsplit(f"//{given}").hostname or "").rstrip(".")
        except ValueError:
            return False
        loopback = _loopback(host)
        return host in hosts or bool(loopback) or (loopback is False and self._addresses)


def _loopback(host: str) -> bool | None:
    """Return whether an address is loopback; None for a name that is none."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return None
