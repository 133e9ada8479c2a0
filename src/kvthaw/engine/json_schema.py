"""The part of JSON Schema that a grammar can enforce. Other keywords are refused, because a grammar would ignore them.

All served keywords are enforced exactly, except that formats are enforced only by shape: a date may be February 31st.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kvthaw.engine.pattern import MOST_COUNT as MOST_PATTERN_COUNT
from kvthaw.engine.pattern import anchored, cost, plain, without_characters
from kvthaw.errors import ConfigError

MOST_BYTES = 16 << 10
"""Most bytes of a schema."""
MOST_MEMBERS = 128
"""Most properties of an object."""
MOST_COUNT = 4096
"""The largest count of items or characters."""
MOST_COUNTED = 4 * MOST_COUNT
"""Most of the sum of these counts in a schema."""
MOST_CHARACTERS = 256
"""Most characters of a pattern, with its counts written out."""
MOST_PATTERN = 4096
"""Most characters of a pattern as written."""
MOST_MULTIPLE = 1024
"""The largest multipleOf. The compiler ignores larger ones."""
_COUNTED = 128
"""The largest count of characters whose states xgrammar shares among all counted strings of a schema."""
_COUNTED_APART = 192  # passes of a larger count
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
"""Keywords that may accompany each keyword. The first of these keywords that a schema has decides its kind."""
_SERVED = _KEYWORDS.keys() | {keyword for others in _KEYWORDS.values() for keyword in others}
_ALONE = {"pattern": {"minLength", "maxLength", "format"}, "format": {"minLength", "maxLength"}, "multipleOf": _RANGE}
_COMBINE = {"oneOf", "allOf", "not", "if"}
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_TYPES = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "object": dict, "array": list,
}  # fmt: skip
_FORMATS = {"date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}


def check_schema(schema: Any) -> float:
    """Raise ConfigError unless a grammar can enforce the whole schema and some value satisfies it.

    Returns the passes over the vocabulary that compiling takes: one for each state and transition of a string of any
    characters.
    """
    if not isinstance(schema, dict):
        raise ConfigError("json_schema is no object; its schema must be one")
    try:
        size = len(json.dumps(schema, allow_nan=False))
    except (RecursionError, ValueError):
        raise ConfigError("json_schema is nested too deep or has numbers that are not finite") from None
    if size > MOST_BYTES:
        raise ConfigError(f"json_schema has more than {MOST_BYTES} bytes")
    _check(schema, "schema", 0)
    schemas = list(_all(schema))
    for ref in (one["$ref"] for one in schemas if "$ref" in one):
        if isinstance(found := _resolved(schema, ref), dict) and all(found is not one for one in schemas):
            raise ConfigError(f"json_schema: $ref is {ref!r}, which is no schema within the schema")
    counted = sum(max(0, *(one.get(name, 0) for name in _COUNTS)) for one in schemas)
    if counted > MOST_COUNTED:
        raise ConfigError(f"json_schema counts {counted} items and characters in all; it may count at most {MOST_COUNTED}")
    if (multiples := sum(one.get("multipleOf", 0) for one in schemas)) > MOST_MULTIPLE:
        raise ConfigError(f"json_schema has multipleOf of {multiples} in all; they may come to {MOST_MULTIPLE}")
    if not _can_end(schema, schemas):
        raise ConfigError("json_schema cannot be met: what it describes has no end")
    return _passes(schemas)


def plain_patterns(schema: Any) -> Any:
    """Return a checked schema with patterns as xgrammar follows them; see `pattern.plain`."""
    schema = copy.deepcopy(schema)
    for one in _all(schema):
        if "pattern" in one:
            one["pattern"] = plain(one["pattern"])
    return schema


def _passes(schemas: Sequence[dict[str, Any]]) -> float:
    lengths: list[int] = [max(one.get("minLength", 0), one.get("maxLength", 0)) for one in schemas]
    shared = max([0, *(length for length in lengths if length <= _COUNTED)])
    passes: float = (
        shared
        + _COUNTED_APART * sum(length > _COUNTED for length in lengths)
        + sum(float(cost(one["pattern"]).passes) for one in schemas if "pattern" in one)
        + sum(4 * ("format" in one) + one.get("multipleOf", 0) / 16 + 0.1 for one in schemas)
    )
    return passes


def _check(schema: Any, where: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ConfigError(f"json_schema: {where} must be a schema")
    if depth > _DEEPEST:
        raise ConfigError(f"json_schema: schemas are nested more than {_DEEPEST} deep")
    kind = next((keyword for keyword in _KEYWORDS if keyword in schema), None)
    served = {kind, *(_KEYWORDS[kind] if kind else ())} | _SAYS_NOTHING
    # other keywords may only be wrong together with these
    for keyword in sorted(schema, key=lambda keyword: keyword not in _COMBINE):
        if keyword not in served:
            says = f" together with {kind}" if kind else " without a type"
            says = says if keyword in _SERVED else ""
            says += "; anyOf is" if keyword == "oneOf" else ""
            raise ConfigError(f"json_schema: {where}.{keyword} is not served{says}")
        if other := _ALONE.get(keyword, set()) & schema.keys():
            raise ConfigError(f"json_schema: {where}.{keyword} is not served together with {sorted(other)[0]}")
    for problem in _problems(schema):
        raise ConfigError(f"json_schema: {where}.{problem}")
    for name, inner in _inner(schema):
        _check(inner, f"{where}.{name}", depth + 1)


def _problems(schema: dict[str, Any]) -> Iterator[str]:
    """Yield problems with the values of keywords."""
    properties, pattern = schema.get("properties", {}), schema.get("pattern", "")
    required, kinds = schema.get("required", []), schema.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield "$ref must be within the schema"
    if not isinstance(properties, dict) or len(properties) > MOST_MEMBERS:
        yield f"properties must be an object of at most {MOST_MEMBERS} schemas"
    elif not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        yield "required must be a list of names"
    elif set(required) - properties.keys():
        yield "required names what properties does not"
    if schema.get("format", "date") not in sorted(_FORMATS):
        yield f"format must be one of {', '.join(sorted(_FORMATS))}"
    if not isinstance(pattern, str) or re.search(r'"|\\[\\xuc]|(?<!\\)\(\?(?!:)', pattern):
        yield "pattern must be a regular expression without quotes, backslashes, character codes and looking ahead or back"
    elif anchored(pattern.removeprefix("^").removesuffix("$")):
        yield "pattern has an anchor that is not at its beginning or end"
    elif (dead := without_characters(pattern[:MOST_PATTERN])) is not None:
        yield f"pattern has {dead[:64]!r}, which matches no character that JSON writes as itself"
    elif len(pattern) > MOST_PATTERN or (found := cost(pattern)).size > MOST_CHARACTERS:
        yield f"pattern has more than {MOST_CHARACTERS} characters, once its counts are written out"
    elif found.count > MOST_PATTERN_COUNT:
        yield f"pattern has a count of {found.count}; counts are served up to {MOST_PATTERN_COUNT}"
    if "multipleOf" in schema and kinds != ["integer"]:
        yield "multipleOf is served for integers alone"
    multiple = schema.get("multipleOf", 1)
    if isinstance(multiple, bool) or not isinstance(multiple, int) or not 1 <= multiple <= MOST_MULTIPLE:
        yield f"multipleOf must be a whole number from 1 to {MOST_MULTIPLE}"
    if "type" in schema and not (kinds and all(kind in list(_TYPES) for kind in kinds)):
        yield f"type is {json.dumps(schema['type'])[:64]}; it must be of {', '.join(_TYPES)}"
        return
    for name in _COUNTS:
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
            yield f"{name} must be a whole number from 0 to {MOST_COUNT}"
    for name in sorted(_RANGE):
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{name} must be a number"
        elif "integer" in kinds and not (value == int(value) and abs(value) < 1 << 63):
            yield f"{name} of an integer must be a whole number within 64 bits"
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(listed, list):
        yield "enum must be a list"
    for value in listed:
        if any(abs(number) >= 1 << 63 for number in _whole_numbers(value)):
            yield f"{'enum' if 'enum' in schema else 'const'} has a whole number beyond 64 bits"
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            yield f"{'enum' if 'enum' in schema else 'const'} has a value that is not of its type, {kinds[0]}"


def _is_of(value: Any, kind: str) -> bool:
    found = _TYPES[kind]
    return isinstance(value, found) and (found is bool or not isinstance(value, bool))


def _whole_numbers(value: Any) -> Iterator[int]:
    """Yield the integers within a value."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, int) and not isinstance(value, bool):
            yield value
        left += value if isinstance(value, list) else value.values() if isinstance(value, dict) else []


def _all(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it that are objects."""
    if isinstance(schema, dict):
        yield schema
        for _, inner in _inner(schema):
            yield from _all(inner)


def _can_end(schema: dict[str, Any], schemas: Sequence[dict[str, Any]]) -> bool:
    """Return whether a finite value satisfies a schema.

    schemas: all schemas within it.
    """
    refs = {one["$ref"]: _resolved(schema, one["$ref"]) for one in schemas if isinstance(one.get("$ref"), str)}
    ending = set[str]()
    while more := {ref for ref, found in refs.items() if ref not in ending and _ends(found, ending)}:
        ending |= more
    return _ends(schema, ending)


def _resolved(schema: Any, ref: str) -> Any:
    for name in ref.split("/")[1:]:
        if not isinstance(schema, dict) or name not in schema:
            return True  # the compiler reports the problem
        schema = schema[name]
    return schema


def _ends(schema: Any, ending: AbstractSet[str]) -> bool:
    """Return whether a finite value satisfies a schema, if finite values satisfy the references in `ending`."""
    if not isinstance(schema, dict):
        return schema is not False
    if "$ref" in schema:
        return schema["$ref"] in ending
    if isinstance(among := schema.get("anyOf"), list):
        return any(_ends(one, ending) for one in among)
    kinds = schema.get("type", [])
    if kinds == "object":
        return all(_ends(schema["properties"][name], ending) for name in schema.get("required", []))
    if kinds == "array" and "enum" not in schema and "const" not in schema:
        firsts, least = schema.get("prefixItems", []), schema.get("minItems", 0)
        rest = least <= len(firsts) or _ends(schema.get("items", True), ending)
        return rest and all(_ends(one, ending) for one in firsts)
    return True


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly within a schema, by name."""
    for keyword in ("properties", "$defs", "definitions"):
        members = schema.get(keyword, {})
        yield from ((f"{keyword}.{name}", inner) for name, inner in members.items()) if isinstance(members, dict) else ()
    for keyword in ("anyOf", "prefixItems"):
        listed = schema.get(keyword, [])
        yield from ((f"{keyword}.{i}", inner) for i, inner in enumerate(listed)) if isinstance(listed, list) else ()
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield keyword, schema[keyword]
