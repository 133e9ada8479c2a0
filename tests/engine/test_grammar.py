"""Output that follows a grammar: JSON, whatever the model would say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

import bytemodel
from kvthaw import Batch, Scheduler
from kvthaw.engine import grammar
from kvthaw.engine.grammar import Grammar, Grammars, TokenMasks
from kvthaw.engine.json_schema import check_schema
from kvthaw.engine.sampling import Sampler, Sampling
from kvthaw.engine.tool_calls import ANY_OBJECT, CallRules, tool_format
from kvthaw.errors import CacheError, ConfigError

pytest.importorskip("xgrammar", reason="needs pip install 'kvthaw[serve]'")

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_schema(grammars: Grammars, schema: Any) -> Grammar:
    return grammars.compile(grammars.read(schema)[0])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    from kvthaw.engine.hf.model import load

    return load(str(bytemodel.save(tmp_path_factory.mktemp("model"))), dtype="float32")


@pytest.fixture(scope="module")
def grammars(loaded: tuple[Any, Any]) -> Grammars:
    return Grammars(loaded[1], 258)


@pytest.fixture(scope="module")
def person(grammars: Grammars) -> Grammar:
    return of_schema(grammars, PERSON)


@pytest.fixture(scope="module")
def shipped() -> tuple[Any, Grammar]:
    """The tokenizer that ships, and the grammar of it."""
    from kvthaw.engine.hf.model import load

    model, tokenizer = load("shipped")
    return tokenizer, of_schema(Grammars(tokenizer, model.config.vocab_size), PERSON)


def follow(grammar: Grammar, tokenizer: Any, text: str) -> bool:
    """Whether the grammar allows a text and its end, token by token, by bits as by accepting."""
    end, vocabulary = tokenizer.eos_token_id, grammar.vocabulary
    matcher = grammar.matcher([end])
    masks = TokenMasks(2, vocabulary, torch.device("cpu"))
    masks.join(1, matcher)
    for token in [*tokenizer(text, add_special_tokens=False)["input_ids"], end]:
        allowed = masks(torch.zeros(2, vocabulary), slice(None)).isfinite()
        assert allowed[0].all()
        went = matcher.accept_token(token)
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
    guided = Sampling(temperature=temperature, seed=5, grammar=of_schema(grammars, PERSON), frequency_penalty=0.5)

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

    one, free, listed = run(
        guided, plain, Sampling(temperature=temperature, grammar=of_schema(grammars, ANY_OBJECT), max_tokens=60)
    )
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


def test_an_output_that_no_token_continues_ends_with_an_error(loaded: tuple[Any, Any], grammars: Grammars) -> None:
    batch = Batch(loaded[0], "full", max_seqs=1, capacity=64)
    request = batch.request([1, 2], sampling=Sampling(grammar=of_schema(grammars, ANY_OBJECT), max_tokens=9))
    request.take(5, None, 0)
    assert request.finished == "error"
    assert isinstance(request.error, ConfigError)


def test_a_token_without_text_continues_no_output() -> None:
    """Otherwise token 0 would continue an output that nothing can continue."""
    special = {"<none>": 0, '"': 1, "a": 2, "<end>": 3}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(BPE(vocab=special, merges=[])), pad_token="<none>", eos_token="<end>"
    )
    matcher = of_schema(Grammars(tokenizer, 4), {"type": "string", "pattern": "a*"}).matcher([3])
    assert [matcher.accept_token(token) for token in (1, 0, 2, 0, 1, 3)] == [True, False, True, False, True, True]


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
        ({"discriminator": {}, "oneOf": [{}]}, "oneOf is not served; anyOf is"),
        ({"description": "x", "allOf": [{}], "type": "object"}, "allOf"),
        *(({"type": "object", "required": wrong}, "required") for wrong in (5, None, "ab", [5], {"a": 1})),
        *(({"type": "string", "format": wrong}, "format") for wrong in ([], {}, None, 5)),
        *(({"type": "string", "pattern": wrong}, "pattern") for wrong in ([], None, 5)),
        *(({"type": wrong}, "type") for wrong in ([], [[]], {}, None, 5, ["string", 5])),
        *(({"type": "array", "minItems": wrong}, "minItems") for wrong in ([], True, None, 0.5, -1)),
        *(({"type": "integer", "minimum": wrong}, "minimum") for wrong in ([], True, None, "5")),
        *(({"type": "integer", "multipleOf": wrong}, "multipleOf") for wrong in (0, -1, 1025, 1.5, True, "2", None, [])),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "cannot be met: minItems is greater than maxItems: 3 > 1"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "cannot be met: minLength 3 is greater than maxLength 1"),
        ({"type": "integer", "minimum": 3, "maximum": 1}, "cannot be met: Invalid range"),
        ({"type": "array", "prefixItems": [{"type": "null"}], "maxItems": 0}, "cannot be met: maxItems is less than"),
        ({"type": "integer", "minimum": 1 << 63}, "minimum of an integer must be a whole number within 64 bits"),
        ({"type": ["integer", "null"], "maximum": 2.5}, "maximum of an integer must be"),
        ({"type": "object", "patternProperties": {}}, "schema.patternProperties is not served$"),
        ({"propertyNames": {}}, "schema.propertyNames is not served$"),
        ({"$ref": "#/$defs/x", "nullable": True}, "schema.nullable is not served$"),
        ({"properties": {}}, "schema.properties is not served without a type"),
        ({"type": "string", "pattern": "*a"}, "cannot be met: Expect element"),
        ({"enum": 5}, "enum"),
        ({"const": 1 << 63}, "64 bits"),
        ({"enum": [{"a": [-(1 << 64)]}]}, "64 bits"),
        ({"type": "string", "const": 5}, "not of its type"),
        ({"type": "integer", "enum": [1, True]}, "not of its type"),
        ({"type": "string", "const": float("nan")}, "finite"),
        ({"$ref": "#/default", "default": {"not": {}}}, "no schema within"),
        ({"$ref": "#"}, "no end"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no end"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "no end"),
        ({"anyOf": [{"$ref": "#"}, {"type": "array", "prefixItems": [{"$ref": "#"}]}]}, "no end"),
        ({"type": "object", "description": "x" * (17 << 10)}, "bytes"),
    ],
)
def test_a_schema_that_would_not_be_met_to_the_letter_is_refused(grammars: Grammars, schema: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        of_schema(grammars, schema)


def test_a_schema_may_not_be_nested_without_end(grammars: Grammars) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConfigError, match="deep"):
        of_schema(grammars, schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/c"}}, "required": ["b"]},
                   "c": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"type": ["integer", "null"], "const": None},
        {"const": (1 << 63) - 1},
    ],
)  # fmt: skip
def test_a_schema_that_something_finite_meets_is_served(grammars: Grammars, schema: Any) -> None:
    of_schema(grammars, schema)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.{1,4000}){1,4000}", "((a{1,1000}){1,1000}){1,1000}", "([a-z]{1,50} ?){1,50}", "a" * 300, "(.|..|...|....){1,32}",
        ".{1000}", "(((.{9}){9}){9}){9}", "a{1,129}", "a{2000000000}", "(" * 2000 + "." + "){9}" * 2000,
        "(a|" * 300 + "a" + ")*" * 300,
    ],
)  # fmt: skip
def test_a_large_pattern_is_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(ConfigError, match="pattern has"):
        of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize("pattern", [".?" * 65, ".*" * 60, "(.?){50}", "(.?){0,64}", "(.?.?.?.?.?.?.?.?){1,16}", "(.*a?){40}"])
def test_a_pattern_that_takes_minutes_for_a_large_vocabulary_is_refused(pattern: str) -> None:
    assert check_schema({"type": "string", "pattern": pattern}) > grammar.MOST_TRIES / 128_000


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("(.?é*)+", "aéé日", True),
        ("(a?){3}", "aaaa", False),
        ("()*", "a", False),
        ("[^é]*", '"', False),
        ("[ -é]*", "\\", False),
        ("[ -é]*", "aé", True),
        ("[😀-😎]+😀", "😎😀", True),
        ("[😀-😎]+", "a", False),
        (r"\é]?", "é]", True),
        ("[^]é", "日é", True),
        (r"[^\é]+", "é", False),
        ("(b+c)?", "b", False),
        ("(ab{1,3}|c)?", "abb", True),
        ("(ab{1,3}|c)?", "b", False),
        ("a*?b??(?:c)?", "aac", True),
    ],
)
def test_a_pattern_is_followed_within_json(
    grammars: Grammars, loaded: tuple[Any, Any], pattern: str, text: str, fits: bool
) -> None:
    """Beyond ASCII too, and if a group that may be empty is repeated. Nothing but the text's own end is a quote."""
    grammar = of_schema(grammars, {"type": "string", "pattern": pattern})
    assert follow(grammar, loaded[1], f'"{text}"') == fits
    matcher = grammar.matcher([loaded[1].eos_token_id])
    assert not all(matcher.accept_token(token) for token in b'"\t')


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 1}])
def test_a_counted_string_has_no_control_character(grammars: Grammars, loaded: tuple[Any, Any], schema: Any) -> None:
    form, rules = (
        tool_format("<tool_call> tools"),
        CallRules({"f": ({"type": "object", "properties": {"a": schema}}, True)}, True, False),
    )
    calls = grammars.compile(grammars.read_calls(form, rules)[0])
    for one, before in ((of_schema(grammars, schema), '"'), (calls, '<tool_call>\n{"name": "f", "arguments": {"a": "')):
        for text, fits in (("a", True), ("\t", False), ("\x00", False), ("\n", False)):
            matcher = one.matcher([loaded[1].eos_token_id])
            assert all(matcher.accept_token(token) for token in loaded[1](before + text)["input_ids"]) == fits


@pytest.mark.parametrize(
    "pattern", ["[一-鿿]{1,60}", "(rouge|bleu|doré)(, (rouge|bleu|doré))*", "[a-zà-ÿ]+( [a-zà-ÿ]+)*", ".*é.*"]
)
def test_usual_patterns_beyond_ascii_are_served(grammars: Grammars, pattern: str) -> None:
    of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[^\s\S]$",
        r"a[^\w\W]|b",
        r"\n",
        r"a\tb",
        "a\nb",
        "\x01",
        r"\0",
        r"[\n\r]+",
        r"[\b]",
        r"\v",
        r"[\f]",
        r"[^ -~é\W]",
        "[]",
    ],
)
def test_a_character_that_no_text_has_is_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(ConfigError, match="matches no character that JSON writes as itself"):
        of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    "pattern",
    [r"[\n ]", r"[^\n]", r"[^ -~]", "[^é]", r"\s", r"\S\W\D\w\d", "[é-ü]", r"[\d\]]", r"\.\/", "[^a]", "[a-]", r"[+\-]", "日"],
)
def test_characters_that_some_text_has_are_served(grammars: Grammars, pattern: str) -> None:
    of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize("pattern", ["a$b", "a^", "^a$|^b$", r"\ba", "(^a)", r"a\b", "$a"])
def test_an_anchor_within_a_pattern_is_refused(grammars: Grammars, pattern: str) -> None:
    """xgrammar passes over it."""
    with pytest.raises(ConfigError, match="anchor"):
        of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize("pattern", ["^a$", r"\^a\$", "[$^]a", r"[\]^]"])
def test_what_only_looks_like_an_anchor_is_served(grammars: Grammars, pattern: str) -> None:
    of_schema(grammars, {"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("schema", "passes"),
    [
        ({"type": "string", "pattern": ".{0,64}"}, 64),
        ({"type": "string", "pattern": ".*a.*b.*"}, 13),
        ({"type": "string", "pattern": ".?.?.?.?.?"}, 45),
        ({"type": "string", "pattern": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}, 32),
        ({"type": "string", "pattern": ".*" * 20}, 690),
        ({"type": "string", "maxLength": 40}, 40),
        ({"type": "string", "minLength": 4000}, 192),
        ({"type": "array", "prefixItems": [{"type": "string", "maxLength": n} for n in (30, 40, 50, 200)]}, 242),
        ({"type": "object", "properties": {str(n): {"type": "string"} for n in range(100)}}, 10),
    ],
)
def test_what_a_schema_takes_to_compile_is_told_before(schema: Any, passes: int) -> None:
    assert check_schema(schema) == pytest.approx(passes, rel=0.1, abs=1)


def test_a_schema_that_takes_long_to_compile_for_a_vocabulary_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "object", "properties": {str(n): {"type": "string", "maxLength": 200} for n in range(8)}}
    _, tries = grammars.read(schema)
    monkeypatch.setattr(grammar, "MOST_TRIES", tries - 1)
    with pytest.raises(ConfigError, match="passes over a vocabulary of 258 tokens"):
        of_schema(grammars, schema)


def test_a_grammar_that_was_compiled_is_known(grammars: Grammars) -> None:
    source, _ = grammars.read({"const": "to be known"})
    assert grammars.known(source) is None
    assert grammars.compile(source) is grammars.known(source) is grammars.compile(source)


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        (r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "2024-02-29", True),
        (r"[0-9]{4}-[0-9]{2}-[0-9]{2}", "2024-2-29", False),
        (r"([0-9]{1,3}\.){3}[0-9]{1,3}", "10.0.0.255", True),
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "123e4567-e89b-12d3-a456-426614174000", True),
        (r"\(?\d{3}\)?[-. ]?\d{3}[-. ]?\d{4}", "(555) 123-4567", True),
        (r"[A-Za-z_][A-Za-z0-9_]{0,63}", "a_name", True),
        (r"(red|green|blue)(, (red|green|blue))*", "red, blue", True),
    ],
)
def test_usual_patterns_are_served(grammars: Grammars, loaded: tuple[Any, Any], pattern: str, text: str, fits: bool) -> None:
    grammar = of_schema(grammars, {"type": "string", "pattern": pattern})
    assert follow(grammar, loaded[1], json.dumps(text)) == fits


def test_counts_of_a_whole_schema_are_bounded(grammars: Grammars) -> None:
    def properties(one: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": {str(i): {**one, "title": str(i)} for i in range(100)}}

    with pytest.raises(ConfigError, match="counts"):
        of_schema(grammars, properties({"type": "string", "maxLength": 4000}))
    with pytest.raises(ConfigError, match="multipleOf"):
        of_schema(grammars, properties({"type": "integer", "multipleOf": 100}))


def test_a_grammar_sees_each_token_first(loaded: tuple[Any, Any], person: Grammar) -> None:
    sampling = Sampling(temperature=1.0, seed=2, grammar=person)
    found = []
    for ahead in (True, False):
        scheduler = Scheduler(Batch(loaded[0], "full", max_seqs=3, capacity=200))
        scheduler.ahead = ahead
        plain = scheduler.submit(list(range(20)), max_new_tokens=12, stop=())
        scheduler.step()
        scheduler.step()
        told = [scheduler.submit(list(range(9)), max_new_tokens=60, stop=loaded[1].eos_token_id, sampling=sampling), plain]
        while scheduler.busy:
            assert all(request.error is None for request in scheduler.step())
        found.append([request.tokens for request in told])
    assert found[0] == found[1]
    batch = Batch(loaded[0], "full", max_seqs=3, capacity=200)
    request = batch.join(list(range(9)), max_new_tokens=60, stop=loaded[1].eos_token_id, sampling=sampling)
    batch.prefill(request)
    with pytest.raises(CacheError, match="grammar"):
        batch.launch()
    assert batch.read() == [request]
