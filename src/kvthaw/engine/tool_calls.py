"""How models write calls of functions, by their chat templates: read them from text as it comes, and the grammar of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvthaw.engine.text import begun
from kvthaw.errors import ConfigError

SPECIAL = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
"""Markup of calls; in some tokenizers it is special tokens."""
ANY_OBJECT = {"type": "object"}
"""The schema of any arguments."""
_PART = 4096  # characters that are read at once
_LONGEST = 512  # limit on characters before a call's arguments
_NAMED = r'\{\s*"name"\s*:\s*"(?P<name>[\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'
_BEHIND = re.compile(r'(?:[\s}\],;]|"id"\s*:\s*"\w*"|</tool_call>)*')  # what may follow a call's arguments
_CLOSES = "</tool_call>"
_MARKS = re.compile(r'[\\"{}\[\]]')


@dataclass(frozen=True, slots=True)
class CallRules:
    """What a grammar enforces of an output's calls.

    functions: the schema of a function's arguments, and whether it is strict, by name. Without functions no call may come.
    required: calls must come; else text may come, and calls behind it.
    several: more than one may come.
    """

    functions: Mapping[str, tuple[Any, bool]]
    required: bool
    several: bool


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls. Text comes before them.

    opener: the text that begins them.
    header: a regular expression of a call up to its arguments, with a group "name".
    first, last: the text around all of them, in a grammar.
    before, after: the text around a call's arguments; NAME is replaced by the function's.
    between: the text between two calls; "" for a model that writes one at a time.
    """

    opener: str
    header: re.Pattern[str]
    first: str
    before: str
    after: str
    between: str
    last: str

    def grammar(self, rules: CallRules, arguments: Mapping[str, str]) -> dict[str, Any]:
        """Return the format of xgrammar's structural tags for an output.

        arguments: the grammar of each function's arguments.
        """
        if not arguments:
            return {"type": "any_text", "excludes": [self.opener]}
        one = {"type": "or", "elements": [self._call(name, grammar) for name, grammar in arguments.items()]}
        more = [{"type": "star", "content": _row(self.between, one)}] if rules.several and self.between else []
        if rules.required:
            return _row(self.first, one, *more, self.last)
        rest = _row(self.first.removeprefix(self.opener), one, *more, self.last)
        return {"type": "dispatch", "rules": [[self.opener, rest]], "loop": False}

    def _call(self, name: str, grammar: str) -> dict[str, Any]:
        return _row(self.before.replace("NAME", name), {"type": "grammar", "grammar": grammar}, self.after)


def _row(*parts: str | dict[str, Any]) -> dict[str, Any]:
    written = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in parts if part]
    return {"type": "sequence", "elements": written}


_HERMES = ToolFormat(
    "<tool_call>",
    re.compile(rf"<tool_call>\s*{_NAMED}(?=\{{)"),
    '<tool_call>\n{"name": "',
    'NAME", "arguments": ',
    "}",
    '\n</tool_call>\n<tool_call>\n{"name": "',
    "\n</tool_call>",
)
_LLAMA = ToolFormat('{"name": "', re.compile(rf"{_NAMED}(?=\{{)"), '{"name": "', 'NAME", "parameters": ', "}", "", "")
_MISTRAL = ToolFormat(
    "[TOOL_CALLS]",
    re.compile(rf"(?:\[TOOL_CALLS\]\s*\[?\s*)?{_NAMED}(?=\{{)"),
    '[TOOL_CALLS][{"name": "',
    'NAME", "arguments": ',
    "}",
    ', {"name": "',
    "]",
)
_MISTRAL_ARGS = ToolFormat(
    "[TOOL_CALLS]",
    re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[\w-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)"),
    "[TOOL_CALLS]",
    "NAME[ARGS]",
    "",
    "[TOOL_CALLS]",
    "",
)
_FORMATS = {
    "[ARGS]": _MISTRAL_ARGS,
    "[TOOL_CALLS]": _MISTRAL,
    "<tool_call>": _HERMES,
    '"name": function name, "parameters": ': _LLAMA,
    "<|python_tag|>": _LLAMA,
}
"""By what a template contains; the first counts."""
_OTHERS = ("<function=", "<arg_key>", "<|channel|>")
"""What templates contain besides whose calls have another form: Qwen3-Coder's, GLM's, gpt-oss'."""


def tool_format(template: str) -> ToolFormat:
    """Return how a model with this chat template writes calls. Raises ConfigError if it takes no tools, or writes otherwise."""
    if re.search(r"\btools\b", template) is None:
        raise ConfigError("the chat template takes no tools")
    template = template.replace('\\"', '"')
    found = next((form for mark, form in _FORMATS.items() if mark in template), None)
    other = next((mark for mark in _OTHERS if mark in template), None)
    if found is None or other is not None:
        says = "in an unknown form" if other is None else f"with {other}"
        served = '<tool_call> and JSON, {"name", "parameters"}, [TOOL_CALLS]'
        raise ConfigError(f"the chat template writes tool calls {says}, which is not served; these are: {served}")
    return found


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of a call: its beginning with the name of the function, or more of the arguments.

    index: number of the call in the output.
    """

    index: int
    name: str | None = None
    arguments: str = ""


class CallReader:
    """Divide an output's text, which comes in pieces, into content and calls.

    What only looks like a call is content: one of an unknown function, or with arguments that are not a JSON object. Therefore
    the reader holds arguments back until they are whole.

    names: of the functions.
    certain: a grammar makes every call correct, so that arguments come as they are written.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, certain: bool) -> None:
        self._form, self._names, self._certain = form, names, certain
        self._text, self._gap = "", list[str]()  # what is not yet read; the white space before it
        self._read: Callable[[bool], bool] = self._content
        self._head, self._name, self._held = "", "", list[str]()  # of the call at hand
        self._depth, self._quoted, self._escaped = 0, False, False
        self._said, self._pieces = list[str](), list[CallPiece]()
        self.calls = 0

    def push(self, piece: str, *, last: bool = False) -> tuple[str, list[CallPiece]]:
        """Return the content and the parts of calls that a piece of text completes.

        last: no more text comes.
        """
        for start in range(0, max(1, len(piece)), _PART):  # a step takes time for all that is not yet read
            self._text += piece[start : start + _PART]
            while self._read(last and start + _PART >= len(piece)):
                pass
        said, pieces, self._said, self._pieces = "".join(self._said), self._pieces, [], []
        return said, pieces

    # Each of these takes what it can from the text, and returns whether the next one may read.

    def _content(self, last: bool) -> bool:
        text, opener = self._text, self._form.opener
        found = text.find(opener)
        end = found if found >= 0 else len(text) if last else len(text) - begun(text, opener)
        said = text[:end] if last and found < 0 else text[:end].rstrip()  # white space before a call is no content
        if said or (last and found < 0):
            self._said += [*self._gap, said]
            self._gap = []
        self._gap.append(text[len(said) : end])
        self._text = text[end:]
        self._read = self._header if found >= 0 else self._content
        return found >= 0

    def _header(self, last: bool) -> bool:
        found = self._form.header.match(self._text)
        if found is None and not last and len(self._text) < _LONGEST:
            return False
        if found is None or found["name"] not in self._names:
            self._no_call([self._text[:1]], self._text[1:])
            return True
        self._head, self._name, self._text = found[0], found["name"], self._text[found.end() :]
        self._held, self._depth, self._read = [], 0, self._arguments
        if self._certain:
            self._pieces.append(CallPiece(self.calls, self._name))
        return True

    def _arguments(self, last: bool) -> bool:
        end = self._end()
        new, rest = self._text[:end], self._text[end:]
        self._text = rest
        if self._certain:
            self._pieces += [CallPiece(self.calls, None, new)] if new else []
        else:
            self._held.append(new)
        if self._depth and (self._certain or not last):
            return False
        if not self._certain:
            if self._depth or (said := _object("".join(self._held))) is None:
                self._no_call([self._head, *self._held], rest)
                return True
            self._pieces += [CallPiece(self.calls, self._name), CallPiece(self.calls, None, said)]
        self.calls, self._gap, self._read = self.calls + 1, [], self._behind
        return True

    def _behind(self, last: bool) -> bool:
        found = _BEHIND.match(self._text)
        self._text = self._text[0 if found is None else found.end() :]
        coming = self._text[:1] == '"' and "}" not in self._text and len(self._text) < _LONGEST and not last
        if coming or _CLOSES.startswith(self._text):  # or nothing
            return False
        self._read = self._header if self._text[0] == "{" else self._content
        return True

    def _no_call(self, said: list[str], rest: str) -> None:
        self._said += self._gap + said
        self._gap, self._text, self._read = [], rest, self._content

    def _end(self) -> int:
        """Return where the JSON object in the text ends, or the length of the text."""
        skipped = 0 if self._escaped else -1
        for found in _MARKS.finditer(self._text):
            at, letter = found.start(), found[0]
            if at == skipped:
                continue
            if letter == "\\":
                skipped = at + 1
            elif letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if letter in "{[" else -1
                if self._depth == 0:
                    self._escaped = False
                    return at + 1
        self._escaped = skipped == len(self._text)
        return len(self._text)


def _object(text: str) -> str | None:
    """Return a JSON object as written, or with control characters in its strings escaped; None if it is none."""
    for strict in (True, False):
        with suppress(ValueError, RecursionError):
            found = json.loads(text, strict=strict, parse_constant=_refuse)
            return text if strict else json.dumps(found)
    return None


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
