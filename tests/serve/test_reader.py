"""No text is refused whose tokens have room, whatever its tokenizer makes of it; others are refused early."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvthaw.serve.errors import ApiError
from kvthaw.serve.lanes import SHORT, Reader

LIMIT = 100


def tokenizer(model: Any, *, strip: bool = False) -> PreTrainedTokenizerFast:
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if strip:
        made.normalizer = normalizers.Replace("~", "")
    return PreTrainedTokenizerFast(tokenizer_object=made)


WORDS = models.WordPiece({"[UNK]": 0, "a": 1, "##a": 2, "b": 3}, unk_token="[UNK]", max_input_chars_per_word=100)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("x" * 5 * SHORT, [0]),
        ("a" * 5 * SHORT, [0]),  # longer than the words that WordPiece splits
        (" " * 5 * SHORT, []),
        (" " * (SHORT - 50) + "a" * 101 + " " * 2 * SHORT, [0]),
        ("~" * 5 * SHORT + "ab", [0]),
        ("b " * 99, [3] * 99),
    ],
)
def test_what_has_few_tokens_is_read_however_long_it_is(text: str, tokens: list[int]) -> None:
    assert Reader(tokenizer(WORDS), LIMIT).tokens(text, param="prompt") == tokens


def test_characters_that_a_tokenizer_leaves_out_count_for_nothing() -> None:
    reader = Reader(tokenizer(models.BPE({"a": 0, "b": 1}, []), strip=True), LIMIT)
    assert reader.tokens("~" * 5 * SHORT + "zab" + "z" * 3 * SHORT, param="prompt") == [0, 1]


@pytest.mark.parametrize("text", ["b " * 2_000_000, "a" * 90 + " b" * 2_000_000, " " * SHORT + "b " * 2_000_000])
def test_what_has_too_many_is_refused_at_its_beginning(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    seen: list[int] = []
    encode = Reader._encode
    monkeypatch.setattr(Reader, "_encode", lambda self, text, special: seen.append(len(text)) or encode(self, text, special))
    with pytest.raises(ApiError, match="the context length of this server is 100 tokens") as raised:
        Reader(tokenizer(WORDS), LIMIT).tokens(text, param="input")
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", "input")
    assert sum(seen) <= 2 * SHORT


def test_refusing_a_text_takes_about_the_time_of_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a text of 300,000 tokens no more than eight limits are tokenized, with a limit of 2,048."""
    seen: list[int] = []
    encode = Reader._encode
    monkeypatch.setattr(Reader, "_encode", lambda self, text, special: seen.append(len(text)) or encode(self, text, special))
    for text in ("b " * 300_000, "b " * 30_000):
        seen.clear()
        with pytest.raises(ApiError, match="the context length of this server is 2048 tokens"):
            Reader(tokenizer(WORDS), 2048).tokens(text, param="prompt")
        assert sum(seen) <= 2 * 8 * 2048
