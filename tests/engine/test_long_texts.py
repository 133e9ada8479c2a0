"""A text with more tokens than a model has positions is refused before all of it is tokenized."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from kvthaw import Cache
from kvthaw.conversation import Conversation, plain_template
from kvthaw.engine.hf.model import check_text, load, shipped_path
from kvthaw.errors import ConfigError
from kvthaw.evaluate.files import read_asset
from kvthaw.evaluate.variant import Variant
from kvthaw.inspect.run import inspect
from tokenizers_of import KINDS


class Counted:
    """A tokenizer that notes the length of the longest text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.longest = tokenizer, 0

    def __call__(self, text: str, **how: Any) -> Any:
        self.longest = max(self.longest, len(text))
        return self._tokenizer(text, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(shipped_path())


def test_a_long_text_is_refused_by_its_beginning(tokenizer: Any) -> None:
    counted, text = Counted(tokenizer), read_asset("book.txt") * 20
    with pytest.raises(ConfigError, match=r"about [\d,]+ tokens, [\d,]+ characters; the model's positions end at 8,192"):
        check_text(counted, text, 8192)
    assert counted.longest < len(text) / 10
    check_text(counted, text, None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_has_just_as_many_tokens_is_not(kind: str) -> None:
    """However cuts fall, and whatever the text is of."""
    made = KINDS[kind]()
    for text in (read_asset("book.txt"), "a" * 150_000, "日本 " * 50_000, " " * 140_000):
        whole = len(made(text, add_special_tokens=False, verbose=False)["input_ids"])
        check_text(made, text, whole)


def test_everything_that_reads_a_text_refuses_it(model: str) -> None:
    llm, own = load(model, dtype="float32")
    text, tokenizer = "The grass is green. " * 50_000, Counted(own)
    own.chat_template = plain_template(own)
    reads = (
        lambda: Conversation(llm, tokenizer, Cache(llm, "full")).read(text),
        lambda: Conversation(llm, tokenizer, Cache(llm, "full")).ask(text),
        lambda: inspect(llm, tokenizer, text, "Why?", [Variant("quest", 64)]),
    )
    for read in reads:
        with pytest.raises(ConfigError, match=r"about 1,000,000 tokens, [\d,]+ characters; the model's positions end at 2,048"):
            read()
    assert tokenizer.longest < 200_000
