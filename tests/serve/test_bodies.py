"""A body that is wrong costs one short answer, whatever it is full of, and its answer says what was wrong."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest
from pydantic import ValidationError
from servers import Served

from kvthaw.serve import bodies, schema
from kvthaw.serve.fields import Body
from kvthaw.serve.lanes import Reader

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    TEXT: {"prompt": "Hi", "max_tokens": 2},
    RESPONSES: {"input": "Hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/contexts": {"name": "a", "text": "Hi"},
    "/v1/recalls/x/runs": {},
    "/v1/recalls/x/answers": {},
}
KINDS = [one for one in vars(schema).values() if isinstance(one, type) and issubclass(one, Body) and one is not Body]
MANY = 20_000
FILLINGS: dict[str, Any] = {
    "objects": [{}] * MANY,
    "numbers": [1] * MANY,
    "negative numbers": [-1] * MANY,
    "texts": [""] * MANY,
    "nulls": [None] * MANY,
    "lists": [[]] * MANY,
    "lists of objects": [[{}] * 10] * MANY,
    "messages": [{"role": "user", "content": [{}] * 100}] * 1000,
    "wrong at the end": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5}] * 4000 + [{}],
    "an object": {str(i): [] for i in range(MANY)},
}


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_field_makes_few_errors(kind: type[Body], filling: str) -> None:
    for name in kind.names():
        try:
            kind.model_validate({name: FILLINGS[filling]})
        except ValidationError as error:
            assert error.error_count() < 40, name  # noqa: PT017
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({str(i): 0 for i in range(MANY)})
    assert raised.value.error_count() < 20


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "messages"), (TEXT, "stop"), (RESPONSES, "input"), ("/v1/contexts", "messages")]
)
def test_four_megabytes_of_nothing_are_refused_at_once(served: Served, path: str, field: str) -> None:
    text = json.dumps({field: [{}] * 1_000_000}).encode()
    start = time.monotonic()
    said = served.http.post(path, content=text, headers={"content-type": "application/json"})
    assert time.monotonic() - start < 10  # a minute, where each is looked at
    assert said.status_code == 413
    assert len(said.content) < 500


def test_a_body_is_read_without_looking_through_its_values_again_and_again(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    collecting: list[bool] = []
    loads = json.loads
    monkeypatch.setattr(bodies.json, "loads", lambda text: collecting.append(gc.isenabled()) or loads(text))
    for content, status in (('{"prompt": [[]]}', 400), ('{"prompt": [[]', 400), ("[" * 100_000, 400)):
        said = served.http.post(TEXT, content=content, headers={"content-type": "application/json"})
        assert said.status_code == status
        assert gc.isenabled()
    assert collecting == [False] * 3


@pytest.mark.parametrize("path", LEAST)
def test_half_of_a_surrogate_pair_is_refused_wherever_it_stands(served: Served, path: str) -> None:
    half = "Hello \\ud83d"
    fields = [*LEAST[path], "user", "model", "cache_salt", "stop", "metadata", "instructions", "name"]
    texts = [json.dumps(LEAST[path] | {field: "HALF"}) for field in fields]
    texts += [json.dumps(LEAST[path] | dict.fromkeys(("HALF",), 1)), json.dumps(["HALF"]), json.dumps("HALF")]
    texts += [
        json.dumps(LEAST[path] | {field: {"HALF": {"type": ["HALF"]}}}) for field in ("metadata", "response_format", "text")
    ]
    texts.append(json.dumps(LEAST[path] | {"messages": [{"role": "user", "content": [{"type": "text", "text": "HALF"}]}]}))
    for text in texts:
        said = served.http.post(path, content=text.replace("HALF", half).encode(), headers={"content-type": "application/json"})
        assert said.status_code == 400, text
        assert "surrogate" in said.json()["error"]["message"]
    whole = {"prompt": "\\ud83d \U0001f642", "max_tokens": 1}
    assert served.post(TEXT, **whole).status_code == 200  # a backslash and letters


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (TEXT, {"stop": ["\n", ""]}, "stop.1: String should have at least 1 character"),
        (TEXT, {"stop": 5}, "stop: it must be a string or a list"),
        (TEXT, {"stop": {"a": 1}}, "stop: it must be a string or a list"),
        (TEXT, {"prompt": 5}, "prompt: it must be a string, token ids, or a list of either"),
        (TEXT, {"prompt": [1, "a"]}, "prompt.1: Input should be a valid integer"),
        (TEXT, {"prompt": [[1], ["a"]]}, "prompt.1.0: Input should be a valid integer"),
        (TEXT, {"response_format": "json"}, "response_format: it must be an object"),
        (TEXT, {"response_format": {"type": "json"}}, "response_format.type: it must be one of 'text', "),
        (TEXT, {"logit_bias": [1]}, "logit_bias: it must be an object"),
        (TEXT, {"top_logprobs": 2}, "top_logprobs: is not served"),
        (CHAT, {"truncation": "auto"}, "truncation: is not served"),
        (CHAT, {"messages": ["Hi"]}, "messages.0: it must be an object"),
        (RESPONSES, {"stop": "a"}, "stop: is not served"),
        (RESPONSES, {"input": 5}, "input: it must be a string or a list"),
        (RESPONSES, {"text": {"format": {"type": "xml"}}}, "text.format.type: it must be one of 'text', "),
        (TEXT, {"stop": [1]}, "stop.0: Input should be a valid string"),
        (TEXT, {"prompt": ["a", 1]}, "prompt.1: Input should be a valid string"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type: "),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content: it must be a string or a list"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text: Field required"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input.0.content: Field required"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name: "),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema: Field required"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x: "),
        (TEXT, {"tools": [{"type": "function"}]}, "tools: is not served; it may be left out, or be []; /v1/chat/completions takes"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools.0.function: Field required"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools.0.function.x: is not served"),
        (CHAT, {"prediction": {"type": "content"}}, "prediction: is not served"),
        (RESPONSES, {"max_tool_calls": 3}, "max_tool_calls: is not served"),
        (TEXT, {"best_of": 2}, "best_of: is not served; it may be left out, or be 1"),
    ],
)  # fmt: skip
def test_the_error_is_of_what_was_given(served: Served, path: str, fields: dict[str, Any], says: str) -> None:
    message = served.post(path, **LEAST[path] | fields).json()["error"]["message"]
    assert message.startswith(says)
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, fields) for path in (CHAT, TEXT) for fields in (
            {"tools": []}, {"store": False}, {"n": 1}, {"tool_choice": "none"}, {"stop": []}, {"logit_bias": {}}, {"metadata": {}},
            {"tool_choice": "auto", "tools": []}, {"safety_identifier": "a", "prompt_cache_key": "b"},
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            {"response_format": {"type": "text"}}, {"parallel_tool_calls": False}, {"service_tier": "auto"}, {"user": None},
        )),
        (TEXT, {"best_of": 1, "suffix": ""}),
        (CHAT, {"functions": [], "function_call": "none", "modalities": ["text"], "reasoning_effort": "none"}),
        (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [], "annotations": [], "refusal": None}]}),
        (RESPONSES, {"tools": [], "store": False, "background": False, "include": [], "metadata": {}, "reasoning": {}}),
        (RESPONSES, {"previous_response_id": None, "truncation": "disabled", "tool_choice": "none"}),
        (RESPONSES, {"tool_choice": "auto", "text": {"verbosity": "medium"}, "reasoning": {"effort": None, "summary": None}}),
        (CHAT, {"verbosity": "medium", "function_call": "auto"}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_passes(served: Served, path: str, fields: dict[str, Any]) -> None:
    said = served.post(path, **LEAST[path] | fields)
    assert said.status_code == 200, said.text


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": "TEXT"}, "prompt"),
        (TEXT, {"prompt": ["a", "TEXT"]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "TEXT"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "TEXT"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}] * 1000}, "messages"),
        (RESPONSES, {"input": "TEXT"}, "input"),
        (RESPONSES, {"instructions": "TEXT"}, "input"),
        ("/tokenize", {"prompt": "TEXT"}, "prompt"),
        ("/v1/contexts", {"text": "TEXT"}, "text"),
        ("/v1/contexts", {"text": None, "messages": [{"role": "user", "content": "x" * 1000}] * 1000}, "messages"),
    ],
)  # fmt: skip
def test_a_text_that_is_too_long_is_refused_before_it_is_tokenized_whole(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    seen: list[int] = []
    encode = Reader._encode
    monkeypatch.setattr(Reader, "_encode", lambda self, text, special: seen.append(len(text)) or encode(self, text, special))
    text = json.dumps(LEAST[path] | fields).replace("TEXT", "x" * 1_000_000)
    error = served.http.post(path, content=text.encode(), headers={"content-type": "application/json"}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert sum(seen) < 100_000
