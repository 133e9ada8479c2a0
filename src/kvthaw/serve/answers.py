"""Answers in OpenAI's shapes. Completions are whole or in chunks; responses are one object, or events named by their types."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.text import decode
from kvthaw.engine.token_bytes import Offsets, TokenBytes
from kvthaw.engine.tool_calls import CallPiece, CallReader
from kvthaw.serve.errors import ApiError
from kvthaw.serve.jobs import Delta
from kvthaw.serve.schema import ChatRequest, CompletionRequest, ResponsesRequest

Json = dict[str, Any]
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_TEXT = "\0"  # placeholder for the text of an event
_ENDED = ApiError(500, "the server ended before the answer did", code="server_error")

IMPOSSIBLE = -9999.0
"""The log-probability of tokens that cannot come; JSON knows no infinity."""
_PIECE = 256
"""Items of a list that are written at once; other threads run between two pieces."""
_LISTS = 8
"""How deep lists of log-probabilities lie in an answer."""


def _json(value: Json | str) -> bytes:
    return _ENCODER.encode(value).encode()


def written(answer: Json) -> bytes:
    """Return a whole answer as JSON. Other threads run between pieces of its long lists."""
    return "".join(_pieces(answer, _LISTS)).encode()


def _pieces(value: Any, depth: int) -> Iterator[str]:
    if depth and isinstance(value, dict) and value:
        for i, (name, one) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_ENCODER.encode(name)}:"
            yield from _pieces(one, depth - 1)
        yield "}"
    elif depth and isinstance(value, list) and 0 < len(value) <= _PIECE:
        for i, one in enumerate(value):
            yield "," if i else "["
            yield from _pieces(one, depth - 1)
        yield "]"
    elif isinstance(value, list) and value:
        for start in range(0, len(value), _PIECE):
            yield ("," if start else "[") + _ENCODER.encode(value[start : start + _PIECE])[1:-1]
        yield "]"
    else:
        yield _ENCODER.encode(value)


def scores_in(deltas: Sequence[Delta]) -> int:
    """Return the number of tokens with log-probabilities in deltas."""
    return sum(len(delta.logprobs) + len(delta.prompt_logprobs) for delta in deltas)


class Answer:
    """The outputs of a request in the client's format: one JSON object, or the events of a stream.

    body: the request, of the schema's class for its kind.
    prompts: token ids.
    """

    prefix = param = ""
    """The beginning of its id, and the field of the prompts in the request."""
    ending = b""
    """Bytes at the end of a stream."""
    warning: str | None = None
    """A warning for the client at the end."""
    reader: Callable[[], CallReader] | None = None
    """Makes what reads the tool calls of an output; None without tools."""

    def __init__(self, body: Any, prompts: Sequence[Sequence[int]], tokenizer: Any, model: str) -> None:
        self.id, self.created, self.model = f"{self.prefix}{uuid.uuid4().hex}", int(time.time()), model
        self._body, self._prompts, self._tokenizer, self._outputs = body, prompts, tokenizer, body.outputs
        self._bytes = TokenBytes(tokenizer)
        self._new = 0  # tokens generated
        self._cached = [0] * len(prompts)  # tokens of each prompt that its first output found in the prefix cache

    def opening(self) -> list[Json]:
        """Return the events that come before any token."""
        return []

    def parts(self, delta: Delta) -> list[Json]:
        """Return the events of a delta, none for an empty one, and count its tokens."""
        raise NotImplementedError

    def closing(self) -> list[Json]:
        """Return the events that come after all tokens."""
        return []

    @property
    def repeats(self) -> int:
        """How many tokens' log-probabilities these events repeat."""
        return 0

    def failed(self, error: ApiError) -> Json:
        """Return the event that ends a stream with an error."""
        return error.body()

    def whole(self, outputs: Sequence[Delta]) -> Json:
        """Return the answer to a request without streaming."""
        raise NotImplementedError

    def added(self, deltas: Sequence[Delta]) -> bytes:
        """Return the encoded events of deltas, and count their tokens."""
        return b"".join(map(self._added, deltas))

    def _added(self, delta: Delta) -> bytes:
        return self.encode(self.parts(delta))

    def encode(self, events: Sequence[Json]) -> bytes:
        """Return encoded events."""
        return b"".join(b"data: " + _json(event) + b"\n\n" for event in events)

    @property
    def _told(self) -> Json:
        return {} if self.warning is None else {"warning": self.warning}

    def _count(self, delta: Delta) -> None:
        self._new += len(delta.tokens)
        if delta.index % self._outputs == 0:
            self._cached[delta.index // self._outputs] += delta.cached_tokens

    def _scores(self, scores: Sequence[TokenLogprobs]) -> list[Json]:
        """Return log-probabilities of tokens, each with the likeliest ones."""
        return [
            self._token(one.token, one.logprob) | {"top_logprobs": [self._token(*likely) for likely in one.top]}
            for one in scores
        ]

    def _token(self, token: int, logprob: float) -> Json:
        known = self._bytes
        return {"token": known.text(token), "logprob": max(logprob, IMPOSSIBLE), "bytes": list(known.of(token))}


class Completion(Answer):
    """What chat completions and completions of texts share."""

    _body: ChatRequest | CompletionRequest
    kind = chunk_kind = ""
    ending = b"data: [DONE]\n\n"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._head = {"id": self.id, "created": self.created, "model": self.model}
        # By output, the bytes before and after the text in its events after the first.
        self._around: dict[int, list[bytes]] = {}

    def _added(self, delta: Delta) -> bytes:
        around = self._around.get(delta.index)
        if around is not None and not (delta.logprobs or delta.finished):
            self._count(delta)
            return _json(delta.text).join(around) if delta.text else b""
        sent = super()._added(delta)
        options = self._body.stream_options
        if (
            sent
            and self.reader is None
            and delta.index not in self._around
            and (options is None or not options.continuous_usage_stats)
        ):
            event = self.encode([self._chunk(self._choice(Delta(delta.index, text=_TEXT), whole=False))])
            self._around[delta.index] = event.split(_json(_TEXT))
        return sent

    def parts(self, delta: Delta) -> list[Json]:
        delta = self._kept(delta)
        self._count(delta)
        said = delta.text or delta.calls or delta.logprobs or delta.finished or delta.prompt_logprobs
        return [self._chunk(self._choice(delta, whole=False))] if said else []

    def closing(self) -> list[Json]:
        options = self._body.stream_options
        return [self._chunk(None) | self._told] if self._told or (options is not None and options.include_usage) else []

    def whole(self, outputs: Sequence[Delta]) -> Json:
        outputs = [self._kept(delta) for delta in outputs]
        for delta in outputs:
            self._count(delta)
        choices = [self._choice(delta, whole=True) for delta in outputs]
        return self._head | {"object": self.kind, "choices": choices, "usage": self._usage()} | self._told

    def _chunk(self, choice: Json | None) -> Json:
        """Return a chunk of a stream; without a choice the last one, which has the usage alone."""
        options = self._body.stream_options
        chunk: Json = self._head | {"object": self.chunk_kind, "choices": [choice] if choice else []}
        if options is not None and (options.include_usage or options.continuous_usage_stats):
            chunk["usage"] = self._usage() if choice is None or options.continuous_usage_stats else None
        return chunk

    def _usage(self) -> Json:
        """Return how many tokens there are; a prompt counts once however many outputs it has."""
        prompt = sum(map(len, self._prompts))
        counts = {"prompt_tokens": prompt, "completion_tokens": self._new, "total_tokens": prompt + self._new}
        return counts | {"prompt_tokens_details": {"cached_tokens": sum(self._cached)}}

    def _kept(self, delta: Delta) -> Delta:
        """Return a delta without unrequested tokens: the scheduler generates a token even for max_tokens=0."""
        if self._body.max_tokens != 0:
            return delta
        return replace(
            delta, tokens=(), text="", logprobs=(), finished="length" if delta.finished == "stop" else delta.finished
        )

    def _choice(self, delta: Delta, *, whole: bool) -> Json:
        raise NotImplementedError


class ChatAnswer(Completion):
    """Of /v1/chat/completions."""

    kind, chunk_kind, prefix, param = "chat.completion", "chat.completion.chunk", "chatcmpl-", "messages"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._readers = dict[int, CallReader]()  # by output

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(self._outputs)]
        return [self._chunk(choice) for choice in choices]

    def _kept(self, delta: Delta) -> Delta:
        """Return a delta whose calls are apart from its text."""
        delta = super()._kept(delta)
        if self.reader is None:
            return delta
        if delta.index not in self._readers:
            self._readers[delta.index] = self.reader()
        reader = self._readers[delta.index]
        text, calls = reader.push(delta.text, last=delta.finished is not None)
        finished = "tool_calls" if reader.calls and delta.finished == "stop" else delta.finished
        return replace(delta, text=text, calls=calls, finished=finished)

    def _choice(self, delta: Delta, *, whole: bool) -> Json:
        logprobs = {"content": self._scores(delta.logprobs)} if delta.logprobs else None
        said: Json = {"content": delta.text} if delta.text or whole else {}
        if delta.calls and whole:
            said = {"content": delta.text or None, "tool_calls": _joined(delta.calls)}
        elif delta.calls:
            said |= {"tool_calls": [{"index": piece.index} | _call(piece) for piece in delta.calls]}
        said = {"message": {"role": "assistant", **said}} if whole else {"delta": said}
        return {"index": delta.index, **said, "logprobs": logprobs, "finish_reason": delta.finished}


def _call(piece: CallPiece) -> Json:
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    name = secrets.token_hex(5)[:9]  # some templates of Mistral take no other length
    return {"id": name, "type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}


def _joined(pieces: Sequence[CallPiece]) -> list[Json]:
    """Return whole calls."""
    calls = list[Json]()
    for piece in pieces:
        if piece.name is not None:
            calls.append(_call(piece))
        else:
            calls[piece.index]["function"]["arguments"] += piece.arguments
    return calls


class CompletionAnswer(Completion):
    """Of /v1/completions. With echo the prompt comes with an output's first tokens."""

    _body: CompletionRequest

    kind, chunk_kind, prefix, param = "text_completion", "text_completion", "cmpl-", "prompt"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._begun = set[int]()  # outputs with a sent event
        self._offsets: dict[int, Offsets] = {}  # by output

    def _choice(self, delta: Delta, *, whole: bool) -> Json:
        text, scores, first = delta.text, list[TokenLogprobs | None](delta.logprobs), delta.index not in self._begun
        prompt = self._prompts[delta.index // self._outputs] if first and self._body.echo else []
        if prompt:
            text = decode(self._tokenizer, prompt, special=False) + text
            scores = [*delta.prompt_logprobs, *scores]
        self._begun.add(delta.index)
        logprobs: Json | None = None
        if scores:
            tokens = [one.token if one is not None else prompt[0] for one in scores]
            logprobs = {
                "tokens": [self._bytes.text(token) for token in tokens],
                "token_logprobs": [None if one is None else max(one.logprob, IMPOSSIBLE) for one in scores],
                "top_logprobs": [None if one is None else self._top(one) for one in scores],
                "text_offset": self._places(delta.index, tokens, prompt),
            }
        return {"index": delta.index, "text": text, "logprobs": logprobs, "finish_reason": delta.finished}

    def _places(self, index: int, tokens: Sequence[int], echoed: Sequence[int]) -> list[int]:
        """Return the text offsets of an output's next tokens. The first ones are echoed prompt tokens."""
        after = [] if self._body.echo else self._prompts[index // self._outputs]
        offsets = self._offsets.setdefault(index, Offsets(self._tokenizer, self._bytes, after))
        found = [offsets.push(token) for token in tokens[: len(echoed)]]
        if echoed:
            offsets.begin()
        return [*found, *(offsets.push(token) for token in tokens[len(echoed) :])]

    def _top(self, score: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and of the token itself, by text. Tokens with the same text are
        listed by id."""
        text = self._bytes.text
        names = {score.token: text(score.token)}
        for token, _ in score.top:
            name = text(token)
            names.setdefault(token, f"token_id:{token}" if name in names.values() else name)
        return {names[token]: max(logprob, IMPOSSIBLE) for token, logprob in (*score.top, (score.token, score.logprob))}


_ECHOED = {
    *("instructions", "max_output_tokens", "temperature", "top_p", "text", "metadata", "user"),
    *("background", "store", "truncation"),
}
"""Fields of a request that a response repeats."""


class ResponseAnswer(Answer):
    """Of /v1/responses: one message of one text."""

    _body: ResponsesRequest

    prefix, param = "resp_", "input"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._message_id = f"msg_{uuid.uuid4().hex}"
        self._said, self._logprobs = "", list[Json]()
        self._finished: str | None = None
        self._sent = 0  # events

    def opening(self) -> list[Json]:
        response = self._response("in_progress")
        item = self._message("in_progress") | {"content": []}
        return [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.content_part.added", **self._place, "part": self._part()},
        ]

    def parts(self, delta: Delta) -> list[Json]:
        before = len(self._logprobs)
        self._take(delta)
        if not (delta.text or self._logprobs[before:]):
            return []
        said = {"delta": delta.text, "logprobs": self._logprobs[before:]}
        return [{"type": "response.output_text.delta", **self._place, **said}]

    def closing(self) -> list[Json]:
        response = self._response(self._status)
        said = {"text": self._said, "logprobs": self._logprobs}
        return [
            {"type": "response.output_text.done", **self._place, **said},
            {"type": "response.content_part.done", **self._place, "part": self._part()},
            {"type": "response.output_item.done", "output_index": 0, "item": response["output"][0]},
            {"type": f"response.{self._status}", "response": response},
        ]

    @property
    def repeats(self) -> int:
        return 4 * len(self._logprobs)

    def failed(self, error: ApiError) -> Json:
        return {"type": "response.failed", "response": self._response("failed", error)}

    def whole(self, outputs: Sequence[Delta]) -> Json:
        self._take(outputs[0])
        return self._response(self._status)

    def encode(self, events: Sequence[Json]) -> bytes:
        sent = b""
        for event in events:
            sent += f"event: {event['type']}\n".encode() + super().encode([event | {"sequence_number": self._sent}])
            self._sent += 1
        return sent

    def _take(self, delta: Delta) -> None:
        self._count(delta)
        self._said += delta.text
        self._logprobs += self._scores(delta.logprobs)
        self._finished = delta.finished or self._finished

    @property
    def _status(self) -> str:
        """The final one."""
        return {"length": "incomplete", "abort": "failed"}.get(self._finished or "", "completed")

    @property
    def _place(self) -> Json:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _part(self) -> Json:
        return {"type": "output_text", "text": self._said, "annotations": [], "logprobs": self._logprobs}

    def _message(self, status: str) -> Json:
        return {"id": self._message_id, "type": "message", "role": "assistant", "status": status, "content": [self._part()]}

    def _response(self, status: str, error: ApiError | None = None) -> Json:
        body, ended = self._body, status != "in_progress"
        error = _ENDED if status == "failed" and error is None else error
        output = [self._message("completed" if status == "completed" else "incomplete")] if ended else []
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "status": status,
            "error": None if error is None else {"code": "server_error", "message": str(error)},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": self._usage() if ended else None,
            **body.model_dump(by_alias=True, include=_ECHOED),
            "top_logprobs": body.top_logprobs or 0,
            "previous_response_id": None,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
        } | self._told

    def _usage(self) -> Json:
        (prompt,) = self._prompts
        return {
            "input_tokens": len(prompt),
            "input_tokens_details": {"cached_tokens": sum(self._cached), "cache_write_tokens": 0},
            "output_tokens": self._new,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(prompt) + self._new,
        }
