"""Answers that are JSON, as OpenAI's client asks for them."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from pydantic import BaseModel
from servers import Served, serving, until

from kvthaw.engine.grammar import Grammar, Grammars
from kvthaw.serve import compilers

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")

USER: list[Any] = [{"role": "user", "content": "Who?"}]


class Person(BaseModel):
    name: str
    age: int


def schema() -> dict[str, Any]:
    found = Person.model_json_schema()
    found["properties"]["name"]["maxLength"] = 8
    found["properties"]["age"] |= {"minimum": 0, "maximum": 150}
    return found


def test_an_answer_is_what_the_schema_says(served: Served) -> None:
    named = {"name": "person", "schema": schema(), "strict": True}
    chat = served.openai.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_schema", "json_schema": named}, n=3, seed=1
    )
    people = [Person.model_validate_json(choice.message.content or "") for choice in chat.choices]
    assert len({person.name for person in people}) > 1
    assert [choice.finish_reason for choice in chat.choices] == ["stop"] * 3
    asked = {"format": {"type": "json_schema", **named}}
    response = served.post("/v1/responses", model="tiny", input="Who?", seed=1, text=asked).json()
    assert response["text"]["format"]["schema"] == schema()
    assert json.loads(response["output"][0]["content"][0]["text"]).keys() == {"name", "age"}


def test_without_xgrammar_json_is_refused_in_words(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with serving(*loaded) as served:
        said = served.post("/v1/completions", prompt="Hi", response_format={"type": "json_object"})
    assert (said.status_code, said.json()["error"]["param"]) == (400, "response_format")
    assert "xgrammar" in said.json()["error"]["message"]


def test_no_request_waits_for_the_vocabulary(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read before the server is ready: meanwhile other requests would wait for the interpreter."""
    made, make = list[int](), Grammars.__init__

    def counts(self: Grammars, *given: Any) -> None:
        made.append(1)
        make(self, *given)

    monkeypatch.setattr(Grammars, "__init__", counts)
    with serving(*loaded) as served:
        assert made == [1]
        assert served.post("/v1/completions", **asked("first")).status_code == 200
        assert made == [1]


def asked(title: str) -> dict[str, Any]:
    schema = {"const": title}
    return {
        "prompt": "Hi",
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Schemas of constants with "slow" do not compile before the test ends; yields the constants that were begun."""
    ended, begun, read, compile = threading.Event(), list[str](), Grammars.read, Grammars.compile

    def read_slow(self: Grammars, schema: Any, *, strict: bool = False) -> tuple[Any, int]:
        source, tries = read(self, schema, strict=strict)
        return source, compilers.SHORT_TRIES + 1 if "slow" in schema["const"] else tries

    def compile_slow(self: Grammars, source: Any) -> Grammar:
        begun.append(re.findall(r"(?:slow|quick|first) ?\d?", source)[0])
        if "slow" in begun[-1]:
            ended.wait(10)
        return compile(self, source)

    monkeypatch.setattr(Grammars, "read", read_slow)
    monkeypatch.setattr(Grammars, "compile", compile_slow)
    monkeypatch.setattr(compilers, "SECONDS", 0.5)
    yield begun
    ended.set()


def test_schemas_that_compile_slowly_keep_no_other_waiting(served: Served, slow: list[str]) -> None:
    for number in range(3):
        said = served.post("/v1/completions", **asked(f"slow {number}"))
        assert (said.status_code, said.json()["error"]["param"]) == (503, "response_format")
        assert said.headers["retry-after"]
        assert served.post("/v1/completions", **asked(f"quick {number}")).status_code == 200
    assert slow == ["slow 0", "quick 0", "quick 1", "quick 2"]  # of a client one after the other


def test_a_schema_whose_client_has_left_is_not_begun(served: Served, slow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilers, "SECONDS", 60.0)
    before = len(threading.enumerate())
    for title in ("slow 4", "slow 5", "slow 6"):
        with pytest.raises(httpx2.TimeoutException):
            served.http.post("/v1/completions", json=asked(title), timeout=0.3)
    assert slow == ["slow 4"]
    assert len(threading.enumerate()) <= before + 1


def test_a_server_that_ends_waits_for_no_schema(
    loaded: tuple[Any, Any], slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "SECONDS", 60.0)
    with serving(*loaded) as served, ThreadPoolExecutor(2) as clients:
        said = [clients.submit(served.post, "/v1/completions", **asked(title)) for title in ("slow 7", "slow 8")]
        until(lambda: len(slow) == 1)
        began = time.monotonic()
        served.server.handle_exit(signal.SIGTERM, None)
        for one in said:
            assert (one.result().status_code, one.result().json()["error"]["code"]) == (503, "shutting_down")
        assert time.monotonic() - began < 30
