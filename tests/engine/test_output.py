"""What a request of a running batch asks for and gets: penalties, log-probabilities, text, and when it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import bytemodel
from kvthaw import Batch, ConfigError, Request, Sampling
from zoo import VOCAB, prompt

STEPS = 16


def outputs(batch: Batch, asked: list[tuple[Any, dict[str, Any]]]) -> list[Request]:
    """Requests that join one after the other as sequences get free, run to their ends."""
    waiting, requests = list(asked), list[Request]()
    while waiting or batch.requests:
        if waiting and batch.free:
            ids, how = waiting.pop(0)
            requests.append(batch.join(ids, **how))
        batch.step()
    return requests


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Any, list[int], list[int]]:
    """A model of bytes with its tokenizer, a prompt, and what it says after it, drawn."""
    folder = bytemodel.save(tmp_path_factory.mktemp("bytes"), ends=False)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("In the beginning there was")["input_ids"]
    request = outputs(Batch(model, "full", max_seqs=1, capacity=256), [(ids, {"sampling": DRAWN})])[0]
    return model, tokenizer, ids, request.tokens


DRAWN = Sampling(temperature=2.0, seed=5, max_tokens=60, logit_bias=dict.fromkeys(range(94), 100.0))  # ASCII alone


def test_penalties_are_those_of_generate(llama: PreTrainedModel) -> None:
    ids = [prompt(1, n, seed=n)[0] for n in (40, 25)]
    how = {"do_sample": False, "max_new_tokens": STEPS, "pad_token_id": 0}
    plain = [llama.generate(one[None], **how)[0, len(one) :].tolist() for one in ids]
    penalized = [llama.generate(one[None], repetition_penalty=1.8, **how)[0, len(one) :].tolist() for one in ids]
    assert plain != penalized
    sampling = Sampling(repetition_penalty=1.8, max_tokens=STEPS)
    asked = [(ids[0], {"sampling": sampling}), (ids[1], {"max_new_tokens": STEPS}), (ids[1], {"sampling": sampling})]
    found = outputs(Batch(llama, "full", max_seqs=2, capacity=64), asked)
    assert [request.tokens for request in found] == [penalized[0], plain[1], penalized[1]]


def test_settings_of_each_are_its_own_in_any_batch(llama: PreTrainedModel) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "frequency_penalty": 1.0, "logprobs": 1},
        {"temperature": 1.5, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_p": 0.8, "logit_bias": {5: 3.0, 6: -100.0}},
        {"min_tokens": 9, "stop_token_ids": list(range(0, VOCAB, 2)), "logprobs": 3},
        {"temperature": 0.7, "top_k": 20, "presence_penalty": 2.0},
    ]
    asked = [
        (prompt(1, 10 + 7 * i, seed=i)[0], {"stop": (), "sampling": Sampling(seed=i, max_tokens=STEPS, **kind)})
        for i, kind in enumerate(kinds)
    ]
    alone = [outputs(Batch(llama, "full", max_seqs=1, capacity=128), [one])[0] for one in asked]
    for seqs, order in ((2, [0, 1, 2, 3, 4]), (5, [3, 1, 4, 0, 2])):
        found = outputs(Batch(llama, "full", max_seqs=seqs, capacity=128), [asked[i] for i in order])
        for i, request in zip(order, found, strict=True):
            assert (request.tokens, request.finished) == (alone[i].tokens, alone[i].finished)
            for one, other in zip(request.logprobs, alone[i].logprobs, strict=True):
                assert [token for token, _ in one.top] == [token for token, _ in other.top]
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert alone[3].finished == "stop"
    assert len(alone[3].tokens) > 9
    assert alone[3].tokens[-1] % 2 == 0
    assert not any(token % 2 == 0 for token in alone[3].tokens[:9])


def test_logprobs_of_output_and_prompt(llama: PreTrainedModel) -> None:
    """Those of one forward over all tokens, prompts in chunks or not; each request as many as it asks for."""
    ids = prompt(1, 50)[0]
    for method, chunk in (("full", 10**4), ("full", 16), ("h2o", 16)):
        batch = Batch(
            llama, method, max_seqs=2, capacity=128, prefill_chunk=chunk, **({} if method == "full" else {"budget": 128})
        )
        sampling = Sampling(temperature=1.0, seed=1, logprobs=2, prompt_logprobs=3, max_tokens=STEPS)
        request, other = outputs(batch, [(ids, {"sampling": sampling}), (ids[:1], {"sampling": Sampling(prompt_logprobs=0)})])
        with torch.no_grad():
            logits = llama(torch.cat([ids, torch.tensor(request.tokens)])[None]).logits[0].double()
        exact, likeliest = torch.log_softmax(logits, dim=1), logits.argsort(dim=1, descending=True)
        assert request.prompt_logprobs[0] is None
        both = [*request.prompt_logprobs[1:], *request.logprobs]
        assert [one.token for one in both] == [*ids[1:].tolist(), *request.tokens]
        for place, one in enumerate(both):
            n = 3 if place < len(ids) - 1 else 2
            assert one.logprob == pytest.approx(exact[place, one.token].item(), abs=1e-3)
            assert [token for token, _ in one.top] == likeliest[place, :n].tolist()
            assert [value for _, value in one.top] == pytest.approx(exact[place, likeliest[place, :n]].tolist(), abs=1e-3)
        assert other.prompt_logprobs == [None]
        assert other.logprobs == []


def test_when_a_request_ends(llama: PreTrainedModel) -> None:
    ids = prompt(1, 30)[0]
    free = outputs(Batch(llama, "full", max_seqs=1, capacity=64), [(ids, {"max_new_tokens": 20})])[0].tokens
    first, later = free[0], next(token for token in free if token != free[0])
    llama.generation_config.eos_token_id = [later]
    at = free.index(later) + 1
    for how, count, reason in (
        ({}, at, "stop"),
        ({"ignore_eos": True}, 20, "length"),
        ({"ignore_eos": True, "stop_token_ids": [later]}, at, "stop"),
        ({"stop_token_ids": [first]}, 1, "stop"),
    ):
        request = outputs(Batch(llama, "full", max_seqs=2, capacity=50), [(ids, {"sampling": Sampling(**how)})])[0]
        assert (request.tokens, request.finished) == (free[:count], reason)
        assert request.stopped_by == (request.tokens[-1] if reason == "stop" else None)
    held = Sampling(min_tokens=at, max_tokens=at)
    request = outputs(Batch(llama, "full", max_seqs=2, capacity=50), [(ids, {"sampling": held})])[0]
    assert (request.finished, request.tokens[:-1]) == ("length", free[: at - 1])
    assert later not in request.tokens


def test_text_comes_in_whole_pieces(written: tuple[PreTrainedModel, Any, list[int], list[int]]) -> None:
    model, tokenizer, ids, tokens = written
    batch = Batch(model, "full", max_seqs=2, capacity=256)
    batch.join(ids, sampling=DRAWN.split(2)[1])
    request = batch.join(ids, sampling=DRAWN, tokenizer=tokenizer)
    pieces = [request.decode()]
    while request in batch.requests:
        batch.step()
        pieces.append(request.decode())
    assert (request.tokens, request.finished) == (tokens, "length")
    assert "".join(pieces) == request.text == tokenizer.decode(tokens)


def test_a_stop_string_ends_the_request(written: tuple[PreTrainedModel, Any, list[int], list[int]]) -> None:
    model, tokenizer, ids, tokens = written
    text = tokenizer.decode(tokens)
    for include in (False, True):
        for stop, least in ((text[10:14], 0), (text[:1], 0), (text[26:29], 20)):
            end = text.index(stop, least) + len(stop)
            sampling = Sampling(
                temperature=2.0, seed=5, max_tokens=60, logit_bias=DRAWN.logit_bias, stop=["@@@@", stop], include_stop=include,
                min_tokens=least,
            )  # fmt: skip
            batch = Batch(model, "full", max_seqs=2, capacity=256)
            request, other = outputs(batch, [(ids, {"sampling": sampling, "tokenizer": tokenizer}), (ids, {"sampling": DRAWN})])
            assert (request.finished, request.stopped_by) == ("stop", stop)
            assert request.tokens == tokens[:end]  # a token is a character here
            assert request.text == text[: end if include else end - len(stop)]
            assert (other.tokens, other.text) == (tokens, "")


def test_a_stop_token_is_no_part_of_the_text(written: tuple[PreTrainedModel, Any, list[int], list[int]]) -> None:
    model, tokenizer, ids, tokens = written
    text = tokenizer.decode(tokens)
    how = {"temperature": 2.0, "seed": 5, "max_tokens": 60, "logit_bias": DRAWN.logit_bias, "stop_token_ids": [tokens[20]]}
    at = tokens.index(tokens[20])
    for include in (False, True):
        sampling = Sampling(**how, include_stop=include, stop=[text[: at + 1] + "@"])  # what is held back for it comes
        asked = [(ids, {"sampling": sampling, "tokenizer": tokenizer})]
        request = outputs(Batch(model, "full", max_seqs=1, capacity=256), asked)[0]
        assert (request.tokens, request.stopped_by) == (tokens[: at + 1], tokens[20])
        assert request.text == text[: at + include]


def test_what_cannot_be_met_is_refused_before_anything_changes(llama: PreTrainedModel) -> None:
    batch = Batch(llama, "full", max_seqs=2, capacity=64)
    other = batch.join(prompt(1, 30)[0], stop=())
    for how, message in (
        ({"sampling": Sampling(stop=["a"])}, "stop strings need a tokenizer"),
        ({"sampling": Sampling(max_tokens=5), "max_new_tokens": 6}, "max_new_tokens is 6 and max_tokens of sampling 5"),
        ({"sampling": Sampling(max_tokens=50)}, "20 tokens and max_new_tokens is 50; a sequence has room for 64"),
        ({"sampling": Sampling(min_tokens=5), "max_new_tokens": 4}, "min_tokens is 5; it must be at most 4"),
        (
            {"sampling": Sampling(logit_bias={VOCAB: 1.0})},
            f"a token of logit_bias is {VOCAB}; it must be from 0 to {VOCAB - 1}",
        ),
        ({"sampling": Sampling(logprobs=VOCAB + 1)}, f"logprobs is {VOCAB + 1}; it must be from 0 to {VOCAB}"),
    ):
        with pytest.raises(ConfigError, match=message):
            batch.join(prompt(1, 20)[0], **how)
        assert batch.requests == [other]
