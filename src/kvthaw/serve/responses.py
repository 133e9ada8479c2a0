"""Answers of OpenAI's Responses API: one object, or events that are named by their types."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from kvthaw.serve.answers import Answer, Json
from kvthaw.serve.errors import ApiError
from kvthaw.serve.jobs import Delta
from kvthaw.serve.schema import ResponsesRequest

_ENDED = ApiError(500, "the server ended before the answer did", code="server_error")


class ResponseAnswer(Answer):
    """Of /v1/responses: one message of one text."""

    prefix, param = "resp_", "input"

    def __init__(self, body: ResponsesRequest, prompts: Sequence[Sequence[int]], tokenizer: Any, model: str) -> None:
        super().__init__(body, prompts, tokenizer, model)
        self._body, self._message_id = body, f"msg_{uuid.uuid4().hex}"
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

    def _token(self, token: int, logprob: float) -> Json:
        found = super()._token(token, logprob)
        return found | {"bytes": found["bytes"] or []}  # never null here

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
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
            "text": body.text.model_dump(by_alias=True),
            "metadata": body.metadata,
            "user": body.user,
            "previous_response_id": None,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "background": body.background,
            "store": body.store,
            "truncation": body.truncation,
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
