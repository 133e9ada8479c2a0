"""Log-probabilities name tokens by their own bytes, and by where they begin in the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from servers import serving
from transformers import LlamaConfig, LlamaForCausalLM

import bytemodel
from kvthaw.engine.logprobs import TokenLogprobs
from kvthaw.engine.text import Detokenizer
from kvthaw.serve.answers import ChatAnswer, CompletionAnswer, Json
from kvthaw.serve.jobs import Delta
from kvthaw.serve.schema import ChatRequest, CompletionRequest
from tokenizers_of import KINDS, WORDS

TEXT = "the 日本 🙂 the end é"


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def scores_of(tokens: list[int], likely: tuple[int, ...] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -1.0, tuple((one, -2.0 - i) for i, one in enumerate(likely))) for token in tokens]


def deltas_of(tokenizer: Any, tokens: list[int], likely: tuple[int, ...] = ()) -> list[Delta]:
    """Return what the steps of one output add, token by token."""
    out = Detokenizer(tokenizer)
    deltas = [Delta(0, [token], out.push(token), scores_of([token], likely)) for token in tokens]
    deltas[-1].text += out.finish()
    deltas[-1].finished = "length"
    return deltas


def whole(deltas: list[Delta]) -> Delta:
    scores = [one for delta in deltas for one in delta.logprobs]
    return Delta(0, [one.token for one in scores], "".join(delta.text for delta in deltas), scores, finished="length")


def completed(tokenizer: Any, prompt: list[int], *, echo: bool = False) -> CompletionAnswer:
    return CompletionAnswer(CompletionRequest(prompt=prompt, logprobs=5, echo=echo), [prompt], tokenizer, "m")


def place_of(text: str, before: bytes) -> int:
    """Return the place of the character that the first byte behind some bytes is a part of."""
    return len(before.decode(errors="ignore"))


def check(tokenizer: Any, text: str, logprobs: Json, tokens: list[int]) -> None:
    spelled = [word if not word.startswith("bytes:") else None for word in logprobs["tokens"]]
    for word, at in zip(spelled, logprobs["text_offset"], strict=True):
        if word is not None and word not in tokenizer.all_special_tokens:
            assert text[at:].startswith(word) or (at == 0 and text.startswith(word.lstrip()))
    known = completed(tokenizer, tokens)._bytes
    said = b""
    for token, at in zip(tokens, logprobs["text_offset"], strict=True):
        assert at == place_of(text, said)
        if token not in tokenizer.all_special_ids:
            said += known.of(token) if said else known.of(token)[len(known.of(token)) - len(known.of(token).lstrip()) :]


def test_offsets_are_those_of_the_text_streamed_and_whole(tokenizer: Any) -> None:
    tokens = ids_of(tokenizer, TEXT)
    deltas = deltas_of(tokenizer, tokens)
    (choice,) = completed(tokenizer, [tokenizer.bos_token_id]).whole([whole(deltas)])["choices"]
    assert choice["text"] == TEXT
    check(tokenizer, TEXT, choice["logprobs"], tokens)
    streamed = completed(tokenizer, [tokenizer.bos_token_id])
    chunks = [chunk["choices"][0]["logprobs"] for delta in deltas for chunk in streamed.parts(delta)]
    assert [at for chunk in chunks for at in chunk["text_offset"]] == choice["logprobs"]["text_offset"]


def test_echoed_tokens_have_their_offsets_and_special_ones_take_no_place(tokenizer: Any) -> None:
    special = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = [tokenizer.bos_token_id, *ids_of(tokenizer, "the 日"), special, *ids_of(tokenizer, "本 the 🙂")]
    delta = Delta(0, [], "", [], [None, *scores_of(prompt[1:])], finished="length")
    (choice,) = completed(tokenizer, prompt, echo=True).whole([delta])["choices"]
    check(tokenizer, choice["text"], choice["logprobs"], prompt)


def test_offsets_behind_a_prompt_count_the_space_before_the_first_word(tokenizer: Any) -> None:
    prompt, tokens = ids_of(tokenizer, "the 日"), ids_of(tokenizer, "a the the")[-2:]
    delta = Delta(0, tokens, " the the", scores_of(tokens), finished="length")
    for echo in (False, True):
        scored = replace(delta, prompt_logprobs=[None, *scores_of(prompt[1:])] if echo else [])
        (choice,) = completed(tokenizer, prompt, echo=echo).whole([scored])["choices"]
        assert choice["text"] == "the 日" * echo + " the the"
        assert choice["logprobs"]["text_offset"][-2:] == [len("the 日") * echo, len("the 日") * echo + 4]


@pytest.mark.parametrize("kind", WORDS)
def test_a_prompt_and_its_completion_are_one_text(kind: str) -> None:
    """Whole, streamed, echoed, behind a context, for all outputs of a prompt; and text comes back from its tokens."""
    tokenizer = WORDS[kind]()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=bytemodel.POSITIONS,
    )
    the = tokenizer.convert_tokens_to_ids({"byte-level": "Ġthe", "wordpiece": "the"}.get(kind, "▁the"))
    body = {"max_tokens": 2, "logit_bias": {str(the): 100}, "n": 2, "prompt": "the k", "temperature": 1}
    with serving(LlamaForCausalLM(config), tokenizer, method="full") as server:
        for more, text in (({}, " the the"), ({"echo": True}, "the k the the"), ({"stop": [" the"]}, "")):
            choices = server.post("/v1/completions", **body, **more).json()["choices"]
            assert [choice["text"] for choice in choices] == [text] * 2
            stream = server.openai.completions.create(model="tiny", extra_body=body | more, prompt="the k", stream=True)
            said = ["", ""]
            for chunk in stream:
                for choice in chunk.choices:
                    said[choice.index] += choice.text
            assert said == [text] * 2
        server.post("/v1/contexts", name="book", text="the king said: ")
        (choice, _) = server.post("/v1/completions", **body | {"prompt": "a"}, context="book", echo=True).json()["choices"]
        assert choice["text"] == ("the king said: a the the" if kind != "metaspace" else choice["text"])
        text = "the king , it 's play" if kind != "wordpiece" else "the play"
        for special in (True, False):
            tokens = server.post("/tokenize", prompt=text, add_special_tokens=special).json()["tokens"]
            assert server.post("/detokenize", tokens=[*tokens, 2_000_000_000]).json()["prompt"].endswith(text)


def test_every_likely_token_is_there_with_its_own_bytes(tokenizer: Any) -> None:
    known = completed(tokenizer, [1])._bytes
    halves = [next(token for token in range(len(tokenizer)) if known.of(token) == bytes([byte])) for byte in (0xE6, 0xE7, 0xF0)]
    the = ids_of(tokenizer, "a the")[-1]
    bare = next(token for token in range(len(tokenizer)) if known.of(token) == b"the")
    likely = (*halves, the, bare)
    deltas = deltas_of(tokenizer, ids_of(tokenizer, TEXT), likely)
    (choice,) = completed(tokenizer, [1]).whole([whole(deltas)])["choices"]
    assert all(len(top) in (5, 6) for top in choice["logprobs"]["top_logprobs"])
    assert {"bytes:\\xe6", " the", "the"} <= choice["logprobs"]["top_logprobs"][1].keys()
    body = ChatRequest(messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=5)
    said = ChatAnswer(body, [[1]], tokenizer, "m").whole([whole(deltas)])["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in said).decode().strip() == TEXT
    assert [one["bytes"] for one in said[0]["top_logprobs"]] == [[0xE6], [0xE7], [0xF0], list(b" the"), list(b"the")]


def test_tokens_of_one_text_are_told_apart() -> None:
    tokenizer = KINDS["gemma"]()
    letter, byte = tokenizer.convert_tokens_to_ids(["A", "<0x41>"])
    answer = completed(tokenizer, [1])
    delta = Delta(0, [byte], "A", [TokenLogprobs(byte, -2.0, ((letter, -1.0), (byte, -2.0)))], finished="length")
    (choice,) = answer.whole([delta])["choices"]
    assert choice["logprobs"]["tokens"] == ["A"]
    assert choice["logprobs"]["top_logprobs"] == [{f"token_id:{letter}": -1.0, "A": -2.0}]
