"""Random requests to every path: fields that fit and fields that do not, schemas, bodies that are cut or changed in a byte.

`test_http_fuzz.py` sends some of them, `lab/fuzz_http.py` as many as one likes. A seed always gives the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import servers

from kvthaw.serve import schema
from kvthaw.serve.fields import Body

TEMPLATE = servers.TEMPLATE + "{# tools: <tool_call> #}"
BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/responses": schema.ResponsesRequest,
    "/v1/contexts": schema.ContextRequest,
    "/tokenize": schema.TokenizeRequest,
    "/detokenize": schema.DetokenizeRequest,
    "/v1/recalls/x/runs": schema.RecallRun,
    "/v1/recalls/x/answers": schema.RecallRun,
}
PLAIN = ("/v1/models", "/v1/models/tiny", "/v1/models/%00", "/v1/contexts", "/v1/contexts/a", "/v1/contexts/..%2f",
         "/v1/recalls/x", "/health", "/ready", "/version", "/metrics", "/openapi.json", "/", "/nothing", "//",
         "/v1/contexts/" + "a" * 500)  # fmt: skip
TEXTS = ("", "a", "Hi", "\0", "\u65e5\u672c", "\U0001f642", "x" * 700, "x" * 70_000, " ", "\n", "{", "<s>", "%s{}$", "tiny")
NUMBERS = (0, 1, 2, 3, -1, 16, 128, 4096, 1 << 31, -(1 << 63), 1 << 64, 10**40, 0.5, 1.5, -0.0, 1e-300, 1e308, float("nan"))
KEYWORDS = (
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems", "minLength",
    "maxLength", "pattern", "format", "multipleOf", "minimum", "maximum", "enum", "const", "anyOf", "oneOf", "$ref", "$defs",
    "title", "default", "not",
)  # fmt: skip
TYPES = ("string", "integer", "number", "boolean", "null", "object", "array")
PATTERNS = (
    "a*",
    "^a$",
    ".{0,9}",
    "(a|b){2,4}",
    "[a-z]+",
    "(",
    "a{2,1}",
    "[z-a]",
    ".*.*.*",
    r"\d{3}",
    "(.{1,99}){1,99}",
    "",
    "$",
    "\\",
)


@dataclass
class Asked:
    """A request. body: None for none."""

    method: str
    path: str
    body: bytes | None = None
    header: str = "application/json"

    def __str__(self) -> str:
        body = b"" if self.body is None else self.body
        shown = body if len(body) < 2000 else body[:1000] + b"..." + body[-200:]
        return f"{self.method} {self.path} {self.header} {shown!r}"


class Requests:
    """Makes requests from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._pick: Callable[..., Any] = self._random.choice

    def __iter__(self) -> Iterator[Asked]:
        while True:
            yield self._request()

    def _request(self) -> Asked:
        if self._chance(0.1):
            return Asked(self._pick(("GET", "HEAD", "DELETE", "PUT", "OPTIONS", "POST")), self._pick(PLAIN))
        path = self._pick(list(BODIES))
        body = json.dumps(self._fields(BODIES[path]), ensure_ascii=self._chance(0.5)).encode()
        if self._chance(0.1):
            body = self._broken(body)
        return Asked("POST", path, body, "application/json" if self._chance(0.97) else self._pick(("text/plain", "", "a/b;c")))

    def _fields(self, kind: type[Body]) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name, fit in self._least(kind).items():
            said[name] = fit if self._chance(0.93) else self._any()
        names = sorted(kind.names())
        for name in self._random.sample(names, self._random.randint(0, min(3, len(names)))):
            said[name] = self._value(name) if self._chance(0.85) else self._any()
        if self._chance(0.05):
            said[self._pick(("temprature", "audio", "x", "", "\0", "__proto__"))] = self._any()
        return said

    def _least(self, kind: type[Body]) -> dict[str, Any]:
        new = self._pick((1, 2, 5))
        if kind is schema.ChatRequest:
            tools = {name: self._value(name) for name in ("tools", "tool_choice")} if self._chance(0.4) else {}
            return {"messages": self._messages(), "max_tokens": new} | tools
        if kind is schema.CompletionRequest:
            return {"prompt": self._prompt(), "max_tokens": new}
        if kind is schema.ResponsesRequest:
            return {"input": self._pick(("Hi", self._messages())), "max_output_tokens": new}
        if kind is schema.ContextRequest:
            return {"name": self._pick("abc"), **self._pick(({"text": "Hi"}, {"messages": self._messages()}))}
        if kind is schema.TokenizeRequest:
            return self._pick(({"prompt": "Hi"}, {"messages": self._messages()}))  # type: ignore[no-any-return]
        return {"tokens": [1, 2, 250]} if kind is schema.DetokenizeRequest else {}

    def _value(self, name: str) -> Any:
        """Return what mostly fits a field."""
        fits: dict[str, Callable[[], Any]] = {
            "messages": self._messages,
            "prompt": self._prompt,
            "response_format": self._format,
            "text": lambda: self._pick(("Hi", {"format": self._format()})),
            "stop": lambda: self._pick(("a", ["b", "\n"], [], ["<end>"])),
            "stop_token_ids": lambda: [self._random.randint(0, 260)],
            "logit_bias": lambda: {str(self._random.randint(0, 260)): self._random.uniform(-100, 100)},
            "stream_options": lambda: {"include_usage": self._chance(0.5)},
            "metadata": lambda: self._pick(({}, {"a": "b"})),
            "include": lambda: ["message.output_text.logprobs"],
            "recall": lambda: self._pick(("selected", "exact")),
            "context": lambda: self._pick("abc"),
            "kv_name": lambda: self._pick("abc"),
            "model": lambda: "tiny",
            "tools": lambda: self._pick(([], [self._tool("f")], [self._tool("f"), self._tool("g")])),
            "tool_choice": lambda: self._pick(("none", "auto", "required", {"type": "function", "function": {"name": "f"}})),
            "seed": lambda: 5,
            "n": lambda: self._pick((1, 2, 3)),
            "logprobs": lambda: self._pick((True, 2)),
            "method": lambda: self._pick(("quest", "full", "nothing")),
        }
        flags = ("stream", "echo", "ignore_eos", "wait", "add_special_tokens", "include_stop_str_in_output", "store", "strict")
        if name in flags:
            return self._chance(0.6)
        return fits[name]() if name in fits else self._pick((0, 1, 2, 0.5, 0.9, "a", None))

    def _messages(self) -> Any:
        def content() -> Any:
            return self._pick(
                ("Hi", "", [{"type": "text", "text": "Who?"}], [{"type": "input_text", "text": "a"}], [], "x" * 300)
            )

        roles = ("user", "user", "assistant", "system", "developer", "tool")
        turns = [{"role": self._pick(roles), "content": content()} for _ in range(self._random.randint(1, 3))]
        if self._chance(0.2):
            arguments = self._pick(("{}", "", "[]", '{"a": "\\ud800"}', "[" * 5000, '{"a": NaN}', json.dumps(self._any())))
            call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
            turns += [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": content()}]
        return turns

    def _tool(self, name: str) -> Any:
        parameters = self._pick(({"type": "object", "properties": {"a": self._schema(1)}}, self._schema(0)))
        function = {"name": name, "parameters": parameters, "strict": self._chance(0.5)}
        return {"type": "function", "function": function}

    def _prompt(self) -> Any:
        return self._pick(("Hi", [1, 2, 3], ["Hi", "a"], [[1], [2, 3]], "x" * 200, ["a", [1]], [300], [[]]))

    def _format(self) -> Any:
        named = {"name": "x", "schema": self._schema(0), "strict": self._chance(0.3)}
        return self._pick(
            (
                {"type": "text"},
                {"type": "json_object"},
                {"type": "json_schema", "json_schema": named},
                {"type": "json_schema"} | named,
            )
        )

    def _schema(self, depth: int) -> Any:
        if depth > 3 or self._chance(0.1):
            return self._pick((True, False, {}, {"type": self._pick(TYPES)}, {"$ref": "#"}, self._any()))
        said: dict[str, Any] = {"type": self._pick(TYPES)} if self._chance(0.8) else {}
        for keyword in self._random.sample(KEYWORDS, self._random.randint(0, 3)):
            said[keyword] = self._keyword(keyword, depth + 1) if self._chance(0.9) else self._any()
        return said

    def _keyword(self, keyword: str, depth: int) -> Any:
        if keyword in ("items", "additionalProperties", "not"):
            return self._schema(depth)
        if keyword in ("anyOf", "oneOf", "prefixItems"):
            return [self._schema(depth) for _ in range(self._random.randint(0, 3))]
        if keyword in ("properties", "$defs"):
            return {self._pick(("a", "b", '"', "\u65e5", "")): self._schema(depth) for _ in range(self._random.randint(0, 3))}
        fits = {
            "type": (*TYPES, ["string", "null"]),
            "required": (["a"], [], ["a", "b"]),
            "pattern": PATTERNS,
            "format": ("date", "email", "uuid", "colour"),
            "enum": ([1, "a", None], [], [{"a": [1]}], ["\U0001f642", "a\nb"]),
            "const": ("a", 5, None, [1, {"a": 2}]),
            "$ref": ("#", "#/$defs/a", "#/properties/a", "http://x", "#/nothing"),
        }
        return self._pick(fits.get(keyword, (0, 1, 3, 7, 200, -2, 1.5)))

    def _any(self, depth: int = 0) -> Any:
        """Return any value."""
        kind = self._random.randint(0, 5 if depth < 3 else 2)
        if kind < 3:
            return self._pick((None, True, False, self._pick(TEXTS), self._pick(NUMBERS)))
        if kind == 3:
            return [self._any(depth + 1) for _ in range(self._random.randint(0, 3))]
        if kind == 4:
            return {str(self._pick(TEXTS)): self._any(depth + 1) for _ in range(self._random.randint(0, 3))}
        return self._pick(([[]] * 9000, ["a"] * 5000, {str(i): i for i in range(700)}, json.loads("[" * 200 + "]" * 200)))

    def _broken(self, body: bytes) -> bytes:
        place = self._random.randrange(len(body) + 1)
        byte = bytes([self._random.randrange(256)])
        return self._pick(  # type: ignore[no-any-return]
            (
                body[:place],
                body[:place] + byte + body[place + 1 :],
                body + body,
                b"[" * 9000,
                b"",
                b"null",
                body.replace(b"i", b"\\ud83d"),
            )
        )

    def _chance(self, share: float) -> bool:
        return self._random.random() < share


def answer(http: httpx2.Client, asked: Asked) -> tuple[int, str | None]:
    """Send a request. Return the status of its answer, and what is wrong with it, None where nothing is."""
    headers = {} if asked.body is None else {"content-type": asked.header}
    said = http.request(asked.method, asked.path, content=asked.body, headers=headers)
    return said.status_code, _problem(asked, said)


def _problem(asked: Asked, said: httpx2.Response) -> str | None:
    if said.status_code >= 500:
        return f"status {said.status_code}: {said.text[:500]}"
    if said.status_code >= 400 and asked.method != "HEAD" and not said.json()["error"]["message"]:
        return "an error that says nothing"
    if said.headers.get("content-type", "").startswith("text/event-stream"):
        ends = [line for line in said.text.splitlines() if line.startswith("data: {") and '"internal_error"' in line]
        return f"a stream that ends with {ends[-1][:500]}" if ends else None
    return None
