"""Whatever is not served is refused in OpenAI's shape, with the field that is wrong, and never ignored."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from servers import Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
REFUSED: list[tuple[str, dict[str, Any], str | None]] = [
    *((path, {name: value}, name) for path in (CHAT, TEXT) for name, value in {
        "temperature": 2.1, "top_p": 0, "n": 0, "frequency_penalty": -3, "presence_penalty": "1", "seed": 1 << 63, "stop": [""],
        "logit_bias": {"65": 101}, "stream_options": {"include_usage": True}, "max_tokens": -1, "min_p": 2, "top_k": -2,
        "repetition_penalty": 0, "min_tokens": 20, "stop_token_ids": [999], "ignore_eos": "yes", "stream": 1, "model": 5,
        "best_of": 2, "store": True, "nonsense": 1, "suffix": "x", "tools": [{}], "n ": 1,
        "user": "x" * 5000,
    }.items()),
    *((path, {name: value}, name) for path in (CHAT, TEXT) for name, value in {
        "top_k": 10**400, "min_tokens": 10**400, "max_tokens": 10**400, "repetition_penalty": 10**400, "temperature": 10**400,
        "stop": ["a"] * 17, "stop_token_ids": [1] * 513, "logit_bias": {str(i): 1 for i in range(513)},
    }.items()),
    (TEXT, {"stop": "a" * 129}, "stop"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "Hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "Hi"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "developer", "content": "Hi"}]}, "messages"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"response_format": {"type": "json"}}, "response_format"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    (CHAT, {"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
    ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
    (CHAT, {"logit_bias": {"258": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"x": 1}}, "logit_bias"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": [1, "x"]}, "prompt"),
    (TEXT, {"prompt": [258]}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"max_tokens": 0}, "max_tokens"),
    (TEXT, {"logprobs": 21}, "logprobs"),
    (TEXT, {"logprobs": True}, "logprobs"),
    (TEXT, {"n": 100}, "n"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[f"{p[4:]} {f}"[:60] for p, f, _ in REFUSED])
def test_what_is_not_served_is_refused(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    least: dict[str, Any] = {CHAT: {"messages": USER, "max_tokens": 5}, TEXT: {"prompt": "Hi", "max_tokens": 5}}.get(path, {})
    said = served.post(path, **least | fields)
    error = said.json()["error"]
    assert said.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.strip() in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert served.service.worker.open == 0


@pytest.mark.parametrize(
    ("path", "field", "meant"), [(CHAT, "max_token", "max_tokens"), (TEXT, "temprature", "temperature"), (TEXT, "zzz", None)]
)
def test_a_misspelled_field_is_answered_with_the_one_that_is_meant(
    served: Served, path: str, field: str, meant: str | None
) -> None:
    least: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "Hi"}
    message = served.post(path, **least, **{field: 1}).json()["error"]["message"]
    assert (repr(meant) if meant else "zzz") in message
    assert ("did you mean" in message) == (meant is not None)


@pytest.mark.parametrize(
    ("fields", "where", "meant"),
    [
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages.0.contents", "content"),
        ({"messages": [{"rol": "user", "content": "x"}]}, "messages.0.rol", "role"),
        ({"messages": USER, "stream": True, "stream_options": {"include_usages": True}}, "include_usages", "include_usage"),
        (
            {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schma": {}}}},
            "schma",
            "schema",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_misspelled_field_within_another_is_answered_too(
    served: Served, fields: dict[str, Any], where: str, meant: str
) -> None:
    message = served.post(CHAT, **fields).json()["error"]["message"]
    assert where in message
    assert f"did you mean {meant!r}?" in message


@pytest.mark.parametrize(
    ("path", "fields", "where"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "cache_control": {}}]}, "messages.0.cache_control"),
        (CHAT, {"messages": [{"role": "assistant", "content": "x", "reasoning_content": ""}]}, "messages.0.reasoning_content"),
        ("/v1/responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input.0.call_id"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_of_another_api_is_not_served_and_no_misspelling(
    served: Served, path: str, fields: dict[str, Any], where: str
) -> None:
    message = served.post(path, **fields).json()["error"]["message"]
    assert message.startswith(f"{where}: is not served")
    assert "did you mean" not in message


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": ""},
        {"prompt_cache_retention": "24h"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"reasoning": {"effort": None}, "tools": []},
    ],
    ids=str,
)
def test_what_asks_for_nothing_is_no_error(served: Served, fields: dict[str, Any]) -> None:
    assert served.post("/v1/responses", input="Hi", max_output_tokens=2, **fields).status_code == 200


def test_a_number_that_is_not_finite_is_told_in_few_words(served: Served) -> None:
    for number in ("NaN", "Infinity", "1" + "0" * 400):
        body = f'{{"prompt": "Hi", "repetition_penalty": {number}}}'
        said = served.http.post(TEXT, content=body, headers={"content-type": "application/json"}).json()["error"]
        assert said["param"] == "repetition_penalty"
        assert len(said["message"]) < 100


@pytest.mark.parametrize("text", ["{", "[]", "3", '"x"', '{"prompt": "\\ud800"}', "\xff", ""])
def test_bodies_that_are_no_request(served: Served, text: str) -> None:
    said = served.http.post(TEXT, content=text.encode("latin1"), headers={"content-type": "application/json"})
    assert said.status_code == 400
    assert said.json()["error"]["type"] == "invalid_request_error"


def test_paths_and_models_that_there_are_not(served: Served) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny") as raised:
        served.openai.completions.create(model="gpt-5", prompt="Hi")
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("gpt-5")
    assert served.http.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert served.http.get(TEXT).status_code == 405


@pytest.mark.parametrize(("prompt", "new"), [(2049, 5), (2040, 9), (20, 2029)])
def test_a_prompt_that_is_too_long_is_told_both_numbers(served: Served, prompt: int, new: int) -> None:
    for ask in (
        lambda: served.openai.completions.create(model="tiny", prompt=[1] * prompt, max_tokens=new),
        lambda: served.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x" * (prompt - 17)}], max_tokens=new
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=rf"{prompt:,} .*2,048") as raised:
            ask()
        assert raised.value.code == "context_length_exceeded"
        assert raised.value.param in ("prompt", "messages")


def test_a_large_body_is_refused(served: Served) -> None:
    said = served.post(TEXT, prompt="x" * (17 << 20))
    assert said.status_code == 413
    assert len(said.content) < 1000


def test_keys_and_templates(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, api_keys=("first", "second")) as served:
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("firs", 401), ("h\u00e9", 401)):
            said = served.http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert said.status_code == status
        assert served.http.get("/metrics").json()["error"]["code"] == "invalid_api_key"
        assert served.http.get("/ready").status_code == 200
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            served.openai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])


def test_the_description_tells_of_errors_and_of_fields_that_may_be_null(served: Served) -> None:
    described = served.http.get("/openapi.json").json()
    answers = [one["responses"] for path in described["paths"].values() for one in path.values()]
    assert all({"4XX", "5XX"} <= one.keys() and "422" not in one for one in answers)
    schemas = described["components"]["schemas"]
    assert set(schemas["ErrorDetail"]["properties"]) == {"message", "type", "param", "code"}
    fields = schemas["CompletionRequest"]
    assert fields["additionalProperties"] is False
    for name, field in fields["properties"].items():
        assert ({"type": "null"} in field.get("anyOf", ())) == (name != "prompt"), name


def test_a_path_that_is_not_served_is_named(served: Served) -> None:
    answer = served.post("/v1/embeddings", input="x")
    assert answer.status_code == 404
    assert "POST /v1/embeddings is not served" in answer.json()["error"]["message"]
