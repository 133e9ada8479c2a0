"""Parts of request bodies: objects without unknown fields, and field types with bounded lengths.

A wrong body of any length produces few errors: checks end at the first wrong item of a list and the first unknown field.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_plain_validator_function

from kvthaw.errors import hint
from kvthaw.names import NAME

MOST_PROMPTS = 4096
"""Of a request, which has no more messages either."""
MOST_PARTS = 256
"""Of a message."""
MOST_STOPS = 16
"""Stop strings; each of their characters is looked for in every piece of text."""
MOST_STOP_LENGTH = 128
"""Characters of a stop string."""
MOST_TOKENS = 1 << 22
"""Of a list."""
MOST_TOKEN_RULES = 512
"""Tokens that end an output or get a bias."""

Count = Annotated[int, Field(ge=0, lt=1 << 31)]
Token = Count
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MOST_TOKENS, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Short = Annotated[str, Field(max_length=4096)]
Name = Annotated[str, Field(pattern=f"^{NAME}$")]
"""Of a context."""


def few(most: int) -> BeforeValidator:
    """Reject an object with more members before checking any of them, because each could be an error."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise PydanticCustomError("too_long", f"it has {len(value)} members; it may have at most {most}")
        return value

    return BeforeValidator(check)


class Only:
    """Marks a field that is not served: it takes these values, which ask for nothing.

    instead: what to do, for the error.
    """

    def __init__(self, *values: Any, instead: str = "") -> None:
        self._values, self._instead = values, f"; {instead}" if instead else ""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._values)}

    def _check(self, value: Any) -> Any:
        if isinstance(value, dict):
            value = {name: one for name, one in value.items() if one is not None}  # as in every object
        if not any(type(value) is type(one) and value == one for one in self._values):
            allowed = " or ".join(map(json.dumps, self._values))
            raise PydanticCustomError(
                "not_served", "{words}", {"words": f"is not served; it may be left out, or be {allowed}{self._instead}"}
            )
        return value


def shape(value: Any) -> str | None:
    """Return the type by which to check a value of a field that takes a text or a list; None if it is neither."""
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else None


def _kind(prompt: Any) -> str | None:
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    if not isinstance(prompt, list):
        return shape(prompt)
    return "list of tokens" if isinstance(first, list) else "list of texts" if isinstance(first, str) else "tokens"


def either(measured: Callable[[Any], str | None], says: str) -> Discriminator:
    """Return the discriminator of a union: the function that names a value's type, and the error message for other values."""
    return Discriminator(measured, custom_error_type="kind", custom_error_message=says)


A = TypeVar("A")
B = TypeVar("B")
TextOrList = Annotated[Annotated[A, Tag("text")] | Annotated[B, Tag("list")], either(shape, "it must be a string or a list")]
Several = Annotated[list[A], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Several[Text], Tag("list of texts")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Several[Tokens], Tag("list of tokens")],
    either(_kind, "it must be a string, token ids, or a list of either"),
]


def _nullable(schema: dict[str, Any]) -> None:
    """Mark optional fields as nullable in the OpenAPI description."""
    properties = schema.get("properties", {})
    for name in properties.keys() - schema.get("required", []):
        if {"type": "null"} not in properties[name].get("anyOf", []):
            properties[name] = {"anyOf": [properties[name], {"type": "null"}]}


class Body(BaseModel):
    """A JSON object without unknown fields. A null field counts as omitted."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """Remove null fields. Raises for the first unknown field, with a known one of a similar spelling."""
        if not isinstance(data, dict):
            return data
        known = cls.names()
        given = {name: value for name, value in data.items() if value is not None}
        if (unknown := next((name for name in given if name not in known), None)) is not None:
            near = {"name": unknown[:64], "near": hint(unknown[:64], known)}
            raise PydanticCustomError("unknown_field", "{name} is not served", near)
        return given

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of its fields."""
        return {field.alias or name for name, field in cls.model_fields.items()}


def names_within(kind: type[Body]) -> set[str]:
    """Return the names of the fields of a kind of object, and of all kinds that extend it."""
    return kind.names().union(*map(names_within, kind.__subclasses__()))
