"""How IceCache's tables and figures are measured; what the paper says is in papers/icecache.toml."""

from __future__ import annotations

from lab.reproduce.devices import pipelined
from lab.reproduce.experiment import experiments
from lab.reproduce.plans import Asked, Score, Scores
from lab.reproduce.special import Special
from lab.reproduce.timed import Timed, Timing

_SETS = {
    "NrtvQA": "narrativeqa", "Qasper": "qasper", "MF-en": "multifieldqa_en", "HotpotQA": "hotpotqa", "2WikiMQA": "2wikimqa",
    "Musique": "musique", "GovReport": "gov_report", "QMSum": "qmsum", "MultiNews": "multi_news", "TREC": "trec",
    "TriviaQA": "triviaqa", "SAMSum": "samsum", "PCount": "passage_count", "PRe": "passage_retrieval_en", "Lcc": "lcc",
    "RB-P": "repobench_p",
}  # fmt: skip
_LONGBENCH = Scores(
    {**{name: Score(f"longbench_{of}") for name, of in _SETS.items()}, "Avg": Score("")}, 127_500, mean="Avg", each_head=True
)
_RULER = {
    "single": tuple(f"ruler_niah_single_{i}" for i in (1, 2, 3)),
    "multi": tuple(f"ruler_niah_multikey_{i}" for i in (1, 2, 3)),
    "qa": ("ruler_qa_1", "ruler_qa_2"),
}
_LONG = {f"{kind}-{k}k": (tasks, 1000 * k) for k in (150, 200, 250) for kind, tasks in _RULER.items()}
_36K = 36 * 1024

EXPERIMENTS = experiments("icecache", {
    "icecache-t1": _LONGBENCH,
    "icecache-t2": _LONGBENCH,
    "icecache-t3": Scores({"accuracy": Score("gsm8k")}, each_head=True),
    "icecache-t4": Asked(_LONG, 100, (), text=True, each_head=True),
    "icecache-t5": _LONGBENCH,
    "icecache-t6": Scores({
        "completion": Score("longgenbench_16k", "completion"), "once": Score("longgenbench_16k", "once", 1),
        "range": Score("longgenbench_16k", "range", 1), "periodic": Score("longgenbench_16k", "periodic", 1),
        "average": Score("longgenbench_16k", "score", 1),
    }, each_head=True),
    "icecache-f1": Timed({"memory": Timing(_36K, "memory"), "tpot": Timing(_36K, "tpot")}),
    "icecache-f5": Special(pipelined, ("prefill", "rest", "total"), "a GPU", {"shape": "llama-3.1-8b", "length": _36K},
                           weights=False),
    "icecache-f6": Asked({f"{k}k": ("passkey", 1000 * k) for k in range(10, 101, 10)}, 100, words=True, each_head=True),
    "icecache-f7": Timed({"tt2t": Timing(_36K, "tt2t"), "tpot": Timing(_36K, "tpot")}),
    "icecache-f8": Timed({f"{k}k": Timing(1000 * k, "tpot") for k in (150, 200, 250, 300)}, "qwen3-4b"),
})  # fmt: skip
