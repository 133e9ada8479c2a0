"""Calls of tools in chat completions, through openai's client and small templates of each form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import TEMPLATE, Served, serving

import bytemodel
from kvthaw.engine import tool_calls
from kvthaw.engine.hf.model import load
from kvthaw.engine.request import Request

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "Weather?"}]
TURNS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}tool {{ m.tool_call_id }}: {{ m.content }}\n"
    "{% else %}{{ m.role }}:{{ m.content }}{% if m.tool_calls %}CALLS{% endif %}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
EACH = "{% for c in m.tool_calls %}SAID{% endfor %}"
TEMPLATES = {
    "hermes": TURNS.replace(
        "CALLS",
        EACH.replace(
            "SAID",
            "{{ '' if loop.first else '\\n' }}<tool_call>\n"
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
        ),
    ),
    "llama": TURNS.replace(
        "CALLS",
        '{# {"name": function name, "parameters": dictionary} #}'
        + EACH.replace("SAID", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'),
    ),
    "mistral": TURNS.replace(
        "CALLS",
        "[TOOL_CALLS]["
        + EACH.replace(
            "SAID",
            "{{ '' if loop.first else ', ' }}"
            '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}',
        )
        + "]",
    ),
    "mistral with arguments": TURNS.replace(
        "CALLS", EACH.replace("SAID", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}")
    ),
}
ONE = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern }\\"", "days": 3}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Bern }\\"", "days": 3}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern }\\"", "days": 3}}]',
    "mistral with arguments": '[TOOL_CALLS]weather[ARGS]{"city": "Bern }\\"", "days": 3}',
}
ARGUMENTS = '{"city": "Bern }\\"", "days": 3}'
TIME = {
    "hermes": '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "llama": '; {"name": "time", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "time", "arguments": {}}]',
    "mistral with arguments": "[TOOL_CALLS]time[ARGS]{}",
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "How it will be.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
Say = Callable[[str], None]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a model of one layer, whose tokenizer each test gives a template. Texts and calls depend on neither method nor
    layers."""
    model, tokenizer = load(str(bytemodel.save(tmp_path_factory.mktemp("model"), layers=1)), dtype="float32")
    with serving(model, tokenizer, method="full", budget=None) as one:
        yield one


@pytest.fixture(params=TEMPLATES)
def form(several: Served, request: pytest.FixtureRequest) -> str:
    several.service.tokenizer.chat_template = TEMPLATES[request.param]
    return str(request.param)


@pytest.fixture
def hermes(several: Served) -> Served:
    several.service.tokenizer.chat_template = TEMPLATES["hermes"]
    return several


@pytest.fixture
def say(several: Served, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Replaces all that the model says."""
    script, take = list[int](), Request.take

    def scripted(self: Request, token: int, scores: Any, at: int) -> bool:
        return take(self, script[at] if script else token, scores, at)

    monkeypatch.setattr(Request, "take", scripted)

    def say(text: str) -> None:
        script[:] = [*several.service.tokenizer(text)["input_ids"], 257]

    return say


def asked(server: Served, **how: Any) -> Any:
    """The one choice of an answer; streams say the same."""
    how = {"model": "tiny", "messages": USER, "tools": TOOLS, "max_tokens": 200, "seed": 1} | how
    whole = server.openai.chat.completions.create(**how).choices[0]
    content, calls, finish = "", list[Any](), None
    for chunk in server.openai.chat.completions.create(**how, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for piece in choice.delta.tool_calls or ():
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append([piece.function.name, ""])
            calls[piece.index][1] += piece.function.arguments
    said = [[call.function.name, call.function.arguments] for call in whole.message.tool_calls or ()]
    assert (content, calls, finish) == (whole.message.content or "", said, whole.finish_reason)
    return whole


def test_calls_come_apart_from_the_text(several: Served, form: str, say: Say) -> None:
    say(f"I look.\n\n{ONE[form]}")
    choice = asked(several)
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", ARGUMENTS)
    assert len(call.id) == 9


def test_several_calls_have_ids_of_their_own(several: Served, form: str, say: Say) -> None:
    say(ONE[form].removesuffix("]") + TIME[form].replace("[TOOL_CALLS][", ", "))
    choice = asked(several)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "time"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert choice.message.content is None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_a_grammar_enforces_calls_and_their_arguments(several: Served, form: str, choice: Any) -> None:
    said = asked(several, tool_choice=choice, temperature=1, parallel_tool_calls=False, tools=[TOOLS[0]])
    (call,) = said.message.tool_calls
    assert (said.message.content, said.finish_reason, call.function.name) == (None, "tool_calls", "weather")
    assert json.loads(call.function.arguments).keys() == {"city", "days"}
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Rome")


def test_strict_arguments_stream_as_they_come(several: Served, form: str, say: Say) -> None:
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    say("Yes. " + ONE[form].replace('Bern }\\"', "Bern"))
    assert asked(several, tools=tools).message.tool_calls[0].function.arguments == '{"city": "Bern", "days": 3}'
    chunks = several.openai.chat.completions.create(model="tiny", messages=USER, tools=tools, stream=True)
    pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
    assert (pieces[0].function.name, pieces[0].function.arguments) == ("weather", "")
    assert {piece.function.name for piece in pieces[1:]} == {None}
    say(ONE[form].replace("Bern", "Oslo"))
    answer = several.post(CHAT, messages=USER, tools=tools)
    assert answer.status_code == 400, "the grammar of strict arguments took another city"


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> or so',
        'a <tool_call>\n{"name": "time", "arguments": {"a": 1,}}\n</tool_call>\n',
        'a <tool_call>\n{"name": "time", "arguments": {"a": [1',
        "a <tool_call> is a tag  ",
        "ends with <tool_c",
        f"<tool_call>{' ' * 100}",
    ],
)
def test_what_is_no_call_stays_content(hermes: Served, say: Say, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_calls, "_LONGEST", 64)
    say(said)
    choice = asked(hermes, max_tokens=200)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")


def test_control_characters_in_arguments_are_escaped(hermes: Served, say: Say) -> None:
    say('<tool_call>{"name": "time", "arguments": {"code": "a\n\tb"}}</tool_call>')
    (call,) = asked(hermes).message.tool_calls
    assert json.loads(call.function.arguments) == {"code": "a\n\tb"}


def test_without_a_call_nothing_changes(several: Served, form: str, say: Say) -> None:
    say("It is fine. ")
    choice = asked(several)
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is fine. ", None, "stop")


def test_a_choice_of_none_allows_no_call(hermes: Served, say: Say) -> None:
    prompt = hermes.post(CHAT, messages=USER, tools=TOOLS, tool_choice="none", max_tokens=1).json()["usage"]
    assert (
        prompt["prompt_tokens"] == hermes.post(CHAT, messages=USER, tools=TOOLS, max_tokens=1).json()["usage"]["prompt_tokens"]
    )
    say("No <tool>.")
    assert asked(hermes, tool_choice="none").message.content == "No <tool>."
    say(ONE["hermes"])
    assert hermes.post(CHAT, messages=USER, tools=TOOLS, tool_choice="none").status_code == 400


def test_the_limit_of_tokens_cuts_an_enforced_call(hermes: Served) -> None:
    choice = asked(hermes, tool_choice="required", max_tokens=60)
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.name in ("weather", "time")


def test_each_turn_finds_the_prompt_of_the_one_before(several: Served, form: str, say: Say) -> None:
    say(f"I look. {ONE[form]}")
    messages: list[Any] = [{"role": "user", "content": f"Weather in {form}?"}]
    prompts, cached = list[int](), list[int]()
    for _ in range(3):
        answer = several.openai.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain, " * 30}]
        prompts.append(answer.usage.prompt_tokens)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[1:] == pytest.approx(prompts[:2], abs=1)


@pytest.mark.parametrize("tools", [TOOLS, []], ids=["tools", "none"])
def test_a_kept_document_goes_with_tools(hermes: Served, say: Say, tools: list[Any]) -> None:
    document = "The sky is blue over Bern. " * 8
    hermes.post("/v1/contexts", name="sky", document=document).raise_for_status()
    say("Yes.")
    alone = hermes.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": f"{document.rstrip()}\nBlue?"}], tools=tools
    )
    kept = hermes.post("/v1/chat/completions", messages=[{"role": "user", "content": "Blue?"}], tools=tools, context="sky")
    assert kept.json()["usage"]["prompt_tokens"] == alone.json()["usage"]["prompt_tokens"]


def test_templates_get_arguments_as_objects(hermes: Served) -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bern"}'}}
    turns = [*USER, {"role": "assistant", "content": None, "tool_calls": [call | {"index": 0}]}]
    turns += [{"role": "tool", "tool_call_id": "123456789", "content": [{"type": "text", "text": "rain"}]}]
    ids = hermes.post("/tokenize", messages=turns).json()["tokens"]
    said = hermes.post("/detokenize", tokens=ids).json()["prompt"]
    assert said.endswith(
        'assistant:<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
        "tool 123456789: rain\nassistant:"
    )


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (TEMPLATE, "takes no tools"),
        (TURNS, "in an unknown form"),
        (TURNS + "{# <tool_call><function= #}", "with <function="),
        (TURNS + "{# <|channel|> #}", "with <|channel|>"),
    ],
)
def test_a_template_without_a_known_form_is_refused(several: Served, template: str, says: str) -> None:
    several.service.tokenizer.chat_template = template
    said = several.post(CHAT, messages=USER, tools=TOOLS)
    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (400, "tools")
    assert "'tiny'" in error["message"]
    assert says in error["message"]


def test_of_several_templates_the_one_for_tools_is_taken(several: Served, say: Say) -> None:
    several.service.tokenizer.chat_template = {"default": TEMPLATE, "tool_use": TEMPLATES["hermes"]}
    say(ONE["hermes"])
    assert asked(several).finish_reason == "tool_calls"


def function(**how: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f"} | how}]


DEEP: Any = {"type": "object"}
for _ in range(20):
    DEEP = {"type": "object", "properties": {"a": DEEP}}
CALLED: Any = {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": function(name="a b")}, "tools.0.function.name: "),
        ({"tools": function(name="a" * 65)}, "tools.0.function.name: "),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type: "),
        ({"tools": function() * 2}, "tools has two functions named 'f'"),
        ({"tools": [*function()] * 129}, "tools: "),
        ({"tools": function(parameters=[])}, "tools.0.function.parameters: "),
        ({"tools": function(strict=True, parameters={"not": {}})}, "tools: the parameters of 'f': "),
        ({"tools": function(parameters={"type": "string"}), "tool_choice": "required"}, "tools: the parameters of 'f': "),
        (
            {"tools": function(strict=True, parameters={"type": "object", "properties": {"a": {"oneOf": []}}})},
            "tools: the parameters of 'f': json_schema: schema.properties.a.oneOf is not served; anyOf is",
        ),
        ({"tools": function(strict=True, parameters=DEEP)}, "tools: the parameters of 'f': json_schema: schemas are nested"),
        ({"tool_choice": "required"}, "tool_choice asks for a call; tools has no function"),
        ({"tool_choice": "any"}, "tool_choice: "),
        ({"tool_choice": 5}, "tool_choice: it must be a string or an object"),
        (
            {"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice names 'g', which is not in tools",
        ),
        ({"tools": function(), "response_format": {"type": "json_object"}}, "response_format asks for JSON; with tools"),
        ({"tools": function(), "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0: tool_call_id: Field required"),
        ({"messages": [{"role": "user"}]}, "messages.0: content: Field required"),
        ({"messages": [CALLED | {"role": "user"}]}, "messages.0: tool_calls is of messages whose role is assistant"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "a"}]}, "messages.0: tool_call_id is of messages"),
        *(
            (
                {
                    "messages": [
                        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": wrong}}]}
                    ]
                },
                "messages have a call of 'f' whose arguments are not JSON of an object",
            )
            for wrong in ("", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', '{"a":' * 9000)
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_uses_are_told_in_a_sentence(hermes: Served, fields: dict[str, Any], says: str) -> None:
    said = hermes.post(CHAT, **{"messages": USER, "max_tokens": 5} | fields)
    assert said.status_code == 400, said.text
    assert said.json()["error"]["message"].startswith(says)


def test_json_is_served_with_a_choice_of_none(hermes: Served) -> None:
    choice = asked(hermes, tool_choice="none", response_format={"type": "json_object"}, max_tokens=30)
    assert choice.message.content.startswith("{")


def test_schemas_that_together_take_long_are_refused(hermes: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.engine.grammar.MOST_TRIES", 200_000)
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-c]{1,64}"}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": parameters}} for i in range(5)]
    assert hermes.post(CHAT, messages=USER, tools=tools[:1], tool_choice="required", max_tokens=2).status_code == 200
    said = hermes.post(CHAT, messages=USER, tools=tools, tool_choice="required", max_tokens=2)
    assert said.status_code == 400
    assert "together take too long to compile" in said.json()["error"]["message"]


def test_the_example_of_the_docs_runs(hermes: Served, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "tools=tools" in block)
    names: dict[str, Any] = {"client": hermes.openai}
    exec(block, names)
    assert capsys.readouterr().out
    assert names["messages"][-1]["content"] in ("Rain in Bern.", "Rain in Rome.")
