"""Chat templates over HTTP: what they refuse is the client's to know, and no failure of the server."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from servers import TEMPLATE, Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def several(loaded: tuple[PreTrainedModel, Any]) -> Iterator[Served]:
    """A server whose tokenizer each test gives a template."""
    model, tokenizer = loaded
    with serving(model, copy.deepcopy(tokenizer)) as one:
        yield one


def asked(server: Served) -> list[tuple[int, str]]:
    answers = [
        server.post("/v1/chat/completions", messages=HI, max_tokens=1),
        server.post("/v1/responses", input="Hi", max_output_tokens=1),
        server.post("/v1/contexts", name="hi", messages=HI),
        server.post("/tokenize", messages=HI),
    ]
    return [(one.status_code, one.text) for one in answers]


def test_of_several_templates_the_default_is_taken(several: Served) -> None:
    several.service.tokenizer.chat_template = {"default": TEMPLATE, "rag": "no"}
    assert [status for status, _ in asked(several)] == [200] * 4


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ({"tool_use": TEMPLATE, "rag": TEMPLATE}, "'tool_use', 'rag'"),
        ("{{ raise_exception('only pairs') }}", "only pairs"),
        ("{{ 'a' + none }}", "TypeError"),
    ],
)
def test_a_template_that_cannot_serve_is_400(several: Served, template: Any, said: str) -> None:
    several.service.tokenizer.chat_template = template
    for status, text in asked(several):
        assert (status, said in text) == (400, True)
