"""RULER and BABILong: lengths, places of the facts, published formats, metrics."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from word_pieces import WordPieces

from kvthaw.engine.hf.model import shipped_path
from kvthaw.errors import ConfigError
from lab.evaluate.assets import ASSETS
from lab.evaluate.tasks import SUITES, TASKS, Sample, find, named
from lab.evaluate.tasks.babilong import read_stories
from lab.evaluate.tasks.documents import read_hotpot, read_squad
from lab.evaluate.tasks.words import COMMON

NAMES = [name for name in TASKS if name.startswith(("ruler_", "babilong_"))]
PLACED = [name for name in NAMES if name not in ("ruler_cwe", "ruler_fwe")]
SQUAD = {
    "data": [
        {
            "title": "t",
            "paragraphs": [
                {
                    "context": f"Fact {i} is that {word} grows here.",
                    "qas": [
                        {
                            "id": str(i),
                            "question": f"What is fact {i}?",
                            "answers": [{"text": word, "answer_start": 13 + len(str(i))}],
                        }
                    ],
                }
                for i, word in enumerate(("moss", "fern", "reed"))
            ],
        },
        {"title": "u", "paragraphs": [{"context": "Nothing grows there.", "qas": []}]},
    ]
}
HOTPOT = [
    {
        "question": "Who rows?",
        "answer": "Ida",
        "context": [["Boat", ["The boat is red. ", "Ida rows it."]], ["Ida", ["Ida is nine."]]],
        "supporting_facts": [["Boat", 1]],
    },
    {"question": "Who swims?", "answer": "Bo", "context": [["Sea", ["Bo swims."]]], "supporting_facts": []},
]


@pytest.fixture(scope="module")
def shipped() -> Any:
    """The tokenizer of the shipped model."""
    return AutoTokenizer.from_pretrained(shipped_path())


@pytest.fixture
def tokenizer() -> WordPieces:
    return WordPieces()


def make(tokenizer: Any, name: str, length: int = 1500, seed: int = 0, **settings: Any) -> Sample:
    return TASKS[name].sample(tokenizer, length=length, seed=seed, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_length_seed_and_score(shipped: Any, tokenizer: Any, name: str) -> None:
    task = TASKS[name]
    first, again, other = (make(tokenizer, name, seed=seed) for seed in (3, 3, 4))
    assert first == again != other
    assert len(shipped(make(shipped, name, seed=3).prompt)["input_ids"]) == 1500
    for sample in (first, other):
        assert len(tokenizer(sample.prompt)["input_ids"]) == 1500
        assert all(answer in sample.context for answer in sample.answers)
        said = f" It is {', '.join(sample.answers)}."
        assert (task.score(sample, said), task.score(sample, said.upper()), task.score(sample, "")) == (1.0, 1.0, 0.0)
    assert task.score(first, f" {', '.join(answer[::-1] for answer in first.answers)}") == 0.0


@pytest.mark.parametrize(("name", "depth"), list(zip(PLACED, itertools.cycle([0.0, 0.7]), strict=False)))
def test_depth(tokenizer: Any, name: str, depth: float) -> None:
    sample = make(tokenizer, name, length=4000, depth=depth, seed=2)
    assert sample.depth == pytest.approx(depth, abs=0.12)


def test_names_stand_for_tasks() -> None:
    assert len(SUITES["ruler"]) == 13
    assert all(name in TASKS for names in SUITES.values() for name in names)
    assert named("kv-retrieval, babilong,passkey,kv_retrieval") == ["kv_retrieval", *SUITES["babilong"], "passkey"]
    with pytest.raises(
        ConfigError, match=r"task is 'rulers'; did you mean 'ruler'[?] There are: niah, ruler, babilong, passkey"
    ):
        named("passkey,rulers")


def test_the_metrics_are_the_published_ones() -> None:
    niah = Sample("", "", ("1234567", "7654321"), None)
    assert TASKS["ruler_niah_multivalue"].score(niah, "are 91234567.") == 0.5, "a substring, as published"
    qa = Sample("", "", ("the North Sea", "Baltic"), None)
    assert [TASKS["ruler_qa_1"].score(qa, said) for said in ("in the BALTIC", "the north sea", "North")] == [1.0, 1.0, 0.0]
    place = Sample("", "Where is the milk before the garden?", ("kitchen",), None)
    score = TASKS["babilong_qa3"].score
    assert score(place, "Before the garden the milk was in the Kitchen. Not the office.") == 1.0
    assert [score(place, said) for said in ("kitchen or office", "Nowhere. kitchen", "garden", "")] == [0.0, 0.0, 0.0, 0.0]


def test_a_text_is_for_ruler_tasks_whose_haystack_is_text(tokenizer: Any) -> None:
    text = "Snow fell. Nobody spoke! Why? The lamp went out."
    given = {name: "The lamp went out." in make(tokenizer, name, text=text).context for name in SUITES["ruler"]}
    essays = {f"ruler_niah_{kind}" for kind in ("single_2", "single_3", "multikey_1", "multivalue", "multiquery")}
    assert {name for name, used in given.items() if used} == essays
    assert "The lamp went out." in make(tokenizer, "babilong_qa2", text=text).context


@pytest.mark.parametrize(("length", "times", "others"), [(2500, 6, 1), (6000, 30, 3)])
def test_common_words(tokenizer: Any, length: int, times: int, others: int) -> None:
    sample = make(tokenizer, "ruler_cwe", length=length)
    listed = sample.context.split("Memorize the ones that appear most often.\n")[-1]
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", listed)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert {word for word, n in counts.items() if n == times} == set(sample.answers)
    assert {n for word, n in counts.items() if word not in sample.answers} == {others}
    assert len(sample.answers) == COMMON
    assert sample.context.count("The top 10 words that appear most often in the list are:1. ") == 1, "the example is solved"


def test_words_that_run_out_are_said(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"length 400000 is too long for this task: all there is of it takes \d+ tokens"):
        make(tokenizer, "ruler_cwe", length=400_000)


def test_frequent_words(tokenizer: Any) -> None:
    sample = make(tokenizer, "ruler_fwe", length=4000)
    words = Counter(sample.context.split("coded words. ")[1].split())
    assert [word for word, _ in words.most_common(4)] == ["...", *sample.answers]
    assert len(set(words.values())) > 4
    assert all(re.fullmatch(r"[a-z]{6}|\.\.\.", word) for word in words)


def test_chains_begin_with_a_solved_example(tokenizer: Any) -> None:
    sample = make(tokenizer, "ruler_vt")
    shown, asked = sample.context.split("\n\n\n\n")
    assert shown.count("VAR ") == asked.count("VAR ") == 5 + 4
    solved = shown.split("they are:")[1].split()
    assert [len(name) for name in solved] == [3] * 5
    assert [f"VAR {b} = VAR {a}" in shown for a, b in itertools.pairwise(solved)] == [True] * 4
    assert shown.startswith("Memorize and track")
    assert asked.startswith("Memorize and track")


@pytest.mark.parametrize("name", ["ruler_qa_1", "ruler_qa_2"])
def test_documents(tokenizer: Any, name: str) -> None:
    read = read_squad if name.endswith("1") else read_hotpot
    library = read(None)
    asked = {question.query: question for question in library.questions}
    seen = [make(tokenizer, name, seed=seed) for seed in range(4)]
    for sample in seen:
        numbers = [int(number) for number in re.findall(r"^Document (\d+):$", sample.context, re.MULTILINE)]
        assert numbers == list(range(1, len(numbers) + 1))
        question = asked[sample.question.split("Question: ")[1].removesuffix(" Answer:")]
        for index in question.gold:
            assert sample.context.count(library.documents[index]) == 1
        assert question.answers == sample.answers
    assert len({sample.question for sample in seen}) == 4
    assert all(any(answer in library.documents[i] for i in q.gold for answer in q.answers) for q in library.questions)


def test_documents_from_files(tokenizer: Any, tmp_path: Path) -> None:
    squad, hotpot = tmp_path / "squad.json.gz", tmp_path / "hotpot.json"
    with gzip.open(squad, "wt") as file:
        json.dump(SQUAD, file)
    hotpot.write_text(json.dumps(HOTPOT))
    sample = find("ruler_qa_1", squad).sample(tokenizer, length=400, seed=0, depth=0.5)
    (gold,) = (i for i, word in enumerate(("moss", "fern", "reed")) if sample.answers == (word,))
    assert sample.question.endswith(f"Question: What is fact {gold}? Answer:")
    assert sample.context.count(f"Fact {gold} is") == 1
    assert sample.context.count("Nothing grows there.") > 1, "others come again"
    assert sample.context.index(f"Fact {(gold + 1) % 3}") < sample.context.index("Nothing"), "the same article comes first"
    swims = {one.answers: one for one in (find("ruler_qa_2", hotpot).sample(tokenizer, length=300, seed=s) for s in (0, 1))}
    assert set(swims) == {("Ida",), ("Bo",)}
    assert "Boat\nThe boat is red. Ida rows it." in swims[("Ida",)].context
    site = tmp_path / "site.jsonl"
    record = {"question": "Who rows?", "answer": "Ida", "title_a": "Boat", "para_a": ["Ida ", "rows."], "title_b": "Ida"}
    site.write_text(json.dumps({**record, "para_b": ["Ida is nine."], "distractors": [["Sea", ["It is blue."], 0.5]]}) + "\n")
    task = find("ruler_qa_2", site)
    with pytest.raises(ValueError, match=r"all there is of it takes \d+ tokens") as told:
        task.sample(tokenizer, length=400, seed=0)
    least = int(re.findall(r"\d+", str(told.value))[-1])
    rows = task.sample(tokenizer, length=least, seed=0)
    assert all(document in rows.context for document in ("Boat\nIda rows.", "Ida\nIda is nine.", "Sea\nIt is blue."))
    for problem, text in (("not JSON", "{"), ("layout", "[]"), ("layout", '{"data": [{}]}'), ("no question", '{"data": []}')):
        bad = tmp_path / f"{len(text)}.json"
        bad.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            find("ruler_qa_1", bad)
    with pytest.raises(ConfigError, match="not in HotpotQA's layout"):
        find("ruler_qa_2", squad)


def test_babi_stories(tokenizer: Any, tmp_path: Path) -> None:
    stories = {name: read_stories(next((ASSETS / "babilong").glob(f"{name}_*"))) for name in ("qa1", "qa2", "qa5")}
    first = stories["qa1"][1]
    assert first.facts[:2] == ("John travelled to the hallway.", "Mary journeyed to the bathroom.")
    assert (first.question, first.answer, len(first.facts)) == ("Where is Mary?", "bathroom", 4)
    assert [first.facts[i] for i in first.needed] == ["Mary journeyed to the bathroom."]
    for name, known in stories.items():
        assert len(known) == 100
        sample = make(tokenizer, f"babilong_{name}", seed=7, depth=0.4)
        question = sample.question.removeprefix("\n</context>\nQuestion: ")
        assert sample.prompt.endswith(question)
        body = sample.context.split("<context>\n")[1]
        fits = [one for one in known if one.question == question and all(fact in body for fact in one.facts)]
        assert any((one.answer,) == sample.answers for one in fits)
    file = tmp_path / "qa1_own_test.txt"
    file.write_text("1 Ida went to the office.\n2 Ida went to the garden.\n3 Where is Ida? \tgarden\t2\n")
    sample = find("babilong_qa1", tmp_path).sample(tokenizer, length=900, seed=5, depth=0.5)
    assert sample.answers == ("garden",)
    body = sample.context.split("<context>\n")[1]
    assert body.index("Ida went to the office.") < body.index("Ida went to the garden.")
    assert sample.depth == pytest.approx(body.index("Ida went to the garden.") / len(body))
    with pytest.raises(ConfigError, match=r"holds no file qa2_\*\.txt"):
        find("babilong_qa2", tmp_path)
    for bad in ("no number", "1 Who?\tyou", "1 Ida left.\n2 Who? \tIda\t"):
        file.write_text(bad)
        read_stories.cache_clear()
        with pytest.raises(ConfigError, match="bAbI"):
            find("babilong_qa1", file)
