"""kvthaw methods."""

from __future__ import annotations

import json

import pytest

import kvthaw
from kvthaw import METHODS
from said import Said, refused


def test_methods_are_those_of_the_list() -> None:
    records = json.loads(Said("methods", "--json").out)
    assert [record["name"] for record in records] == list(METHODS)
    by_name = {record["name"]: record for record in records}
    assert by_name["full"]["kv"] == "dense"
    assert by_name["streaming"]["kv"] == "evicts"
    assert by_name["oracle"] == {
        "name": "oracle",
        "paper": "-",
        "unit": "token",
        "kv": "offloads",
        "decides": "device",
        "graph_safe": True,
        "bytes_a_key": 256,
        "differs_from_the_paper_in": "-",
        "choose_it_when": "as a bound: what exact top-k would reach",
    }
    assert by_name["h2o"]["kv"] == "evicts"
    table = Said("methods", columns=80).out
    assert all(name in table for name in METHODS)
    assert max(map(len, table.splitlines())) <= 80
    assert all(record["choose_it_when"] != "-" for record in records)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_its_options(name: str) -> None:
    """Its defaults are options that it takes."""
    (told,) = Said("methods", name, "--json").records
    assert told["name"] == name
    assert len(told["text"]) > 60
    given = {option: of["default"] for option, of in told["options"].items()}
    assert kvthaw.methods.resolve(name, **given).name == name


@pytest.mark.parametrize("name", ["full", "icecache", "pariskv", "prkv"])
def test_a_method_tells_its_options_in_a_table(name: str) -> None:
    (told,) = Said("methods", name, "--json").records
    said = Said("methods", name).out
    assert said.startswith(f"{name}: {told['text'][:40]}")
    for option, of in told["options"].items():
        row = next(line for line in said.splitlines() if line.split()[:1] == [option])
        assert str(of["default"]) in row
        assert of["takes"] in row


@pytest.mark.parametrize("name", METHODS)
def test_a_method_fits_a_narrow_terminal(name: str) -> None:
    said = Said("methods", name, columns=80).out
    assert max(map(len, said.splitlines())) <= 80
    assert " ".join(said.split()).startswith(" ".join(f"{name}: {kvthaw.methods.options.text(METHODS[name])}".split()))


@pytest.mark.parametrize("name", METHODS)
def test_a_method_tells_its_paper_and_how_it_differs(name: str) -> None:
    method, said = kvthaw.methods.resolve(name), Said("methods", name, columns=2000).out
    paper = said.partition("Paper: ")[2].splitlines()
    assert paper[:1] == ([method.paper] if method.paper != "-" else [])
    assert ("Differs from the paper in: " in said) == (method.differs != "-")
    assert method.differs == "-" or method.differs in said
    assert f"Choose it when: {method.choose}" in said


def test_a_method_without_a_paper_has_none_in_the_table() -> None:
    (line,) = (line for line in Said("methods").out.splitlines() if line.startswith("  thaw "))
    assert line.split()[1] == "the"


def test_the_methods_of_papers_say_how_they_differ() -> None:
    papers = [resolved for name in METHODS if (resolved := kvthaw.methods.resolve(name)).paper != "-"]
    assert [method.name for method in papers if method.differs == "-"] == []


@pytest.mark.parametrize(
    ("option", "takes"),
    [("descend", "one of node, level, digest"), ("unit", "one of page, token"), ("promotion", "one of random, in_order")],
)
def test_an_option_of_a_few_words_tells_them(option: str, takes: str) -> None:
    (told,) = Said("methods", "icecache-digest", "--json").records
    assert told["options"][option]["takes"] == takes


def test_options_are_told_with_what_they_take() -> None:
    (told,) = Said("methods", "prkv", "--json").records
    assert told["options"]["share"] == {"default": 0.25, "takes": "a number or one of auto"}
    (told,) = Said("methods", "icecache-reuse", "--json").records
    assert told["options"]["reuse"] == {"default": 3, "takes": "a whole number"}
    assert told["options"]["transfer"] == {"default": "bulk", "takes": "one of uva, bulk"}
    assert told["options"]["query_beam"] == {"default": 16, "takes": "a whole number"}  # the k of algorithm 4
    (told,) = Said("methods", "icecache-digest-device", "--json").records
    assert "policy" in told["options"]
    refused(Said("methods", "parisk"), 1, "method is 'parisk'; did you mean 'pariskv'?")


def test_auto_tells_what_it_chooses() -> None:
    said = Said("methods", "auto").out
    assert said.startswith("auto: Full attention while")
    assert all(word in said for word in ("NVIDIA H100", "35,700", "thaw", "icecache-digest"))
    (told,) = Said("methods", "auto", "--json").records
    assert [one["then"] for one in told["by_device"]] == [*["thaw"] * 3, "icecache-digest:remainder=64"]
    assert "'auto'" in Said("methods", "autto").err
