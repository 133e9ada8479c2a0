"""Questions in the layout of published benchmarks, made of what ships, for runs that only show that all works."""

from __future__ import annotations

import json
from typing import Any

from kvthaw.evaluate.tasks.base import read_asset


def records(benchmark: str) -> list[dict[str, Any]]:
    """Return one record, as a benchmark's file has it. It is not the benchmark's own."""
    tales = json.loads(read_asset("fairytales.json"))["data"]
    context = "\n".join(part["context"] for tale in tales[:4] for part in tale["paragraphs"])
    asked = tales[0]["paragraphs"][0]["qas"][0]
    question, answer = asked["question"], asked["answers"][0]["text"]
    if benchmark.startswith("longbench_v2"):
        choices = dict(
            zip(("choice_A", "choice_B", "choice_C", "choice_D"), (answer, "a bell", "a boat", "a bear"), strict=True)
        )
        about = {"difficulty": "easy", "length": "short", "_id": "tale"}
        return [{"context": context, "question": question, "answer": "A", **choices, **about}]
    if benchmark.startswith("longbench_"):
        return [{"context": context, "input": question, "answers": [answer], "all_classes": [answer, "bell"]}]
    if benchmark == "gsm8k":
        shot = json.loads(read_asset("gsm8k_cot.json"))[0]
        return [{"question": shot["question"], "answer": "#### 6"}]
    if benchmark.startswith("gpqa"):
        wrong = {f"Incorrect Answer {n}": f"{60 + n}" for n in (1, 2, 3)}
        return [{"Question": "How many minutes has an hour?", "Correct Answer": "60", **wrong}]
    if benchmark.startswith("longgenbench"):
        checks = {f"checks_{kind}": {"1": "a bell"} for kind in ("once", "range", "periodic")}
        return [
            {"prompt": "Write a diary of two weeks.", "type": "Week", "prefix": "#*# Week 1: a bell", "number": 2, **checks}
        ]
    return [{"problem": "A train leaves with 17 people, and 25 more get on. How many are there?", "answer": "42"}]
