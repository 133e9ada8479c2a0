"""A line in the log for each request."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from servers import Served, until

from kvthaw.serve.jobs import Delta, Job
from kvthaw.serve.request_log import told

PROMPT = "Once upon a time a king had three sons. " * 4
Line = Callable[[str], str]


@pytest.fixture
def line(caplog: pytest.LogCaptureFixture) -> Line:
    """Waits for a line with some words, and returns it."""
    caplog.set_level(logging.DEBUG, "kvthaw.serve.request_log")

    def lines(words: str) -> list[str]:
        records = [one for one in caplog.records if one.name.endswith("request_log") and words in one.getMessage()]
        return [f"{one.levelname} {one.getMessage()}" for one in records]

    def found(words: str) -> str:
        until(lambda: bool(lines(words)))
        return lines(words)[0]

    return found


def test_what_a_request_took(served: Served, line: Line) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, PROMPT + "x"], "n": 2, "max_tokens": 3, "ignore_eos": True}
    prompt = served.post("/v1/completions", **body).json()["usage"]["prompt_tokens"]
    said = line(" 12 new, ")
    assert re.match(r"INFO 127\.0\.0\.1 POST /v1/completions 200 [\d.]+ m?s: ", said)
    assert f" {prompt:,} prompt tokens, " in said
    assert re.search(r" 12 new, first after [\d.]+ m?s; length$", said)
    assert "king" not in said
    streamed = body | {"prompt": PROMPT, "n": 1, "max_tokens": 7, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=streamed) as stream:
        assert list(stream.iter_lines())
    assert re.search(r"POST /v1/completions 200 .* 7 new, first after .*; length$", line(" 7 new, "))


def test_why_a_request_was_refused_in_one_line(served: Served, line: Line) -> None:
    served.post("/v1/completions", prompt="a", context="none")
    assert re.match(r"INFO .* POST /v1/completions 404 .*: no context is named 'none'$", line("'none'"))
    served.http.post("/v1/completions", content="a")
    assert "a body is sent as 'application/json'" in line(" 415 ")
    served.post("/v1/completions", prompt="a", temprature=1)
    assert " 400 " in line("temprature")
    served.post("/v1/chat/completions", model="other\nINFO b", messages=[{"role": "user", "content": "a"}])
    assert "\n" not in line("'other")
    served.http.get("/v1/contexts/a%0Ab")
    assert "\n" not in line("/v1/contexts/a%0Ab")


def test_probes_are_for_debugging(served: Served, line: Line) -> None:
    for path in ("/health", "/metrics", "/page.css"):
        served.http.get(path)
        assert line(f"GET {path} 200 ").startswith("DEBUG 127.0.0.1 ")


def test_what_the_page_asks_for_again_and_again_is_for_debugging(served: Served, line: Line) -> None:
    asked = served.post("/v1/completions", prompt=PROMPT, max_tokens=2, recall="selected").json()
    served.http.get(f"/v1/recalls/{asked['id']}/passages")
    assert line("/passages 200 ").startswith("DEBUG 127.0.0.1 ")
    served.http.get("/v1/recalls/none/passages")
    assert line("/none/passages 404 ").startswith("INFO 127.0.0.1 ")


def test_a_client_that_leaves_is_told_of(served: Served, line: Line) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_lines())
    assert line("; left").endswith("left")


def test_a_request_that_the_server_ends_has_not_left() -> None:
    async def run() -> str:
        job = Job([SimpleNamespace(prompt=3, cached_tokens=0, tokens=[1], finished=None)], [0])  # type: ignore[list-item]
        job.push(Delta(0, finished="abort"))
        return told(job, 1)

    assert asyncio.run(run()).endswith("; abort")


@pytest.mark.parametrize("size", [99, 1 << 20])
def test_a_client_that_leaves_in_the_middle_of_its_body_sent_no_wrong_one(served: Served, line: Line, size: int) -> None:
    url = urlsplit(served.url)
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=10) as sock:
        sock.sendall(head.encode() + b'{"prompt": "')
    assert re.match(r"INFO .* POST /tokenize 499 .*: the client has left$", line("/tokenize"))
