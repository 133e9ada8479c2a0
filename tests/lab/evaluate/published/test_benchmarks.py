"""Prompts as published, and metrics on gold and on wrong answers."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvthaw.errors import ConfigError
from lab.evaluate.published import BENCHMARKS, FAMILIES, Generation, benchmarks
from lab.evaluate.published.base import truncate
from lab.evaluate.published.longbench import CLASSES, METRICS
from lab.evaluate.published.longgenbench import entries, holds

GOLD = Path(__file__).parent / "gold"
CHOICES = {"question": " Who? ", **{f"choice_{letter}": f"the {letter}th" for letter in "ABCD"}}
V2 = {"_id": "x", "context": "Long ago.", **CHOICES, "answer": "C", "difficulty": "hard", "length": "short", "domain": "d"}


def score(name: str, record: dict[str, Any], output: str) -> float:
    benchmark = BENCHMARKS[name]
    return benchmark.score(benchmark.item(record, 0), output)["score"]


def test_gsm8k_asks_after_eight_examples() -> None:
    items = BENCHMARKS["gsm8k"].load(str(GOLD / "gsm8k.jsonl"))
    first = items[0]
    assert first.prompt.count("Q: ") == 9
    assert first.prompt.count("The answer is") == 8
    assert "The answer is 6.\n\nQ: If there are 3 cars" in first.context
    assert first.question.startswith("Q: Janet’s ducks lay 16 eggs")
    assert first.question.endswith("farmers' market?\nA:")
    assert [item.gold["answer"].replace(",", "") for item in items] == ["18", "3", "2125"]


@pytest.mark.parametrize("at", range(3))
def test_gsm8k_takes_the_stated_number(at: int) -> None:
    benchmark = BENCHMARKS["gsm8k"]
    item = benchmark.load(str(GOLD / "gsm8k.jsonl"))[at]
    gold = item.gold["answer"]
    assert benchmark.score(item, f" 9 and 9. The answer is {gold}.") == {"score": 1.0, "flexible": 1.0}
    assert benchmark.score(item, f" The answer is ${gold}.00. Then 77.") == {"score": 1.0, "flexible": 0.0}
    assert benchmark.score(item, f" It is {gold}") == {"score": 0.0, "flexible": 1.0}
    assert benchmark.score(item, f" The answer is {gold}1.") == {"score": 0.0, "flexible": 0.0}
    assert benchmark.score(item, "") == {"score": 0.0, "flexible": 0.0}


@pytest.mark.parametrize("at", range(4))
def test_math500_knows_its_own_solutions(at: int) -> None:
    pytest.importorskip("math_verify")
    benchmark, record = BENCHMARKS["math500"], json.loads((GOLD / "math500.jsonl").read_text().split("\n")[at])
    item = benchmark.item(record, at)
    assert item.id == record["unique_id"]
    assert item.prompt.endswith(r"put your final answer within \boxed{}.")
    assert benchmark.score(item, record["solution"])["score"] == 1.0
    assert benchmark.score(item, r"so \boxed{123456}")["score"] == 0.0
    assert benchmark.score(item, record["answer"]) == {"score": 0.0, "answered": 0.0}  # not in a box


@pytest.mark.parametrize("fields", [("problem", "expected_answer"), ("Problem", "Answer"), ("problem", "answer")])
def test_aime_compares_whole_numbers_whatever_copy_of_the_data(fields: tuple[str, str]) -> None:
    record = {fields[0]: "Find it.", fields[1]: "073", "id": "I-1"}
    assert score("aime24", record, r"\boxed{73}") == score("aime25", record, r"thus \boxed{073}.") == 1.0
    assert score("aime24", record, r"\boxed{74}") == score("aime24", record, "73") == 0.0


def test_gpqa_shuffles_the_choices_and_knows_where_the_right_one_is() -> None:
    benchmark = BENCHMARKS["gpqa_diamond"]
    record = {"Question": "Which?", "Correct Answer": "right", **{f"Incorrect Answer {i}": f"wrong{i}" for i in (1, 2, 3)}}
    places = set()
    for number in range(40):
        item = benchmark.item(record, number)
        assert item == benchmark.item(record, number)
        letter = item.gold["answer"]
        places.add(letter)
        assert f"\n{letter}) right" in item.prompt
        assert all(f"wrong{i}" in item.prompt for i in (1, 2, 3))
        assert benchmark.score(item, f"because.\n**Answer: {letter}**")["score"] == 1.0
        other = "ABCD"[("ABCD".index(letter) + 1) % 4]
        assert benchmark.score(item, f"Answer: {other}")["score"] == benchmark.score(item, letter)["score"] == 0.0
    assert places == set("ABCD")


def test_longbench_v2_asks_as_published() -> None:
    item = BENCHMARKS["longbench_v2"].item(V2, 0)
    assert item.prompt == (
        "Please read the following text and answer the question below.\n\n<text>\nLong ago.\n</text>\n\n"
        "What is the correct answer to this question: Who?\nChoices:\n(A) the Ath\n(B) the Bth\n(C) the Cth\n(D) the Dth\n\n"
        'Format your response as follows: "The correct answer is (insert answer here)".'
    )
    assert score("longbench_v2", V2, "The correct answer is (C).") == 1.0
    assert score("longbench_v2", V2, "**The correct answer is C**") == 1.0
    assert score("longbench_v2", V2, "The correct answer is (B), not The correct answer is (C)") == 0.0
    assert score("longbench_v2", V2, "C") == 0.0
    parts = BENCHMARKS["longbench_v2"].score(item, "The correct answer is (C)")
    assert parts == {"score": 1.0, "answered": 1.0, "hard": 1.0, "short": 1.0, "hard short": 1.0}


def test_longbench_v2_with_steps_asks_twice() -> None:
    benchmark = BENCHMARKS["longbench_v2_cot"]
    item = benchmark.item(V2, 0)
    assert item.question.endswith("(D) the Dth\n\nLet’s think step by step:")
    more = benchmark.follow_up(item, " It was C.\n")
    assert more is not None
    prompt, generation = more
    assert "The text is too long and omitted here." in prompt
    assert "Long ago" not in prompt
    assert "Let’s think step by step: It was C.\n\nBased on the above, what is the single, most likely answer choice?" in prompt
    assert (benchmark.generation.max_new_tokens, generation.max_new_tokens) == (1024, 128)
    assert BENCHMARKS["longbench_v2"].follow_up(item, "") is None


LONGBENCH = {one.file: one for name, one in BENCHMARKS.items() if name.startswith("longbench_") and "v2" not in name}


def test_families_hold_what_was_published_together() -> None:
    assert [len(FAMILIES[name]) for name in ("longbench", "longbench_en", "aime", "gpqa", "longgenbench")] == [21, 16, 2, 3, 2]
    chinese = {one.name for one in FAMILIES["longbench"]} - {one.name for one in FAMILIES["longbench_en"]}
    assert {"longbench_multifieldqa_zh", "longbench_passage_retrieval_zh", "longbench_lsht"} < chinese
    assert benchmarks("longbench-en") == FAMILIES["longbench_en"]
    assert [one.name for one in benchmarks("gsm8k")] == ["gsm8k"]
    assert benchmarks("passkey") == ()
    assert not {*FAMILIES} & {*BENCHMARKS}


def test_longbench_has_its_21_tasks() -> None:
    assert len(LONGBENCH) == 21
    assert set(LONGBENCH) == set(METRICS) | set(CLASSES)


@pytest.mark.parametrize("name", LONGBENCH)
def test_longbench_gold_answers_are_right(name: str) -> None:
    gold = {"passage_retrieval_en": "Paragraph 3", "passage_retrieval_zh": "段落3", "passage_count": "3"}.get(name, "red wine")
    if name in ("dureader", "vcsum", "multifieldqa_zh"):
        pytest.importorskip("jieba")
    record = {"context": "CONTEXT", "input": "{INPUT}", "answers": ["other 9", gold], "all_classes": [gold, "wine", "ale"]}
    if "retrieval" in name:
        record["answers"] = [gold]
    benchmark = LONGBENCH[name]
    item = benchmark.item(record, 0)
    record["question"] = record.pop("input")  # as the copy on the hub calls it
    assert benchmark.item(record, 0) == item
    assert item.context.endswith("CONTEXT")
    assert ("{INPUT}" in item.question) == (name not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc"))
    assert benchmark.score(item, gold)["score"] == pytest.approx(1.0, abs=1e-6)
    assert benchmark.score(item, "4")["score"] < 0.5
    assert benchmark.score(item, "")["score"] == 0.0


def test_longbench_takes_the_first_line_where_published_code_does() -> None:
    record = {"context": "", "input": "", "answers": ["red wine"], "all_classes": ["red wine", "ale"]}
    for name in ("trec", "triviaqa", "samsum"):
        assert score(f"longbench_{name}", record, "\nred wine\nale and more") == pytest.approx(1.0, abs=1e-6)
    assert score("longbench_hotpotqa", record, "red wine\nale and more") < 1.0


LONGGEN = {
    "prompt": "Build a tower. #*# Floor 1:",
    "checks_once": {"2": "music school"},
    "checks_range": {"3": "the gym", "4": "the gym"},
    "checks_periodic": {"2": "coffee shop", "4": "coffee shop"},
    "type": "Floor",
    "prefix": "#*# Floor 1:",
    "number": 4,
}


def test_longgenbench_counts_entries_and_demands() -> None:
    benchmark = BENCHMARKS["longgenbench_16k"]
    item = benchmark.item(LONGGEN, 0)
    whole = (
        " a lobby\n#*# Floor 2: a Music School, a coffee shop\n#*# Floor 3: gym\n#*# Floor 4: Gym and coffee shop *** finished"
    )
    kinds = ("completion", "once", "range", "periodic", "stic1")
    assert benchmark.score(item, whole) == dict.fromkeys(("score", *kinds), 1.0)
    half = " a lobby\n#*# Floor 2: a music hall and a coffee shop\n#*# Floor 3: a gymnasium"
    found = benchmark.score(item, half)
    assert found["completion"] == 0.75
    assert (found["once"], found["range"], found["periodic"]) == (0.0, 0.0, 0.5)  # of all that was demanded
    assert found["score"] == pytest.approx(0.5 / 3)
    assert found["stic1"] == pytest.approx(1 / 3)  # of what was demanded of entries that are there
    assert benchmark.score(item, "")["completion"] == 0.25  # the prompt begins the first one


def test_longgenbench_may_be_judged_by_a_model() -> None:
    asked: list[str] = []

    def judge(prompt: str) -> str:
        asked.append(prompt)
        return "Yes." if "coffee" in prompt.split("include")[1] else "no"

    benchmark = BENCHMARKS["longgenbench_16k"]
    found = benchmark.score(benchmark.item(LONGGEN, 0), " x #*# Floor 2: y #*# Floor 4: z", judge)
    assert (found["once"], found["range"], found["periodic"]) == (0.0, 0.0, 1.0)
    assert len(asked) == 4  # nothing is asked of an entry that is not there
    assert asked[0] == " Floor 2: y Does this description include the music school? Please answer with 'yes' or 'no' only."


def test_entries_are_told_by_their_number() -> None:
    text = "#*# Menu Week 1 (January): a #*# Menu Week 12: b #*# no number #*# Menu Week 12: c *** finished #*# Menu Week 13: d"
    assert entries(text, "Menu Week") == {1: " Menu Week 1 (January): a ", 12: " Menu Week 12: c "}
    assert holds("We Attend  WINE tastings", "attending wine tastings")
    assert not holds("winery", "wine")


def test_every_benchmark_names_what_a_record_lacks() -> None:
    for name, benchmark in BENCHMARKS.items():
        with pytest.raises(ConfigError, match=rf"record 0 of {name} has no field '\w+.*'; it has: nothing"):
            benchmark.items([{"nothing": 1}])


def test_data_is_read_in_any_published_form(tmp_path: Path) -> None:
    benchmark, record = BENCHMARKS["gsm8k"], {"question": "How many\u2028lines?", "answer": "one\n#### 1"}
    line = json.dumps(record, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(line + "\n\n" + line)
    (tmp_path / "a.json").write_text(f"[{line}]")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a.csv").write_text('question,answer\n"How many\u2028lines?","one\n#### 1"\n')
    assert len(benchmark.load(str(tmp_path / "a.jsonl"))) == 2
    for name in ("a.json", "a.jsonl.gz", "a.csv"):
        (item,) = benchmark.load(str(tmp_path / name))
        assert item.gold == {"answer": "1"}
        assert "How many\u2028lines?" in item.question


def test_a_folder_is_searched_for_the_benchmarks_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"that folder holds none of hotpotqa\.jsonl"):
        BENCHMARKS["longbench_hotpotqa"].load(str(tmp_path))
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps({"context": "c", "input": "i", "answers": ["a"]}))
    assert len(BENCHMARKS["longbench_hotpotqa"].load(str(tmp_path))) == 1


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "gsm8k needs its data: a file, or hub, which downloads openai/gsm8k"),
        ("missing.jsonl", "there is no such file"),
        ("bad.jsonl", "cannot be read"),
        ("bad.json", "holds no list of records"),
        ("bad.txt", r"it must be one of \.jsonl"),
        ("empty.jsonl", "the data of gsm8k holds no record"),
    ],
)
def test_data_that_cannot_be_read_is_named(tmp_path: Path, data: str | None, problem: str) -> None:
    for name, text in (("bad.jsonl", "{"), ("bad.json", "{}"), ("bad.txt", ""), ("empty.jsonl", "\n")):
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        BENCHMARKS["gsm8k"].load(data and str(tmp_path / data))


@pytest.mark.parametrize(
    ("name", "package"), [("math500", "math_verify"), ("longbench_vcsum", "jieba"), ("longbench_multifieldqa_zh", "jieba")]
)
def test_a_package_that_is_missing_is_missed_before_any_answer(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install"):
        BENCHMARKS[name].load(str(GOLD / "math500.jsonl"))
    assert BENCHMARKS["aime24"].load(str(GOLD / "math500.jsonl"))


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def test_a_long_prompt_is_cut_in_the_middle() -> None:
    item = BENCHMARKS["longbench_v2"].item({**V2, "context": "abc" * 500}, 0)
    cut = truncate(Letters(), item, 1000)
    assert len(cut.prompt) == 1000
    assert cut.prompt == item.prompt[:500] + item.prompt[-500:]
    assert (cut.question, cut.gold) == (item.question, item.gold)
    assert truncate(Letters(), item, len(item.prompt)) is item
    assert truncate(Letters(), item, None) is item
    short = truncate(Letters(), item, 20)  # the question does not fit the tail
    assert (short.context, short.question) == (item.prompt[:10], item.prompt[-10:])
    with pytest.raises(ConfigError, match="length is 1; a prompt cut in the middle keeps at least 2 tokens"):
        truncate(Letters(), item, 1)


@pytest.mark.parametrize(
    ("field", "value"), [("max_new_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_p", 1.5), ("stops", ("",))]
)
def test_a_plan_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} is|a stop string is empty"):
        Generation(**{"max_new_tokens": 1, field: value})
