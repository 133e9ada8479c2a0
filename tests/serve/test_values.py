"""The server counts the values of a body before Python makes objects of them, and reads large bodies in a part of the time."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from servers import Served

from kvthaw.serve import bodies
from kvthaw.serve.app import MOST_VALUES, most_values
from kvthaw.serve.bodies import count_values

TEXTS = st.text('\\",:[]{}a\n\u20ac\U0001f642', max_size=9)
VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=40,
)
JSON = {"content-type": "application/json"}


def held(value: Any) -> tuple[int, int]:
    """How many values and names a value has, itself included, and how many of them are empty lists or objects."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    counts = [held(one) for one in inside]
    empty = isinstance(value, dict | list) and not value
    return 1 + sum(count for count, _ in counts), empty + sum(empties for _, empties in counts)


@settings(max_examples=100)
@given(value=VALUES, ascii=st.booleans(), piece=st.integers(1, 50))
def test_values_are_counted_whatever_texts_hold(value: Any, ascii: bool, piece: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE", piece)
        assert count_values(text) == sum(held(value))


def test_counting_takes_a_part_of_the_time_that_reading_takes() -> None:
    text = json.dumps({"messages": [{}] * 1_000_000}).encode()
    times = []
    for work in (count_values, json.loads):
        start = time.process_time()
        work(text)
        times.append(time.process_time() - start)
    assert times[0] < times[1]


def test_as_many_values_are_taken_as_the_tokens_of_all_outputs(served: Served) -> None:
    service, most = served.service, most_values(served.service)
    assert service.batch.capacity * service.worker.room < most < MOST_VALUES
    for count, status in ((most + 1, 413), (most - 10, 400)):
        said = served.http.post("/v1/completions", content='{"prompt":[' + ",".join("7" * count) + "]}", headers=JSON)
        assert said.status_code == status
        assert ("values" in said.json()["error"]["message"]) == (status == 413)
    prompt = served.service.tokenizer("a b c")["input_ids"]
    said = served.http.post(
        "/v1/completions", content=json.dumps({"prompt": prompt, "max_tokens": 1}) + " " * bodies.SMALL, headers=JSON
    )
    assert said.status_code == 200


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_a_large_body_in_another_encoding_is_refused(served: Served, encoding: str) -> None:
    """Bytes of its characters would look like quotes."""
    text = json.dumps({"prompt": "\u2200", "stop": [{}] * 50_000}, ensure_ascii=False)
    said = served.http.post("/v1/completions", content=text.encode(encoding), headers=JSON)
    assert said.status_code == 400
    assert "UTF-8" in said.json()["error"]["message"]


@pytest.mark.parametrize("text", ['{"prompt": [', '{"prompt": "\\ud800"', "[" * 100_000, '{"prompt": "a"} x'])
def test_what_is_wrong_with_a_large_body_is_said_as_of_a_small_one(served: Served, text: str) -> None:
    small, large = (served.http.post("/v1/completions", content=text + " " * n, headers=JSON) for n in (0, bodies.SMALL))
    assert small.status_code == large.status_code == 400
    assert small.json() == large.json()


def test_others_are_answered_while_large_bodies_come(served: Served) -> None:
    """Of as many as hold the interpreter all of the time without a limit."""
    many = most_values(served.service) // 3
    text, ends = json.dumps({"messages": [{}] * many}), time.monotonic() + 1
    said: list[int] = []

    def send() -> None:
        while time.monotonic() < ends:
            said.append(served.http.post("/v1/chat/completions", content=text, headers=JSON).status_code)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    while time.monotonic() < ends:
        assert served.http.get("/health").status_code == 200
    for thread in threads:
        thread.join()
    assert set(said) == {400}


def test_large_bodies_are_read_by_turns_of_the_clients(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their keys, where they have some: behind a proxy all have one address."""
    app: Any = served.server.config.app
    turn, turns = app.state.large_bodies.turn, list[str]()
    monkeypatch.setattr(app.state.large_bodies, "turn", lambda client, spent: turns.append(client) or turn(client, spent))
    monkeypatch.setattr("kvthaw.serve.bodies.client_of", lambda http: f"key of {http.headers['authorization']}")
    text = '{"prompt": "a", "max_tokens": 1}' + " " * bodies.SMALL
    for key in "ab":
        said = served.http.post("/v1/completions", content=text, headers=JSON | {"Authorization": key})
        assert said.status_code == 200
    assert turns == ["key of a", "key of b"]


def test_too_many_large_bodies_are_told_to_come_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = served.server.config.app
    monkeypatch.setattr(app.state.large_bodies, "_most", 0)
    said = served.http.post("/v1/completions", content='{"prompt": "a", "max_tokens": 1}' + " " * bodies.SMALL, headers=JSON)
    assert (said.status_code, said.headers["retry-after"]) == (429, "1")
    assert served.post("/v1/completions", prompt="a", max_tokens=1).status_code == 200


def test_a_large_body_is_refused_before_it_is_received(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = served.server.config.app
    monkeypatch.setattr(app.state.large_bodies, "_most", 0)
    url = urlsplit(served.url)
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {bodies.SMALL + 1}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=10) as sock:
        sock.sendall(head.encode())
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
