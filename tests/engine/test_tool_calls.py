"""Calls in text: markup that is special tokens, and texts that come in any pieces."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch

import tokenizers_of
from kvthaw.engine.request import Request, RequestSpec
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.text import Detokenizer
from kvthaw.engine.tool_calls import ANY_OBJECT, SPECIAL, CallReader, CallRules, ToolFormat, tool_format

HERMES, LLAMA, MISTRAL, ARGS = (
    tool_format(f"tools {mark}")
    for mark in ("<tool_call>", '{"name": function name, "parameters": ', "[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]")
)
TEXTS = [
    (HERMES, 'a\n<tool_call>\n{"name": "f", "arguments": {"a": [{}, "}\\""]}}\n</tool_call>\n<tool_call>\n{"name": "g", '
     '"arguments": {}}\n</tool_call>\nb', "ab", {"f": '{"a": [{}, "}\\""]}', "g": "{}"}),
    (HERMES, '<tool_call>{"name":"f","arguments":{}}</tool', "", {"f": "{}"}),
    (HERMES, '<<tool_call>\n{"name": "h", "arguments": {}}', '<<tool_call>\n{"name": "h", "arguments": {}}', {}),
    (HERMES, "<tool_call> <tool_call>" * 50, "<tool_call> <tool_call>" * 50, {}),
    (LLAMA, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', {}),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"name": 1}}', "", {"f": "{}", "g": '{"name": 1}'}),
    (MISTRAL, '[TOOL_CALLS] [{"name":"f","arguments":{"l":[{}, {"name": "g"}]}, "id": "a1"}, {"name": "g", "arguments": {}}]', "",
     {"f": '{"l":[{}, {"name": "g"}]}', "g": "{}"}),
    (ARGS, 'Hm. [TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', "Hm.", {"f": '{"a": 1}', "g": "{}"}),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@pytest.mark.parametrize("seed", range(20))
def test_pieces_do_not_matter(form: ToolFormat, text: str, content: str, calls: dict[str, str], seed: int) -> None:
    draw, at, said, found = random.Random(seed), 0, "", dict[str, str]()
    reader, names = CallReader(form, ["f", "g"], certain=False), list[str]()
    while at < len(text):
        size = draw.choice([1, 3, 12, len(text)])
        new, pieces = reader.push(text[at : at + size], last=at + size >= len(text))
        said, at = said + new, at + size
        for piece in pieces:
            if piece.name is not None:
                names.append(piece.name)
            found[names[piece.index]] = found.get(names[piece.index], "") + piece.arguments
    assert (said, found, reader.calls) == (content, calls, len(calls))


@pytest.mark.parametrize(("form", "text", "content", "calls"), [one for one in TEXTS if one[3]])
def test_certain_arguments_come_at_once(form: ToolFormat, text: str, content: str, calls: dict[str, str]) -> None:
    reader, found, held = CallReader(form, ["f", "g"], certain=True), list[str](), 0
    for letter in text:
        before = len("".join(found))
        for piece in reader.push(letter)[1]:
            found += [f"{piece.name}"] if piece.name is not None else [piece.arguments]
        held = max(held, len("".join(found)) - before)
    assert "".join(found) == "".join(name + arguments for name, arguments in calls.items())
    assert held <= 2, "a name and a brace"


def test_a_long_output_takes_time_by_its_length() -> None:
    for text in ("<tool_call>" * 40_000, '<tool_call>{"name": "f", "arguments": {}}' * 8_000, "\n" * 400_000, "{" * 400_000):
        began, reader, size = time.process_time(), CallReader(HERMES, ["f"], certain=False), 0
        said, pieces = reader.push(text, last=True)
        size = len(said) + 20 * len(pieces)
        assert size >= 300_000
        assert time.process_time() - began < 2, text[:20]


def test_markup_of_special_tokens_is_shown_and_forced() -> None:
    grammar = pytest.importorskip("kvthaw.engine.grammar")
    pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")
    tokenizer = tokenizers_of.byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    mark, end = tokenizer.convert_tokens_to_ids(["[TOOL_CALLS]", "</s>"])
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}]'
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == mark
    shown, hidden = Detokenizer(tokenizer, show=SPECIAL), Detokenizer(tokenizer)
    assert "".join([*map(shown.push, ids), shown.finish()]) == text
    assert "".join([*map(hidden.push, ids), hidden.finish()]) == text.removeprefix("[TOOL_CALLS]")

    grammars = grammar.Grammars(tokenizer, len(tokenizer))
    source, _ = grammars.read_calls(MISTRAL, CallRules({"f": (ANY_OBJECT, False)}, required=True, several=False))
    matcher, bits = grammars.compile(source).matcher([end]), np.zeros((1, -(-len(tokenizer) // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(bits)
    assert bits[0, mark // 32] >> mark % 32 & 1
    assert all(map(matcher.accept_token, [*ids, end]))

    source, _ = grammars.read({"type": "string"})
    how = Sampling(grammar=grammars.compile(source))
    request = Request(RequestSpec(torch.tensor([end]), 20, frozenset([end]), how, tokenizer=tokenizer))
    for at, token in enumerate(tokenizer('"[ARGS]"')["input_ids"]):
        assert request.take(token, None, at)
    assert request.text == '"[ARGS]"', "the text of JSON has all that the grammar saw"
