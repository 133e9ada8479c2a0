"""What a server asks of a request before a route sees it, and of a connection before its request is whole."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from servers import Served, serving, until

from kvthaw.serve import protocol
from kvthaw.serve.guard import Guard

BODY = {"prompt": "Hi", "max_tokens": 1}


def connected(served: Served) -> socket.socket:
    url = urlsplit(served.url)
    return socket.create_connection((url.hostname, url.port), timeout=10)


def said(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    parts = []
    try:
        while part := sock.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


@pytest.fixture(scope="module")
def own(loaded: tuple[Any, Any]) -> Iterator[Served]:
    with serving(*loaded, hosts=("127.0.0.1", "Model.example")) as served:
        yield served


@pytest.mark.parametrize("header", ["host", "origin"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("192.0.2.1", 403),
        ("[2001:db8::1]:80", 403),
        ("[::1", 403),
        ("localhost", 200),
        ("LOCALHOST.:8000", 200),
        ("page.localhost", 200),
        ("127.0.0.2:1", 200),
        ("[::1]:8000", 200),
        ("model.example:8000", 200),
    ],
)
def test_a_server_without_keys_answers_under_its_own_names_alone(own: Served, header: str, host: str, status: int) -> None:
    given = {header: host if header == "host" else f"http://{host}"}
    answer = own.http.get("/v1/models", headers=given)
    assert answer.status_code == status
    assert status == 200 or "--allowed-host" in answer.json()["error"]["message"]
    assert own.http.post("/v1/completions", json=BODY, headers=given).status_code == status
    assert own.http.get("/health", headers=given).status_code == 200


@pytest.mark.parametrize(
    ("hosts", "host", "own"),
    [
        (("0.0.0.0",), "192.0.2.1", True),
        (("0.0.0.0",), "evil.example", False),
        (("::",), "[2001:db8::1]:80", True),
        (("127.0.0.1", "*"), "evil.example", True),
        (None, "evil.example", True),
    ],
)
def test_addresses_are_a_servers_own_where_it_listens_on_them(hosts: tuple[str, ...] | None, host: str, own: bool) -> None:
    scope: Any = {"method": "GET", "path": "/v1/models", "headers": [(b"host", host.encode())]}
    for keys, refused in ((), not own), (("key",), True):
        error = Guard(None, keys, hosts)._refusal(scope)  # type: ignore[arg-type]
        assert (error is not None) == refused
        assert error is None or error.response().status_code == (401 if keys else 403)


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/contexts", "/tokenize"])
def test_a_body_that_says_to_be_no_json_is_refused(own: Served, path: str, kind: str | None) -> None:
    """A page of another site may send it without asking."""
    headers = {} if kind is None else {"content-type": kind}
    assert own.http.post(path, content=b'{"prompt": "Hi", "max_tokens": 1}', headers=headers).status_code == 415
    assert own.http.post("/tokenize", content=b'{"prompt": "Hi"}', headers={"content-type": "Application/JSON; charset=utf-8"})


def test_the_scheme_of_a_key_is_bearer_in_any_case(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, api_keys=("some",)) as served:
        for given, status in (("bearer some", 200), ("BEARER  some", 200), ("some", 401), ("Basic some", 401), ("Bearer", 401)):
            assert served.http.get("/v1/models", headers={"authorization": given}).status_code == status
        assert "server" not in served.http.get("/health").headers


@pytest.mark.parametrize(
    "endless",
    [b"X: " + b"x" * 1000, b"X: y\r\n" * 200, b"x" * 1000],
    ids=["a value", "many", "a name"],
)
def test_headers_are_bounded_before_the_key_is_asked_for(own: Served, endless: bytes) -> None:
    with connected(own) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        sent = 0
        try:
            while sent < 8 << 20:
                sock.sendall(endless * 64)
                sent += len(endless) * 64
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 8 << 20


def test_headers_behind_a_body_are_dropped_and_bounded(own: Served) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(own) as sock:
        sock.sendall(head + b'10\r\n{"prompt": "Hi"}\r\n0\r\nHost: evil.example\r\nConnection: close\r\n\r\n')
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    with connected(own) as sock:
        sock.sendall(head + b"1\r\n{\r\n0\r\nX: ")
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            sock.sendall(b"x" * (16 << 20))


def test_half_sent_requests_end_in_time(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "WHOLE_SECONDS", 0.4)
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.4)
    parts = (b"", b"GET / HT", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    with serving(*loaded) as served:
        for part, seconds in zip(parts, (0.2, 0.2, 0.4), strict=True):
            with connected(served) as sock:
                began = time.monotonic()
                sock.sendall(part)
                said(sock)
                assert seconds - 0.1 < time.monotonic() - began < seconds + 3
        slow = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True}
        assert len(served.post("/v1/completions", **slow).json()["choices"]) == 1, "an answer may take as long as it does"


def test_a_body_that_stops_or_trickles_ends_in_time(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "WHOLE_SECONDS", 0.9)
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.3)
    head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    with serving(*loaded) as served:
        for pause, least in ((9.0, 0.2), (0.1, 0.8)):
            with connected(served) as sock:
                began = time.monotonic()
                sock.sendall(head)
                sock.settimeout(pause)
                while time.monotonic() < began + 8:
                    with suppress(TimeoutError):
                        assert sock.recv(1 << 16)[:12] in (b"HTTP/1.1 408", b"")
                        break
                    sock.sendall(b" ")
                assert least < time.monotonic() - began < least + 4


def test_connections_leave_descriptors_to_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = pytest.importorskip("resource", reason="no such limit")
    for files, most in ((64, 24), (20, 1), (500, 460), (1 << 20, 1024), (limits.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(limits, "getrlimit", lambda _, files=files: (files, files))
        assert protocol.most_connections() == most


def test_of_too_many_connections_the_one_that_waits_longest_is_closed(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS", 4)
    with serving(*loaded) as served:
        held = [connected(served) for _ in range(4)]
        for sock in held:
            sock.sendall(b"GET / HT")
        until(lambda: len(served.server.server_state.connections) == 4)
        assert served.http.get("/health").status_code == 200
        assert said(held[0]) == b""
        held[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            held[-1].recv(1)
        for sock in held:
            sock.close()
