"""How ClusterKV's tables and figures are measured; what the paper says is in papers/clusterkv.toml."""

from __future__ import annotations

from lab.reproduce.experiment import experiments
from lab.reproduce.plans import Read, Score, Scores
from lab.reproduce.special import Special, Together, ranks
from lab.reproduce.timed import Timed, Timing
from lab.reproduce.watched import View, Watched

_SETS = {
    "2WikiMQA": "2wikimqa", "TriviaQA": "triviaqa", "HotpotQA": "hotpotqa", "MultiFieldQA": "multifieldqa_en",
    "MuSiQue": "musique", "NarrativeQA": "narrativeqa", "Qasper": "qasper", "GovReport": "gov_report",
}  # fmt: skip
_EIGHT = {name: Score(f"longbench_{of}") for name, of in _SETS.items()}
_LONGBENCH = Scores({**_EIGHT, "average": Score("")}, 32_000, mean="average")
_BUDGETS = tuple(range(256, 2049, 256))
_STEPS = {256: "total-256", 512: "total-512", 1024: "total"}
_RANKED = ("0", "10", "20", "30", "40", "50", "63")

EXPERIMENTS = experiments("clusterkv", {
    "clusterkv-t1": _LONGBENCH,
    "clusterkv-f3": Special(ranks, _RANKED, "--model, --text (a book of PG19)",
                            {"source": View("text", 8192, 64, layer=16), "steps": tuple(map(int, _RANKED))}),
    "clusterkv-f9": _LONGBENCH,
    "clusterkv-f10": Read((1000, 2000, 4000, 8000, 16000, 31000), 64, 4),
    "clusterkv-f11": Watched({str(b): View("longbench_narrativeqa", 32_000, 32, options=f"retrieved={b}") for b in _BUDGETS}),
    "clusterkv-f12": Timed({f"{p}k+{d}": Timing(1024 * p, of, new_tokens=1024) for p in (8, 16, 32) for d, of in _STEPS.items()}),
    "clusterkv-f13": Together((
        (Timed({"2k-tpot": Timing(1920, "tpot")}, steps="eager"), ("infinigen:retrieved=256", "clusterkv:retrieved=256")),
        (Timed({f"{p}k-tpot": Timing(1024 * p, "tpot", new_tokens=320) for p in (8, 16, 32)}),
         ("quest:budget=1024", "clusterkv:retrieved=1024")),
        (Timed({"R-hits": Timing(32 * 1024, "hits", new_tokens=320)}),
         ("clusterkv:retrieved=1024:keep=1", "clusterkv:retrieved=1024:keep=2")),
    )),
})  # fmt: skip
