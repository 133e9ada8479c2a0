"""Chat templates of all kinds give a text, or say why not."""

from __future__ import annotations

from typing import Any

import pytest

from kvthaw.engine.chat_template import Chat, render
from kvthaw.errors import ConfigError
from tokenizers_of import byte_level

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def tokenizer() -> Any:
    return byte_level()


def test_of_several_templates_the_default_is_taken(tokenizer: Any) -> None:
    tokenizer.chat_template = {"tool_use": "tools", "default": PLAIN}
    Chat().check(tokenizer)
    assert render(tokenizer, HI) == "user: Hi\n"
    assert render(tokenizer, HI, "other") == "other"


def test_without_a_default_the_names_are_said(tokenizer: Any) -> None:
    tokenizer.chat_template = {"tool_use": PLAIN, "rag": PLAIN}
    with pytest.raises(ConfigError, match="'tool_use', 'rag', but none named 'default'"):
        render(tokenizer, HI)
    with pytest.raises(ConfigError, match="'tool_use', 'rag'"):
        Chat().check(tokenizer)
    assert render(tokenizer, HI, PLAIN) == "user: Hi\n"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ m | tojson }}", "fails: TypeError"),
        ("{{ 'system: ' + none }}", "fails: TypeError"),
        ("{{ tools.x.y }}", "refuses the messages"),
        ("{% for m in messages %}", "refuses the messages"),
        ("{{ 1 // 0 }}", "fails: ZeroDivisionError"),
        ("{{ messages[0].content[5] + 1 }}", "the chat template"),
        ("", "no chat template"),
        ("{# nothing #}", "makes no text"),
    ],
)
def test_a_template_that_fails_says_why(tokenizer: Any, template: str, said: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=said):
        render(tokenizer, HI)
