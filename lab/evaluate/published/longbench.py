"""LongBench v1 (Bai et al., 2023): 21 tasks, each with the authors' prompt, longest answer and metric."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from lab.evaluate.assets import read_own

from . import text_metrics as metrics
from .base import Ask, Benchmark, Generation, Item, Record

METRICS: dict[str, Callable[[str, str], float]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), metrics.qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), metrics.rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), metrics.rouge_l_zh),
    "multifieldqa_zh": metrics.qa_f1_zh,
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), metrics.retrieval),
    "passage_count": metrics.count,
    **dict.fromkeys(("lcc", "repobench-p"), metrics.edit_similarity),
}
HUB = "Xnhyacinth/LongBench"
"""A copy in Parquet: the authors' own, THUDM/LongBench, needs a script, which `datasets` 4 does not run."""
CLASSES = ("trec", "lsht")
PLAIN = (*CLASSES, "triviaqa", "samsum", "lcc", "repobench-p")
"""Asked without a chat template, as published: examples or code that the model continues."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
ONE_LINE = (*CLASSES, "triviaqa", "samsum")
"""Of these answers the first line counts."""


@dataclass(frozen=True)
class LongBench(Benchmark):
    """One of the tasks. A prompt longer than `--length` is cut in the middle, half head and half tail, as published."""

    prompt: str = ""

    def item(self, record: Record, number: int) -> Item:
        """Fields: context, input (question in the hub's copy), answers; all_classes where the task classifies; _id if there."""
        context, question = str(record["context"]), str(record["question" if "question" in record else "input"])
        before, _, after = self.prompt.partition("{context}")
        gold = {"answers": [str(answer) for answer in record["answers"]]}
        if self.dataset in CLASSES:
            gold["classes"] = [str(name) for name in record["all_classes"]]
        return Item(str(record.get("_id", number)), before + context, after.replace("{input}", question), gold)

    def check(self) -> None:
        """Three of the Chinese tasks cut text into words."""
        if self.dataset not in CLASSES:
            METRICS[self.dataset]("", "段落1")

    @property
    def dataset(self) -> str:
        """The task's name among LongBench's."""
        return self.file or ""

    def score(self, item: Item, output: str, ask: Ask | None = None) -> dict[str, float]:
        """Return the best over the gold answers."""
        if self.dataset in ONE_LINE:
            output = output.lstrip("\n").split("\n")[0]
        if self.dataset in CLASSES:
            found = [metrics.classification(output, gold, item.gold["classes"]) for gold in item.gold["answers"]]
        else:
            found = [METRICS[self.dataset](output, gold) for gold in item.gold["answers"]]
        return {"score": max(found, default=0.0)}


def _tasks() -> tuple[LongBench, ...]:
    made = []
    for name, (prompt, longest) in json.loads(read_own("longbench.json")).items():
        generation = Generation(longest, ("\n",) if name == "samsum" else (), chat=name not in PLAIN)
        made.append(LongBench(f"longbench_{name.replace('-', '_')}", generation, (HUB, name, "test"), name, prompt))
    return tuple(made)


V1 = _tasks()
