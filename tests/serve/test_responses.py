"""What a client of OpenAI's gets: the model's tokens, whole or in chunks, under every field that is served."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from servers import SETTINGS, Served

from kvthaw import Cache, __version__
from kvthaw.engine.decode import generate
from kvthaw.engine.prefill import prefill

PROMPT = "It was a dark and stormy night; the rain fell in torrents. " * 3
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi!"}]},
]
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.7},
    "n": {"n": 3},
    "seed": {"seed": -5, "n": 2},
    "penalties": {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": -0.5},
    "logit_bias": {"temperature": 0, "logit_bias": {"65": 100, "66": 99.5}},
    "stop": {"stop": ["e", "\u00e9", "A"]},
    "one stop": {"stop": "e"},
    "user": {"user": "somebody", "stream_options": None},
    "top_k": {"top_k": 5},
    "top_k off": {"top_k": -1},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "min_tokens": {"min_tokens": 8, "ignore_eos": True, "max_tokens": 12},
    "stop_token_ids": {"stop_token_ids": list(range(128)), "include_stop_str_in_output": True},
    "json": {"response_format": {"type": "json_object"}},
    "include_stop": {"stop": ["a", "b"], "include_stop_str_in_output": True},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "echoed logprobs": {"echo": True, "logprobs": 2, "n": 2},
    "tokens": {"prompt": [5, 6, 7]},
    "texts": {"prompt": ["one", "two"], "n": 2},
    "lists of tokens": {"prompt": [[5, 6, 7], [8]], "echo": True},
    "the prompt alone": {"max_tokens": 0, "echo": True, "logprobs": 1},
}
CHATS: dict[str, dict[str, Any]] = {  # sampling is the same as that of a completion
    **{name: FIELDS[name] for name in ("plain", "n", "stop", "json")},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 4, "n": 2},
    "max_completion_tokens": {"max_completion_tokens": 5, "max_tokens": None},
    "response_format": {"response_format": {"type": "text"}},
}


def alone(served: Served, ids: list[int], new: int) -> list[int]:
    """The tokens that the method gives without any server."""
    cache = Cache(served.model, **SETTINGS)
    logits = prefill(served.model, cache, ids)
    cache.wait()
    return list(generate(served.model, cache, logits, limit=new))


def test_greedy_text_is_that_of_generate(served: Served) -> None:
    ids = served.service.tokenizer(PROMPT)["input_ids"]
    tokens = alone(served, ids, 40)
    answer = served.openai.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == served.service.tokenizer.decode(tokens, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        len(ids),
        40,
        len(ids) + 40,
    )


@pytest.mark.parametrize("fields", [*FIELDS.values(), *COMPLETIONS.values()], ids=[*FIELDS, *COMPLETIONS])
def test_a_streamed_completion_is_the_whole_one(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 7, "seed": 3} | fields
    served.post("/v1/completions", **body)  # so that both find the prompt in the prefix cache
    whole = served.post("/v1/completions", **body).raise_for_status().json()
    chunks = events(served, "/v1/completions", body)
    assert {chunk["id"] for chunk in chunks[:-1]} == {chunks[0]["id"]}
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert_close([value for part in parts if part["logprobs"] for value in part["logprobs"][name]], values)
    assert chunks[-1]["usage"] == whole["usage"]
    assert len(whole["choices"]) == body.get("n", 1) * (
        2 if isinstance(body["prompt"][0], list) or body["prompt"][0] == "one" else 1
    )


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
def test_a_streamed_chat_is_the_whole_one(served: Served, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 7, "seed": 3} | fields
    whole = served.post("/v1/chat/completions", **body).raise_for_status().json()
    chunks = events(served, "/v1/chat/completions", body)
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"][0]["index"] == choice["index"]]
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] in ("stop", "length")
        scores = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert_close(scores, (choice["logprobs"] or {"content": []})["content"])
    assert chunks[-1]["usage"] == whole["usage"]


def assert_close(found: Any, expected: Any) -> None:
    """But for the last bits of numbers, which hang on how many requests a step has."""
    numbers: tuple[list[float], list[float]] = ([], [])
    rest = [
        json.loads(json.dumps(one), parse_float=lambda text, own=own: own.append(float(text)))
        for one, own in zip((found, expected), numbers, strict=True)
    ]
    assert rest[0] == rest[1]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream; the last one has the usage."""
    said = served.post(path, **body | {"stream": True, "stream_options": {"include_usage": True}}).raise_for_status()
    assert said.headers["content-type"].startswith("text/event-stream")
    lines = said.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_the_client_reads_a_stream(served: Served) -> None:
    stream = served.openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=6,
        stream=True,
        extra_body={"stream_options": {"continuous_usage_stats": True}},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    used = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(used) == len(chunks)
    assert used == sorted(used)


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
    ask = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    text = served.openai.completions.create(**ask).choices[0].text
    stop = text[10:12]
    choice = served.openai.completions.create(**ask, stop=stop).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"


def test_outputs_differ_and_seeds_repeat_them(served: Served) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "n": 3}
    first, second = (served.openai.completions.create(**ask, seed=7).choices for _ in range(2))
    texts = [choice.text for choice in first]
    assert len(set(texts)) == 3
    assert [choice.text for choice in second] == texts
    assert served.openai.completions.create(**ask).choices[0].text != served.openai.completions.create(**ask).choices[0].text


def test_echoed_logprobs_are_those_of_the_model(served: Served) -> None:
    """As lm-evaluation-harness asks for them: the prompt's tokens, and one more that it drops."""
    ids = served.service.tokenizer(PROMPT)["input_ids"]
    choice = served.post(
        "/v1/completions", model="tiny", prompt=[ids], max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    ).json()["choices"][0]
    with torch.no_grad():
        logits = served.model(torch.tensor([ids], device=served.model.device)).logits[0]
    scores = logits.cpu().double().log_softmax(-1)
    given, likeliest = choice["logprobs"]["token_logprobs"][1:-1], choice["logprobs"]["top_logprobs"][1:-1]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert torch.allclose(torch.tensor(given).double(), scores[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0], atol=1e-4)
    assert torch.allclose(torch.tensor([max(top.values()) for top in likeliest]).double(), scores[:-1].amax(1), atol=1e-4)
    assert choice["text"].startswith(PROMPT)
    assert choice["logprobs"]["text_offset"][: len(ids)] == list(range(len(ids)))


def test_tokens_and_back(served: Served) -> None:
    said = served.post("/tokenize", prompt="h\u00e9llo").json()
    assert said["count"] == len(said["tokens"]) == 6
    assert said["max_model_len"] == 2048
    assert served.post("/detokenize", tokens=said["tokens"]).json() == {"prompt": "h\u00e9llo"}
    chat = served.post("/tokenize", messages=MESSAGES).json()["tokens"]
    assert served.post("/detokenize", tokens=chat).json()["prompt"] == "system: Be brief.\nuser: Hi!\nassistant:"


def test_what_the_server_says_of_itself(served: Served) -> None:
    assert [model.id for model in served.openai.models.list()] == ["tiny"]
    assert served.openai.models.retrieve("tiny").owned_by == "kvthaw"
    assert served.http.get("/health").status_code == 200
    assert served.http.get("/ready").json() == {"ready": True}
    assert served.http.get("/version").json() == {"version": __version__}
    assert "/v1/chat/completions" in served.http.get("/openapi.json").json()["paths"]


def test_no_tokens_and_echo_is_the_prompt_alone(served: Served) -> None:
    said = served.post("/v1/completions", prompt=["abc", "de"], max_tokens=0, echo=True, logprobs=1).json()
    assert [choice["text"] for choice in said["choices"]] == ["abc", "de"]
    assert [len(choice["logprobs"]["tokens"]) for choice in said["choices"]] == [3, 2]
    assert [choice["finish_reason"] for choice in said["choices"]] == ["length", "length"]
    details = {"cached_tokens": 0}
    assert said["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5, "prompt_tokens_details": details,
    }  # fmt: skip
