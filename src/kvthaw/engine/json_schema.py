"""The part of JSON Schema that a grammar can meet to the letter. The rest is refused, for a grammar would pass over it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from kvthaw.errors import ConfigError

MOST_BYTES = 16 << 10
"""Of a schema."""
MOST_MEMBERS = 128
"""Properties of an object."""
MOST_COUNT = 4096
"""The largest number of items or characters that may be asked for."""
_DEEPEST = 16
_SAYS_NOTHING = {
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
}
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_KEYWORDS = {
    "$ref": set[str](),
    "anyOf": set[str](),
    "enum": {"type"},
    "const": {"type"},
    "type": {
        "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
        "minLength", "maxLength", "pattern", "format", "multipleOf", *_RANGE,
    },
}  # fmt: skip
"""By the keyword that decides what a schema is, the first of these that it has: those that may stand beside it."""
_ALONE = {"pattern": {"minLength", "maxLength", "format"}, "format": {"minLength", "maxLength"}, "multipleOf": _RANGE}
_FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}


def check_schema(schema: Any) -> None:
    """Raise ConfigError unless a grammar meets all that a schema says."""
    if not isinstance(schema, dict):
        raise ConfigError("json_schema is no object; its schema must be one")
    if len(json.dumps(schema)) > MOST_BYTES:
        raise ConfigError(f"json_schema has more than {MOST_BYTES} bytes")
    _check(schema, "schema", 0)


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema: {where} must be a schema")
    if depth > _DEEPEST:
        raise ConfigError(f"json_schema: schemas are nested more than {_DEEPEST} deep")
    kind = next((keyword for keyword in _KEYWORDS if keyword in schema), None)
    served = {kind, *(_KEYWORDS[kind] if kind else ())} | _SAYS_NOTHING
    for keyword in schema:
        if keyword not in served:
            raise ConfigError(
                f"json_schema: {where}.{keyword} is not served" + (f" beside {kind}" if kind else " without a type")
            )
        if other := _ALONE.get(keyword, set()) & schema.keys():
            raise ConfigError(f"json_schema: {where}.{keyword} is not served beside {sorted(other)[0]}")
    for problem in _problems(schema):
        raise ConfigError(f"json_schema: {where}.{problem}")
    for name, inner in _inner(schema):
        _check(inner, f"{where}.{name}", depth + 1)


def _problems(schema: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the values of keywords."""
    properties, pattern = schema.get("properties", {}), schema.get("pattern", "")
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield "$ref must be within the schema"
    if not isinstance(properties, dict) or len(properties) > MOST_MEMBERS:
        yield f"properties must be an object of at most {MOST_MEMBERS} schemas"
    elif set(map(str, schema.get("required", ()))) - properties.keys():
        yield "required names what properties does not"
    if schema.get("format", "date") not in _FORMATS:
        yield f"format must be one of {', '.join(sorted(_FORMATS))}"
    if not isinstance(pattern, str) or re.search(r'"|\\[\\xuc]|\(\?(?!:)', pattern):
        yield "pattern must be a regular expression without quotes, backslashes, character codes and looking ahead or back"
    if "multipleOf" in schema and schema.get("type") != "integer":
        yield "multipleOf is served for integers alone"
    for name in ("minItems", "maxItems", "minLength", "maxLength"):
        value = schema.get(name, 0)
        if not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
            yield f"{name} must be a whole number from 0 to {MOST_COUNT}"


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas within a schema, by name."""
    for keyword in ("properties", "$defs", "definitions"):
        members = schema.get(keyword, {})
        yield from ((f"{keyword}.{name}", inner) for name, inner in members.items()) if isinstance(members, dict) else ()
    for keyword in ("anyOf", "prefixItems"):
        listed = schema.get(keyword, [])
        yield from ((f"{keyword}.{i}", inner) for i, inner in enumerate(listed)) if isinstance(listed, list) else ()
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield keyword, schema[keyword]
