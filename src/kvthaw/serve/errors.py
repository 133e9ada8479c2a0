"""Errors in the format of OpenAI's API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from kvthaw.cache.prefix_kept import NotKeptError
from kvthaw.errors import ConfigError, HostMemoryError, TooLongError
from kvthaw.formatting import counted


class ErrorDetail(BaseModel):
    """The message, its kind, and the wrong field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "the request cannot be served"},
    "5XX": {"model": ErrorBody, "description": "the server cannot serve it"},
}
"""Their OpenAPI description."""


class ApiError(Exception):
    """An error response.

    param: the wrong field.
    headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    def body(self) -> dict[str, Any]:
        """Return OpenAI's JSON object."""
        kind = {429: "rate_limit_error"}.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the response for the client."""
        return JSONResponse(self.body(), self.status, headers=self.headers)


def too_long(error: TooLongError, param: str) -> ApiError:
    """Return the error for a prompt that leaves no room for the new tokens."""
    has, most = counted(error.tokens, "token"), counted(error.room, "token")
    message = f"the prompt has {has}, and {error.wanted or 1:,} more may follow; the context length of this server is {most}"
    return ApiError(400, message, param=param, code="context_length_exceeded")


def client_left() -> ApiError:
    """Return the error for a request whose client no longer waits."""
    return ApiError(499, "the client has left", code="client_left")


def busy(message: str, seconds: int = 1) -> ApiError:
    """Return the error for a request that finds too many others waiting, and may come again after a number of seconds."""
    return ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def shutting_down() -> ApiError:
    """Return the error for a request that comes too late."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})


def as_api_error(error: Exception, name: str = "kv_name") -> ApiError:
    """Convert an exception for the client. Only exceptions about its own request keep their message.

    name: the field that names the prompt to keep.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        return ApiError(400, str(error))
    if isinstance(error, NotKeptError):
        return ApiError(400, str(error), param=name, code="context_not_kept")
    if isinstance(error, HostMemoryError):
        return ApiError(503, "the server has too little memory for this request", code="out_of_memory")
    return ApiError(500, "the model failed on this request", code="internal_error")
