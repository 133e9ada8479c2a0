"""Text of tokens as they come: whole characters, the same text in the end, and nothing of a stop string."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from kvthaw.engine.hf.model import shipped_path
from kvthaw.engine.text import Detokenizer, StopStrings, TextStream, tokens_after
from kvthaw.errors import ConfigError
from tokenizers_of import KINDS, WORDS

HALF = "�"
TEXTS = [
    "Plain words, and a naïve café.",
    "日本語のテキスト、中文和한국어가 섞인 글.",
    "😀👩‍👩‍👧‍👦 family, flags 🇩🇪🇯🇵, skin 👍🏽, math 𝕏𝔄, combining é̂",
    "  spaces\n\n\ttabs and \r\n lines \u200b\u00a0 ",
    "العربية עברית हिन्दी ไทย",
]


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Words with a leading space, and bytes where there is no word, as sentencepiece has them."""
    words = ["<unk>", "▁Hello", "▁world", "a", "</s>"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{i:02X}>" for i in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(shipped_path())


def pieces(tokenizer: Any, tokens: list[int], **how: Any) -> list[str]:
    stream = TextStream(tokenizer, **how)
    return [*(stream.push(token) for token in tokens), stream.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_ends_within_a_character(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(tokens) > len(text.split())
    found = pieces(tokenizer, tokens)
    assert "".join(found) == text
    assert found[-1] == ""
    assert not any(HALF in piece for piece in found)


def test_random_tokens_give_the_text_of_all(tokenizer: Any) -> None:
    """Half of them bytes, most of which are no characters; what is shown is never taken back."""
    rng = random.Random(0)
    for _ in range(300):
        few = rng.choice([300, len(tokenizer)])
        tokens = [rng.randrange(few) for _ in range(rng.randrange(60))]
        found = pieces(tokenizer, tokens)
        assert "".join(found) == tokenizer.decode(tokens, skip_special_tokens=True)
        assert not any(piece.endswith(HALF) for piece in found[:-1])


def test_a_half_character_is_shown_at_the_end_alone(tokenizer: Any) -> None:
    tokens = tokenizer("ok 😀", add_special_tokens=False)["input_ids"]
    found = pieces(tokenizer, tokens[:-1])
    assert "".join(found[:-1]).strip() == "ok"
    assert set(found[-1]) == {HALF}


def test_bytes_that_are_no_character_do_not_hold_the_text_for_ever(tokenizer: Any) -> None:
    broken = next(i for i in range(len(tokenizer)) if tokenizer.decode([i]) == HALF)
    found = pieces(tokenizer, [broken] * 1000)
    assert "".join(found) == HALF * 1000
    assert max(map(len, found)) < 100


def test_a_tokenizer_of_words_and_bytes() -> None:
    tokenizer = bytes_tokenizer()
    emoji = [5 + byte for byte in "é😀".encode()]
    for tokens in ([1, 2, *emoji, 3, 4], [*emoji, *emoji, 1], [4, 1, 3, 2], [1, emoji[0], 2]):
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)
    # a byte that makes of a whole run of bytes none: what was shown stays, and the stream goes on
    assert pieces(tokenizer, [1, *emoji[:2], 5 + 0xFF, 3, 2]) == ["Hello", "", "é", "", f"{HALF * 2}a", " world", ""]


def test_a_tokenizer_written_in_python() -> None:
    tokenizer = ByT5Tokenizer()
    for text in TEXTS:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = pieces(tokenizer, tokens)
        assert "".join(found) == tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        assert not any(HALF in piece for piece in found)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text before (after) the stop string that is complete first, the longest of several: character by character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab😀", max_size=4), max_size=8),
    st.lists(st.text("ab😀", min_size=1, max_size=5), max_size=3),
    st.booleans(),
)
def test_text_ends_at_the_first_stop_string(parts: list[str], stops: list[str], include: bool) -> None:
    """However it is cut into pieces; and no more is held back than may become one."""
    watch, shown, whole = StopStrings(stops, include=include), "", ""
    for part in parts:
        shown, whole = shown + watch.push(part), whole + part
        text, stop = cut(whole, stops, include)
        assert watch.found == stop
        assert text.startswith(shown)
        open_ends = [n for n in range(len(text) + 1) if any(s.startswith(text[len(text) - n :]) and len(s) > n for s in stops)]
        assert shown == (text if stop or not stops else text[: len(text) - max(open_ends)])
    assert shown + watch.finish() == cut(whole, stops, include)[0]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens(tokenizer: Any, include: bool) -> None:
    text = "The answer is 42.\n\nQuestion: 😀 what else?"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for stop in ("\n\nQuestion", "😀", "42.\n", "wer is", "T", text):
        out = Detokenizer(tokenizer, ["never", stop], include_stop=include)
        shown, used = "", 0
        for token in tokens:
            used += 1
            shown += out.push(token)
            if out.stopped_by is not None:
                break
        assert out.stopped_by == stop
        assert stop in tokenizer.decode(tokens[:used])
        assert stop not in tokenizer.decode(tokens[: used - 1])
        assert shown == out.text == text[: text.index(stop) + len(stop) * include]
        assert out.finish() == ""


def test_a_stop_string_that_stays_a_beginning_is_shown_at_the_end(tokenizer: Any) -> None:
    tokens = tokenizer("one two thr", add_special_tokens=False)["input_ids"]
    out = Detokenizer(tokenizer, ["three"])
    shown = "".join(out.push(token) for token in tokens)
    assert shown == "one two "
    assert out.finish() == "thr"
    assert (out.text, out.stopped_by) == ("one two thr", None)


def test_text_of_the_least_tokens_is_not_searched(tokenizer: Any) -> None:
    tokens = tokenizer("no no no no no no", add_special_tokens=False)["input_ids"]
    out = Detokenizer(tokenizer, ["no"], min_tokens=3)
    for i, token in enumerate(tokens):
        out.push(token)
        assert (out.stopped_by is None) == (i < 3)
    assert out.text == tokenizer.decode(tokens[:3]) + " "


def test_stop_strings_that_are_none_are_refused(tokenizer: Any) -> None:
    for stop in ("abc", ["a", ""]):
        with pytest.raises(ConfigError, match="the stop strings are"):
            Detokenizer(tokenizer, stop)


def spelled(kind: str, *parts: str) -> tuple[Any, list[int]]:
    """A tokenizer, and the tokens of texts, each for itself."""
    tokenizer = KINDS[kind]()
    return tokenizer, [token for part in parts for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("stop", "parts", "text"),
    [
        ("<|im_end|>", ["a日", "<|im_end|>", "b"], "a日"),
        ("\n<|im_end|>", ["a<|im_end|>b\n<|im_end|>c"], "ab"),
        ("<|im_end|> the", ["a<|im_end|>b<|im_end|> the c"], "ab"),
        (" <|im_end|>\n", ["a  <|im_end|>\nb"], "a"),
        ("<|im_end|><|im_end|>", ["a<|im_end|>b<|im_end|><|im_end|>"], "ab"),
        ("本<|im_end|>", ["日本<|im_end|>"], "日"),
        ("</s>", ["a", "<|im_end|>", "b</s>c"], "ab"),
    ],
)
def test_a_stop_string_that_spells_a_special_token(kind: str, stop: str, parts: list[str], text: str) -> None:
    tokenizer, tokens = spelled(kind, *parts)
    if kind == "llama":  # begins each text behind a special token with a space
        space = tokenizer.convert_tokens_to_ids("▁")
        tokens = [token for before, token in zip([None, *tokens], tokens, strict=False) if token != space or before == space]
    for include in (False, True):
        out = Detokenizer(tokenizer, ["never", stop], include_stop=include)
        shown = ""
        for token in tokens:
            shown += out.push(token)
            if out.stopped_by is not None:
                break
        assert out.stopped_by == stop
        assert shown == out.text
        assert out.text.removesuffix(stop).replace(" ", "") == text
        assert out.text.endswith(stop) is include
    answer = Detokenizer(tokenizer, [stop])
    for token in tokens:
        answer.push(token)
    answer.finish()
    assert answer.stopped_by is not None
    assert answer.text.replace(" ", "") == text


def test_special_tokens_that_end_nothing_are_not_shown() -> None:
    tokenizer, tokens = spelled("byte-level", "a<|im_end|>b<|im_end|>")
    out = Detokenizer(tokenizer, ["<|im_end|>c"])
    assert "".join([*map(out.push, tokens), out.finish()]) == "ab"
    out = Detokenizer(tokenizer, ["<|im_end|>"], min_tokens=3)
    assert "".join([*map(out.push, tokens), out.finish()]) == "ab"
    assert out.stopped_by == "<|im_end|>"


def test_half_a_character_before_a_special_token_is_shown() -> None:
    tokenizer, tokens = spelled("byte-level", "a日")
    out = Detokenizer(tokenizer, ["<|im_end|>"])
    said = "".join([*map(out.push, tokens[:-1]), out.push(tokenizer.convert_tokens_to_ids("<|im_end|>"))])
    assert (said, out.stopped_by) == (f"a{HALF}", "<|im_end|>")


def test_letters_that_spell_a_special_token_end_the_text_too() -> None:
    tokenizer, tokens = spelled("byte-level", "a<|im_", "end|>b")
    out = Detokenizer(tokenizer, ["<|im_end|>"])
    assert "".join(map(out.push, tokens)) == "a"


@pytest.mark.parametrize("kind", [*WORDS, "Python"])
def test_a_text_and_what_goes_on_it_are_the_whole_text(kind: str) -> None:
    """Wherever between two characters the prompt ends, with and without a special token at its beginning."""
    tokenizer = WORDS[kind]() if kind in WORDS else ByT5Tokenizer()
    text = (
        "the king, playing the playing!"
        if kind in WORDS and kind not in KINDS
        else "the  king, playing the 日本 🙂 é the playing!"
    )
    for special in (True, False):
        ids = [tokenizer.eos_token_id] * special + tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for at in range(len(ids)):
            before = tokenizer.decode(ids[:at], skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if HALF not in before:
                found = pieces(tokenizer, ids[at:], after=ids[:at])
                assert before + "".join(found) == whole
                assert not any(HALF in piece for piece in found)


def test_a_prompt_that_ends_within_a_character_takes_nothing_from_the_text() -> None:
    for kind in KINDS:
        tokenizer = KINDS[kind]()
        ids = tokenizer("a 日 the", add_special_tokens=False)["input_ids"]
        at = next(i for i in range(len(ids)) if HALF in tokenizer.decode(ids[:i]))
        assert "".join(pieces(tokenizer, ids[at:], after=ids[:at])).endswith(" the")


@pytest.mark.parametrize("kind", WORDS)
def test_a_stop_string_may_begin_with_the_space_behind_the_prompt(kind: str) -> None:
    tokenizer = WORDS[kind]()
    ids = tokenizer("a the the", add_special_tokens=False)["input_ids"]
    before = tokenizer("a", add_special_tokens=False)["input_ids"]
    out = Detokenizer(tokenizer, [" the"], after=before)
    for token in ids[len(before) :]:
        out.push(token)
    assert (out.text, out.stopped_by) == ("", " the")


def test_an_answer_goes_on_its_prompt() -> None:
    tokenizer = KINDS["llama"]()
    a, the = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "▁the"))
    for after, text in (([a], " the the"), ((), "the the")):
        answer = Detokenizer(tokenizer, after=after)
        assert "".join([answer.push(the), answer.push(the), answer.finish()]) == answer.text == text


def test_text_behind_half_a_character_keeps_its_first_space() -> None:
    tokenizer = KINDS["llama"]()
    a, half, the = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "<0xE6>", "▁the"))
    stream = TextStream(tokenizer)
    said = [stream.push(a), stream.push(half), stream.finish(), stream.push(the), stream.push(the)]
    assert said == ["a", "", HALF, " the", " the"]


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("the king", " the"),
        ("the", "the"),
        ("a", "\nthe king"),
        ("a\n", "\nthe"),
        ("a b", "nd so"),
        ("a", "日本"),
        ("<|im_end|>", "the"),
    ],
)
def test_tokens_of_a_text_that_goes_on_another_one(kind: str, one: str, other: str) -> None:
    if kind not in KINDS and ("\n" in one + other or "日" in other):
        pytest.skip("it has no tokens for these")
    tokenizer = WORDS[kind]()
    before = tokenizer(one, add_special_tokens=False)["input_ids"]
    said = tokenizer.decode([*before, *tokens_after(tokenizer, other)], clean_up_tokenization_spaces=False)
    glued = {"wordpiece": f"{one} {other.strip()}"}.get(kind, one + other)  # word pieces begin a word
    assert said.replace("<|im_end|> ", "<|im_end|>") == glued.replace("<|im_end|> ", "<|im_end|>")
