"""Output that follows a grammar: JSON, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import bytemodel
from kvthaw import Batch
from kvthaw.engine.grammar import Grammar, Grammars, TokenMasks
from kvthaw.engine.sampling import Sampler, Sampling, sample
from kvthaw.errors import ConfigError

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from kvthaw.engine.hf.model import load

    return load(str(bytemodel.save(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="module")
def grammars(loaded: tuple[Any, Any]) -> Grammars:
    return Grammars(loaded[1], 258)


@pytest.fixture(scope="module")
def person(grammars: Grammars) -> Grammar:
    return grammars.json_schema(PERSON)


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Grammar]:
    """The tokenizer that ships, and the grammar of it."""
    from kvthaw.engine.hf.model import load

    model, tokenizer = load("shipped")
    return tokenizer, Grammars(tokenizer, model.config.vocab_size).json_schema(PERSON)


def follow(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Whether the grammar allows a text and its end, token by token, by bits as by accepting."""
    end, vocabulary = tokenizer.eos_token_id, grammar.vocabulary
    matcher = grammar.matcher([end])
    masks = TokenMasks(2, vocabulary, torch.device("cpu"))
    masks.join(1, matcher)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], end]:
        allowed = masks(torch.zeros(2, vocabulary), slice(None)).isfinite()
        assert allowed[0].all()
        went = matcher.accept(token)
        assert bool(allowed[1, token]) == went
        if not went:
            return False
    return True


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"name": "Ann", "age": 7}', True),
        ('{"name": "Ann"}', False),
        ('{"name": "Ann", "age": 100}', False),
        ('{"name": "Annabella", "age": 7}', False),
        ('{"name": "Ann", "age": 7, "x": 1}', False),
        ('{"name": "\n", "age": 7}', False),
    ],
)
def test_bits_allow_what_a_schema_does(
    person: Grammar, shipped: tuple[Any, Grammar], loaded: tuple[Any, Any], text: str, fits: bool
) -> None:
    assert follow(person, loaded[1], text) == fits
    assert follow(shipped[1], shipped[0], text) == fits


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_batch_follows_each_request_s_own_grammar(loaded: tuple[Any, Any], grammars: Grammars, temperature: float) -> None:
    """Beside one that follows none, whose tokens are those that it gets alone; also after it was preempted, under penalties."""
    model, tokenizer = loaded
    prompt = tokenizer("Tell me of a man: ")["input_ids"]
    plain = Sampling(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    guided = Sampling(temperature=temperature, seed=5, grammar=grammars.json_schema(PERSON), frequency_penalty=0.5)

    def run(*samplings: Sampling, preempted: int = -1) -> list[Any]:
        batch = Batch(model, "clusterkv-plus", max_seqs=3, capacity=512, budget=64, block_size=64)
        requests = [batch.join(prompt, sampling=one, tokenizer=tokenizer) for one in samplings]
        for step in range(500):
            batch.step()
            if step == preempted:
                batch.preempt(requests[0])
                batch.join(requests[0])
            if not batch.requests:
                break
        return requests

    one, free, listed = run(guided, plain, Sampling(temperature=temperature, grammar=grammars.json(), max_tokens=60))
    assert one.finished == "stop"
    said = json.loads(one.text)
    assert set(said) == {"name", "age"}
    assert 0 <= said["age"] <= 99
    assert listed.text.startswith("{")
    assert free.tokens == run(plain)[0].tokens
    (again,) = run(guided, preempted=9)
    assert (again.tokens, again.text) == (one.tokens, one.text)


def test_what_a_grammar_cannot_stand_beside(loaded: tuple[Any, Any], grammars: Grammars, person: Grammar) -> None:
    batch = Batch(loaded[0], "full", max_seqs=1, capacity=64)
    with pytest.raises(ConfigError, match="min_tokens"):
        Sampling(grammar=person, min_tokens=3)
    with pytest.raises(ConfigError, match="ignore_eos"):
        batch.join([1, 2], sampling=Sampling(grammar=person, ignore_eos=True))
    with pytest.raises(ConfigError, match="300"):
        Sampler(1, 300).check(Sampling(grammar=person))
    with pytest.raises(ConfigError, match="Sampler"):
        sample(torch.zeros(1, 258), [Sampling(grammar=person)], torch.zeros(1, dtype=torch.int64))


def test_an_output_that_no_token_continues_ends_with_an_error(loaded: tuple[Any, Any], grammars: Grammars) -> None:
    batch = Batch(loaded[0], "full", max_seqs=1, capacity=64)
    request = batch.request([1, 2], sampling=Sampling(grammar=grammars.json(), max_tokens=9))
    request.take(5, None)
    assert request.finished == "error"
    assert isinstance(request.error, ConfigError)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ([], "object"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "properties.a.not"),
        ({"minLength": 2}, "minLength"),
        ({"anyOf": [{"type": "string"}, {"oneOf": []}]}, "anyOf.1.oneOf"),
        ({"$ref": "#/$defs/x", "minimum": 5}, "minimum"),
        ({"$ref": "http://x/y"}, "ref"),
        ({"type": "array", "items": {"type": "integer", "multipleOf": 5, "minimum": 1}}, "items.multipleOf"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": 'a"'}, "pattern"),
        ({"type": "string", "format": "nonsense"}, "format"),
        ({"type": "string", "maxLength": 1 << 20}, "maxLength"),
        ({"type": "object", "required": ["b"]}, "required"),
        ({"type": "object", "properties": {str(i): {} for i in range(200)}}, "properties"),
        ({"type": "array", "items": {"type": "float"}}, "float"),
        ({"enum": []}, "enum"),
        ({"type": "object", "description": "x" * (17 << 10)}, "bytes"),
    ],
)
def test_a_schema_that_would_not_be_met_to_the_letter_is_refused(grammars: Grammars, schema: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        grammars.json_schema(schema)


def test_a_schema_may_not_be_nested_without_end(grammars: Grammars) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConfigError, match="deep"):
        grammars.json_schema(schema)
