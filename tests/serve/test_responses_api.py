"""What /v1/responses answers, read by OpenAI's client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from servers import Served

ASK: dict[str, Any] = {"model": "tiny", "input": "Hi!", "max_output_tokens": 8, "temperature": 0}
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0}
NAMES = ["created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"]
LAST = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.fixture
def said(served: Served) -> str:
    """What a chat answers to the same messages."""
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi!"}]
    text = served.openai.chat.completions.create(messages=messages, extra_body={"ignore_eos": True}, **GREEDY)
    return text.choices[0].message.content or ""


@pytest.mark.parametrize("parts", ["Hi!", [{"role": "user", "content": [{"type": "input_text", "text": "Hi!"}]}]])
def test_a_response_is_what_a_chat_answers(served: Served, said: str, parts: Any) -> None:
    response = served.openai.responses.create(
        **ASK | {"input": parts}, instructions="Be brief.", metadata={"of": "me"}, extra_body={"ignore_eos": True}
    )
    assert response.output_text == said
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.usage.output_tokens, response.metadata, response.instructions) == (8, {"of": "me"}, "Be brief.")
    assert response.usage.total_tokens == response.usage.input_tokens + 8


def test_an_answer_can_be_handed_back(served: Served) -> None:
    turns: list[Any] = [{"role": "user", "content": "Hi!"}]
    first = served.openai.responses.create(**ASK | {"input": turns})
    items = [item.model_dump(exclude_none=True) for item in first.output]
    turns += [*items, {"role": "user", "content": "Go on."}]
    second = served.openai.responses.create(**ASK | {"input": turns})
    assert second.usage.input_tokens > first.usage.total_tokens


@pytest.mark.parametrize("stop", [[], list(range(256))], ids=["to its limit", "to a stop token"])
def test_a_stream_tells_the_same_by_named_events(served: Served, stop: list[int]) -> None:
    ask = ASK | {"extra_body": {"stop_token_ids": stop, "include_stop_str_in_output": True}}
    scored = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = served.openai.responses.create(**ask | scored)
    events = list(served.openai.responses.create(**ask | scored, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]] == [*NAMES, *LAST, whole.status]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    assert events[-1].response.output[0].content == whole.output[0].content
    assert events[-1].response.usage == whole.usage
    scores = whole.output[0].content[0].logprobs
    assert [score.token for event in deltas for score in event.logprobs] == [score.token for score in scores]
    assert {len(score.top_logprobs) for score in scores} == {2}
    assert whole.status == ("completed" if stop else "incomplete")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "reasoning", "id": "x", "summary": []}]}, "input"),
        ({"input": [{"role": "developer", "content": "Hi"}]}, "input"),
        ({"input": "x" * 3000}, "input"),
        *(({name: value}, name) for name, value in {
            "previous_response_id": "resp_1", "store": True, "background": True, "truncation": "auto", "tools": [{}],
            "reasoning": {"effort": "low"}, "max_output_tokens": 0, "top_logprobs": 1, "include": ["reasoning.encrypted_content"],
            "text": {"verbosity": "low"}, "n": 2, "stream_options": {"include_obfuscation": True},
            "conversation": "x", "metadata": {"x": 1},
        }.items()),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    answer = served.post("/v1/responses", **ASK | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_nothing_is_kept_of_a_response(served: Served) -> None:
    response = served.openai.responses.create(**ASK)
    with pytest.raises(openai.NotFoundError):
        served.openai.responses.retrieve(response.id)


def test_a_stream_ends_with_the_error(served: Served) -> None:
    hook = served.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    try:
        events = list(served.openai.responses.create(**ASK, stream=True))
        with pytest.raises(openai.InternalServerError):
            served.openai.responses.create(**ASK)
    finally:
        hook.remove()
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
