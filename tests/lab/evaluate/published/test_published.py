"""A benchmark under several methods: protocols, resuming, pass@k, a second prompt and the chat template."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvthaw.engine.chat_template import Chat, split_prompt
from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.evaluate.variant import FULL, Variant
from lab.evaluate.published import BENCHMARKS, Generation, Item
from lab.evaluate.published.results import pass_at_k, summarize
from lab.evaluate.published.runner import Examiner, Run

ORACLE = Variant("oracle", 64)
RECORD = {
    "context": "Long ago a fox slept. " * 12,
    "question": "Who slept?",
    "answer": "A",
    **{f"choice_{letter}": word for letter, word in zip("ABCD", ("fox", "dog", "owl", "cat"), strict=True)},
}
V2 = BENCHMARKS["longbench_v2"]
TEMPLATE = "{% for m in messages %}[user]{{ m['content'] | trim }}[/user]{% endfor %}[bot]"


def run(**changes: Any) -> Run:
    made = Run(V2, [V2.item(RECORD, number) for number in range(2)], Generation(6))
    return replace(made, **changes)


def test_every_variant_answers_every_question(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    asked = run(samples=3, generation=Generation(6, temperature=1.0))
    found = Examiner(*loaded, ResultsFile(path)).run(asked, [ORACLE])
    assert {variant: len(lines) for variant, lines in found.items()} == {ORACLE: 6, FULL: 6}
    assert [(line.setting["item"], line.setting["sample"]) for line in found[ORACLE]] == [
        (i, s) for i in "01" for s in range(3)
    ]
    line = found[ORACLE][0]
    assert (line["attended_max"] or 0) <= 64 < line["tokens"]
    assert found[FULL][0]["attended_max"] is None
    assert len({line["output"] for line in found[FULL]}) > 1
    assert Record.from_json(line.to_json()) == line
    assert len(path.read_text().splitlines()) == 12


def test_a_run_continues_where_it_stopped(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    asked = run(samples=2, generation=Generation(6, temperature=1.0))
    first = Examiner(*loaded, ResultsFile(path)).run(asked, [ORACLE])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]) + lines[-3][:40])  # stopped in the middle of a line
    model, tokenizer = loaded
    seen: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_, **__: seen.append(1))
    again = Examiner(model, tokenizer, ResultsFile(path)).run(asked, [ORACLE])
    between = len(seen)
    Examiner(model, tokenizer, ResultsFile(path)).run(asked, [ORACLE])
    hook.remove()
    assert again == first
    assert 0 < between < 20
    assert len(seen) == between  # all is known now


def test_what_an_answer_depends_on_makes_a_new_one(loaded: tuple[Any, Any]) -> None:
    examiner = Examiner(*loaded)
    keys = {
        line.key
        for changes in (
            {},
            {"question": "sparse"},
            {"seed": 1},
            {"length": 100},
            {"generation": Generation(5)},
            {"generation": Generation(6, ("x",))},
        )
        for line in examiner.run(run(**changes), [])[FULL]
    }
    assert len(keys) == 12


@pytest.mark.parametrize("context", ["", "Long ago. " * 20])
def test_full_answers_alike_under_both_protocols(loaded: tuple[Any, Any], context: str) -> None:
    items = [Item("a", context, "Who slept there, all that time?", {"answer": "A", "choices": ""})]
    dense, sparse = (Examiner(*loaded).run(run(items=items, question=way), [ORACLE]) for way in ("dense", "sparse"))
    assert dense[FULL][0]["output"] == sparse[FULL][0]["output"]
    assert dense[FULL][0]["tokens"] == sparse[FULL][0]["tokens"]


def test_a_second_prompt_is_scored_in_place_of_the_first_answer(loaded: tuple[Any, Any]) -> None:
    benchmark = BENCHMARKS["longbench_v2_cot"]
    asked = run(benchmark=benchmark, items=[benchmark.item(RECORD, 0)], generation=Generation(4))
    line = Examiner(*loaded).run(asked, [])[FULL][0]
    assert line["first"] is not None
    assert line["new_tokens"] == 4
    assert line["output"] != line["first"]
    assert Examiner(*loaded).run(run(), [])[FULL][0]["first"] is None


def test_a_chat_model_is_asked_through_its_template(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    with pytest.raises(ConfigError, match="the tokenizer has no chat template"):
        Examiner(model, tokenizer).run(run(chat=Chat()), [])
    tokenizer.chat_template = TEMPLATE
    try:
        context, question = split_prompt(tokenizer, "one two ", "three", chat=Chat())
        assert tokenizer.decode(context) == "[user]one two "
        assert tokenizer.decode(question) == "three[/user][bot]"
        assert split_prompt(tokenizer, "one two three", "", chat=Chat()) == (context + question, [])
        with pytest.raises(ConfigError, match="the chat template changes the question"):
            split_prompt(tokenizer, "one ", "two ", chat=Chat())
        line = Examiner(model, tokenizer).run(run(chat=Chat()), [])[FULL][0]
        assert line["tokens"] == len(tokenizer(f"[user]{V2.item(RECORD, 0).prompt}[/user][bot]")["input_ids"])
    finally:
        tokenizer.chat_template = None


def test_a_judge_is_asked_with_full_attention(loaded: tuple[Any, Any]) -> None:
    examiner = Examiner(*loaded)
    assert examiner.ask("Is it? Answer:") == examiner.ask("Is it? Answer:")
    benchmark = BENCHMARKS["longgenbench_16k"]
    record = {"prompt": "#*# Day 1:", "checks_once": {"1": "x"}, "checks_range": {}, "checks_periodic": {}, "type": "Day"}
    item = benchmark.item({**record, "prefix": "#*# Day 1:", "number": 2}, 0)
    asked: list[str] = []

    def judge(prompt: str) -> str:
        asked.append(prompt)
        return "yes"

    asked_run = run(benchmark=benchmark, items=[item], generation=Generation(4), judge="somebody")
    examiner.judge = judge
    lines = examiner.run(asked_run, [])[FULL]
    assert len(asked) == 1
    assert lines[0]["scores"] == {"score": 1.0, "completion": 0.5, "once": 1.0, "stic1": 1.0}
    assert lines[0].setting["judge"] == "somebody"


def test_prompts_longer_than_the_model_are_refused_or_cut(loaded: tuple[Any, Any]) -> None:
    items = [Item("long", "word " * 600, "Who?", {"answer": "A", "choices": ""})]
    with pytest.raises(ConfigError, match="the model's positions end at 2,048"):
        Examiner(*loaded).run(run(items=items), [])
    assert Examiner(*loaded).run(run(items=items, length=500), [])[FULL][0]["tokens"] == 500


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"samples": 2}, "samples is 2 at temperature 0, where all are the same"),
        ({"question": "both"}, "question is 'both'; it must be dense or sparse"),
        ({"length": 1}, "length is 1; it must be at least 2"),
    ],
)
def test_a_run_out_of_range_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        run(**changes)


def test_pass_at_k_is_the_chance_that_one_of_k_is_right() -> None:
    for drawn, right, k in ((4, 1, 1), (4, 1, 2), (5, 3, 2), (6, 0, 3), (6, 6, 3), (6, 5, 2)):
        picks = list(itertools.combinations([1] * right + [0] * (drawn - right), k))
        assert pass_at_k(right, drawn, k) == pytest.approx(sum(any(pick) for pick in picks) / len(picks))
    for arguments in ((1, 4, 0), (1, 4, 5), (5, 4, 1)):
        with pytest.raises(ConfigError, match="must lie between"):
            pass_at_k(*arguments)


def test_a_summary_averages_over_questions(loaded: tuple[Any, Any]) -> None:
    line = Examiner(*loaded).run(run(), [])[FULL][0]
    scores = {"a": (1, 0, 0, 0), "b": (1, 1, 0, 0), "c": (0, 0, 0, 0)}
    lines = [
        Record(
            {**line.setting, "item": item, "sample": i},
            {**line.measures, "scores": {"score": float(s), "also": 0.5}, "ended": bool(i)},
        )
        for item, found in scores.items()
        for i, s in enumerate(found)
    ]
    summary = summarize(lines, lines[:4])
    assert (summary["n"], summary["samples"]) == (3, 4)
    assert summary["score"] == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    assert summary["full_score"] == 0.25
    assert list(summary["pass_at"]) == [1, 2, 4]
    assert summary["pass_at"][1] == pytest.approx(summary["score"])
    assert summary["pass_at"][2] == pytest.approx((3 / 6 + 5 / 6 + 0) / 3)
    assert summary["pass_at"][4] == pytest.approx(2 / 3)
    assert (summary["scores"], summary["ended"]) == ({"also": 0.5}, 0.75)
    assert json.loads(json.dumps(summary))["score_95"][0] < summary["score"]
    graded = summarize([Record(lines[0].setting, {**lines[0].measures, "scores": {"score": 0.3}})])
    assert (graded["score"], graded["score_95"], graded["pass_at"]) == (0.3, None, {})
