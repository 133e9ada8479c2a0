"""Answers that are JSON, as OpenAI's client asks for them."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from pydantic import BaseModel
from servers import Served, serving

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
