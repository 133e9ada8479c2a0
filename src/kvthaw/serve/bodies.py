"""Read bodies, and describe an error in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvthaw.cache.device_memory import uncollected
from kvthaw.serve.errors import ApiError, busy, client_left
from kvthaw.serve.fields import Body, names_within
from kvthaw.serve.lanes import FullError, Share
from kvthaw.serve.service import client_of

SMALL = 64 << 10
"""Bytes of a body that is read at once."""
PART = 0.1
"""The part of the time in which larger ones are received and read."""
RECEIVED = 4e-9
"""About the seconds that it takes to receive a byte."""
WAITING = 64
"""Most large bodies that wait."""
PIECE = 1 << 18
"""Bytes that an array has."""
_BEFORE = b",:[{"
"""The bytes before each value but the first, and before the end of an empty list or object."""
_OPENAIS = {
    "arguments", "audio", "best_of", "call_id", "context_management", "conversation", "detail", "encrypted_content", "file",
    "file_id", "function_call", "functions", "image_url", "input_audio", "max_tool_calls", "metadata", "modalities", "moderation",
    "output", "parallel_tool_calls", "prediction", "previous_response_id", "prompt", "prompt_cache_retention", "reasoning",
    "reasoning_effort", "refusal", "response_format", "service_tier", "store", "stream_options", "suffix", "summary", "text",
    "tool_call_id", "tool_calls", "tool_choice", "tools", "verbosity", "web_search_options",
}  # fmt: skip
"""Fields of OpenAI's API. None counts as a misspelling of another."""
_WORDS = dict.fromkeys(("model_attributes_type", "model_type", "dict_type"), "it must be an object")
"""Error messages that replace pydantic's."""
_FIRST = {"unknown_field": 0, "not_served": 1}
"""The errors that say most about what a client asks for, in their order."""


class BodyRoute(APIRoute):
    """A route whose bodies hold nothing but Unicode."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of requests."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            own = _Request(request.scope, request.receive)
            if own.method == "POST":
                try:
                    await own.read()
                except ClientDisconnect:
                    raise client_left() from None
                except FullError:
                    raise busy(f"{WAITING} large bodies wait") from None
            return await handle(own)

        return handler


class _Request(Request):
    _wrong: Exception | None = None  # with a large body

    async def read(self) -> None:
        """Read a large body in turn.

        Raises ApiError if it has too many values, and ClientDisconnect. Raises FullError if too many others wait. It does so
        before the body is received, if its length is known."""
        large: Share = self.app.state.large_bodies
        if large.full and int(self.headers.get("content-length", 0)) > SMALL:
            raise FullError
        text = await self.body()
        if len(text) <= SMALL:
            return
        if b"\0" in text:  # as UTF-16 and UTF-32 have, in which values would not be counted
            raise HTTPException(400, "the body is no JSON in UTF-8")
        async with large.turn(client_of(self), RECEIVED * len(text)):
            if await self.is_disconnected():
                raise ClientDisconnect
            if (values := count_values(text)) > (most := self.app.state.most_values):
                says = f"the body has {values:,} values; it may have {most:,}, and a text counts as one"
                raise ApiError(413, says, code="body_too_large")
            try:
                self._json = _read(text)
            except Exception as error:
                self._wrong = error

    async def json(self) -> Any:
        """Return the body; raises HTTPException for a text of it that has no UTF-8."""
        if self._wrong is not None:
            raise self._wrong
        if not hasattr(self, "_json"):
            self._json = _read(await self.body())
        return self._json


def large_bodies() -> Share:
    """Return the time of the interpreter in which bodies of more than SMALL bytes are read."""
    return Share(PART, WAITING)


def count_values(text: bytes) -> int:
    """Return at least as many as the values and names in a text of JSON, in UTF-8, are: about one more than that in correct JSON.
    Other threads run meanwhile."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")  # all other quotes begin or end a string
    found, inside = 1, 0
    for start in range(0, len(text), PIECE):
        codes = np.frombuffer(text, np.uint8, min(PIECE, len(text) - start), start)
        quotes = np.flatnonzero(codes == ord('"'))
        strings = np.arange(inside, inside + len(quotes) + 1) & 1  # every second part between quotes is a string
        outside = np.repeat(strings == 0, np.diff(quotes, prepend=0, append=len(codes)))
        before = np.zeros(len(codes), dtype=np.bool_)
        for code in _BEFORE:
            before |= codes == code
        found += int(np.count_nonzero(before & outside))
        inside = int(strings[-1])
    return found


def _read(text: bytes) -> Any:
    with uncollected():  # else millions of small values are looked through again and again
        said = json.loads(text)
    if b"\\ud" in text or b"\\uD" in text:  # JSON can write half of a surrogate pair in this way alone
        _check_unicode(said)
    return said


def _check_unicode(said: Any) -> None:
    if not _is_unicode(said):
        parts = [{name: value} for name, value in said.items()] if isinstance(said, dict) else []
        wrong = next((name for part in parts if not _is_unicode(part) for name in part if _is_unicode(name)), "the body")
        raise HTTPException(400, f"{wrong}: a text has half of a surrogate pair, which is no character")


def _is_unicode(said: Any) -> bool:
    try:
        json.dumps(said, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def invalid(error: RequestValidationError) -> ApiError:
    """Return an error that names the first wrong field without its value.

    Unknown fields come first, then fields that are not served, then others. An unknown field comes with the known
    field of a similar spelling."""
    first = min(error.errors(), key=lambda one: _FIRST.get(one["type"], len(_FIRST)))
    where = _path(first["loc"][1:], error.body, whole=first["type"] == "missing")
    says = _WORDS.get(first["type"], first["msg"])
    if first["type"] == "unknown_field":
        name, near = first["ctx"]["name"], first["ctx"]["near"]
        where.append(name)
        says = "is not served" + (f"; {near}" if near and name not in _OPENAIS | names_within(Body) else "")
    if first["type"] == "json_invalid" or not where:
        return ApiError(400, "the body is not a JSON object with Content-Type: application/json")
    if first["type"] == "union_tag_invalid":
        where.append(first["ctx"]["discriminator"].strip("'"))
        says = f"it must be one of {first['ctx']['expected_tags']}"
    return ApiError(400, f"{'.'.join(where)}: {says}", param=where[0])


def _path(loc: Sequence[int | str], body: Any, *, whole: bool) -> list[str]:
    """Return the path of an error in a body: the parts of its location that the body has, and a missing field at its end.
    Other parts name alternatives of a field with several types."""
    where: list[str] = []
    for place, part in enumerate(loc):
        inside = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if inside:
            body = body[part]
        if inside or (whole and place == len(loc) - 1) or not place:
            where.append(str(part))
    return where
