"""A line in the log for each request: the request, its status, and its tokens and times. It has no text of prompts or answers."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvthaw.formatting import counted, seconds
from kvthaw.serve.guard import OPEN_PATHS
from kvthaw.serve.jobs import Job

_log = logging.getLogger(__name__)
QUIET = (*OPEN_PATHS, "/metrics", "/version")
"""Paths that browsers and probes request; their lines are for debugging, and so are lines of recalls, which the page polls."""


class RequestLog:
    """Logs each request once it is answered. Routes put its job, or its error, into the state of the request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            polled = scope["method"] == "GET" and scope["path"].startswith("/v1/recalls/")
            quiet = (scope["path"] in QUIET or polled) and status < 400
            level = logging.WARNING if status >= 500 else logging.DEBUG if quiet else logging.INFO
            state, client = scope.get("state", {}), (scope.get("client") or "-")[0]
            said = [state["error"]] if "error" in state else [told(state["job"], state["outputs"])] if "job" in state else []
            path = scope.get("raw_path", b"").decode("ascii", "replace")  # as it came, without line breaks
            line = f"{client} {scope['method']} {path} {status or 'unanswered'} {seconds(time.perf_counter() - start)}"
            _log.log(level, "%s", _printable(": ".join([line, *said])))


def told(job: Job, outputs: int) -> str:
    """Return a text with the tokens and times of a job with `outputs` outputs of each prompt."""
    prompts = job.requests[::outputs]
    prompt, cached = sum(one.prompt for one in prompts), sum(one.cached_tokens for one in prompts)
    new = sum(len(one.tokens) for one in job.requests)
    first = f", first after {seconds(job.first - job.arrived)}" if job.first else ""
    ends = ", ".join(sorted({one.finished or ("abort" if job.aborted else "left") for one in job.requests}))
    return f"{counted(prompt, 'prompt token')}, {cached:,} cached; {new:,} new{first}; {ends}"


def _printable(text: str) -> str:
    """Return a client's text as one printable line."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:500]
