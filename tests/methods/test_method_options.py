"""Options of methods, from text and from Python."""

from __future__ import annotations

import importlib
import itertools
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args, get_type_hints

import pytest
from transformers import PreTrainedModel

import kvthaw
from kvthaw import METHODS
from kvthaw.errors import ConfigError
from kvthaw.index.tree_config import TreeConfig
from kvthaw.methods import resolve
from kvthaw.methods.options import check, digest, written
from kvthaw_baselines.index.nodes import NodeConfig


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("p=0.5", ("p", 0.5)),
        ("keep=2", ("keep", 2)),
        ("rotate=False", ("rotate", False)),
        ("clusters=None", ("clusters", None)),
        ("filters=(1, 3)", ("filters", (1, 3))),
        ("distance=l2", ("distance", "l2")),
        ("reuse", ("reuse", "")),
    ],
)
def test_an_option_of_a_name_is_read(text: str, option: tuple[str, object]) -> None:
    assert written(text) == option


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pariskv:beta=x", "beta is 'x'; it must be a number or None"),
        ("pariskv-plus:centre=1", "centre is 1; it must be True or False"),
        ("pariskv:votes=many", "votes is 'many'; it must be one of tiered, binary"),
        ("clusterkv:keep=True", "keep is True; it must be a whole number"),
        ("clusterkv:keep=1.5", "keep is 1.5; it must be a whole number"),
        ("prkv:share=most", "share is 'most'; it must be a number or one of auto"),
        ("twilight:base=3", "base is 3; it must be a word or Method"),
        ("omnikv:filters=2", "filters is 2; it must be a tuple, each of it a whole number or None"),
        ("omnikv:filters=(2, 0.5)", r"filters is \(2, 0.5\); it must be a tuple"),
        ("quest:page=0", "^page is 0; it must be at least 1"),
        ("arkvale:page=-1", "^page is -1; it must be at least 1"),
        ("freekv:page=0", "^page is 0; it must be at least 1"),
        ("prkv:window=0", "^window is 0; it must be at least 1"),
        ("pariskv:buffer=0", "^buffer is 0; it must be at least 1"),
        ("pqcache:sink=-1", "^sink is -1; it must be at least 0"),
        ("magicpig:window=0", "^window is 0; it must be at least 1"),
        ("shadowkv:chunk=-1", "^chunk is -1; it must be at least 1"),
        ("streaming:sink=-1", "^sink is -1; it must be at least 0"),
        ("clusterkv:keep=-1", "^keep is -1; it must be at least 0"),
        ("icecache-digest:threads=-1", "^threads is -1; it must be at least 0"),
        ("icecache-digest:reuse", "reuse is ''; it must be a whole number"),
        (
            "icecache-digest:page=4",
            "icecache-digest has no option 'page'; did you mean 'page_size'. There are: .*prefetch, .*page_size",
        ),
        ("icecache-digest:promote=often", "promote is 'often'; it must be a number"),
        ("icecache-digest-device:page=4", "icecache-digest-device has no option 'page'; there are: .*field"),
        ("icecache:preset=ours", "preset is 'ours'; it must be one of paper, code"),
        ("pariskv:kv_dtyp=fp8", "no option 'kv_dtyp'; did you mean 'kv_dtype'"),
        ("pariskv:budget=64", "no option 'budget'; .* a separate argument"),
        ("quest:pages=4", "method quest has no option 'pages'; did you mean 'page'. There are: page, policy$"),
    ],
)
def test_what_a_method_does_not_take_is_named(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        resolve(name)


def test_options_are_listed_as_they_are_written() -> None:
    def mine(*, topK: int = 4) -> None: ...

    with pytest.raises(ConfigError, match=r"did you mean 'topK'\? There are: topK$"):
        check("mine", {"topk": 8}, mine)


def numbers(name: str) -> list[str]:
    """The options of a method that may be numbers."""
    make = METHODS[name]
    takes: list[Any] = [getattr(make, "func", make)]
    if name.startswith("icecache"):
        takes.append(NodeConfig if name == "icecache-digest-device" else TreeConfig)
    kinds = {option: kind for one in takes for option, kind in get_type_hints(one).items() if option != "return"}
    able = {option for option, kind in kinds.items() if any(each in (int, float) for each in (kind, *get_args(kind)))}
    return [option for option in kinds if option in able - {"tree", "seed"}]


@pytest.mark.parametrize("name", METHODS)
def test_a_number_out_of_range_is_refused_before_there_is_a_prompt(name: str, llama: PreTrainedModel) -> None:
    makes: list[Any] = [kvthaw.Cache, kvthaw.attach, partial(kvthaw.Batch, max_seqs=1, capacity=100)]
    for option, make in zip(numbers(name), itertools.cycle(makes), strict=False):
        with pytest.raises(ConfigError, match=rf"\b{option} is -7\b"):
            make(llama, name, **{option: -7})


def test_what_a_head_is_too_small_for_is_refused_before_there_is_a_prompt(llama: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="parts is 3; it must be at least 1 and divide head_dim, 16"):
        kvthaw.Cache(llama, "pqcache", parts=3)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_its_own_defaults(name: str) -> None:
    import inspect

    own = {
        one.name: one.default for one in inspect.signature(METHODS[name]).parameters.values() if one.kind is one.KEYWORD_ONLY
    }
    check(name, own, METHODS[name])
    resolve(name, **own)


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"full", "streaming"}))
def test_every_method_says_what_is_where_and_how_a_group_agrees(name: str) -> None:
    import inspect

    make = METHODS[name]
    text = inspect.getdoc(getattr(make, "func", make))
    assert text is not None
    for what in (r"\b[Hh]ost\b", r"\b[Dd]evice\b", r"GQA|heads of a group"):
        assert re.search(what, text), f"the docstring of {name} does not speak of {what}"


def test_every_method_has_a_digest_of_its_own() -> None:
    found = {name: digest(resolve(name)) for name in METHODS}
    assert found == {name: digest(resolve(name)) for name in METHODS}
    assert len(set(found.values())) == len(METHODS)


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("quest:page=16", "quest"),
        ("twilight:base=quest", "twilight"),
        ("icecache-digest:transfer=bulk", "icecache-digest"),
        ("clusterkv:clusters_per_batch=8:policy=each", "clusterkv:preset=code"),
        ("snapkv:refresh=128", "snapkv-refreshed"),
    ],
)
def test_a_digest_is_of_what_options_come_to(name: str, same: str) -> None:
    assert digest(resolve(name)) == digest(resolve(same))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "quest:page=8",
            "twilight:base=arkvale",
            "icecache-digest:outliers=3",
            "icecache-digest:seed=0",
            "icecache-digest-device:field=64",
        ),
        *("pariskv:beta=0.1", "pariskv:window=128", "clusterkv:keep=2", "icecache-digest:reuse=2", "omnikv:filters=(2,)"),
        *("infinigen:prefetch=False", "snapkv-refreshed:width=16"),
    ],
)
def test_a_digest_tells_options_apart(name: str) -> None:
    assert digest(resolve(name)) != digest(resolve(name.partition(":")[0]))


def test_a_digest_knows_defaults_that_no_method_names(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, slots=True)
    class Wider(TreeConfig):
        query_beam: int = 77

    before, given = digest(resolve("icecache")), digest(resolve("icecache:query_beam=77"))
    monkeypatch.setattr(importlib.import_module("kvthaw.methods.icecache"), "TreeConfig", Wider)
    assert digest(resolve("icecache")) == given != before

    def narrow(shape: Any, *, wide: int = 2) -> Any: ...
    def wide(shape: Any, *, wide: int = 3) -> Any: ...

    method = resolve("oracle")
    assert digest(replace(method, index=narrow)) != digest(replace(method, index=wide))
    with pytest.raises(TypeError, match="an option is"):
        digest(replace(method, anchors={1, 2}))  # type: ignore[arg-type]
