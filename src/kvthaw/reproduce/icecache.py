"""IceCache (Mao et al., 2026): tables 1 to 6, figures 1 and 5 to 8."""

from __future__ import annotations

from kvthaw.reproduce.devices import pipelined
from kvthaw.reproduce.experiment import Experiment, Table, table
from kvthaw.reproduce.plans import Asked, Score, Scores
from kvthaw.reproduce.special import Special
from kvthaw.reproduce.timed import Timed, Timing

_MODEL = "Llama-3.1-8B-Instruct"
_SETS = {
    "NrtvQA": "narrativeqa", "Qasper": "qasper", "MF-en": "multifieldqa_en", "HotpotQA": "hotpotqa", "2WikiMQA": "2wikimqa",
    "Musique": "musique", "GovReport": "gov_report", "QMSum": "qmsum", "MultiNews": "multi_news", "TREC": "trec",
    "TriviaQA": "triviaqa", "SAMSum": "samsum", "PCount": "passage_count", "PRe": "passage_retrieval_en", "Lcc": "lcc",
    "RB-P": "repobench_p",
}  # fmt: skip
_LONGBENCH = Scores({**{name: Score(f"longbench_{of}") for name, of in _SETS.items()}, "Avg": Score("")}, 127_500, mean="Avg")
_HEAD = " ".join((*_SETS, "Avg"))


def _longbench(rows: str) -> Table:
    return table(f"{_HEAD}\n{rows}")


_T1_LLAMA = _longbench("""
full                30.2 45.5 54.9 55.5 46.7 31.3 35.2 25.2 27.2 72.5 91.7 43.8 8.4 99.5 65.1 58.8 49.5
oracle:budget=256   30.7 44.7 55.4 55.0 46.5 31.7 34.8 25.1 26.8 71.5 92.2 44.8 7.8 100.0 67.1 63.6 49.8
snapkv:budget=256   23.7 27.3 46.3 52.3 40.8 24.2 19.2 22.6 19.2 29.0 84.1 39.0 8.6 97.5 57.3 56.2 40.8
streaming:budget=256 17.0 23.2 25.7 21.0 29.3 6.8 20.8 17.5 20.7 45.5 84.3 41.2 5.0 71.5 59.5 47.5 33.5
omnikv:budget=256   27.2 40.7 52.8 55.1 45.6 29.7 27.6 23.0 25.4 72.5 88.9 40.4 5.6 94.5 60.8 51.5 46.3
magicpig:budget=256 25.5 39.9 51.8 51.4 39.5 25.7 33.9 23.5 25.9 65.5 84.0 37.0 7.8 99.5 47.4 44.8 44.6
pqcache:budget=256  28.7 43.3 52.2 55.2 45.1 28.4 27.2 24.0 22.8 69.5 91.1 41.2 6.2 99.0 59.0 54.4 47.3
arkvale:budget=256  26.1 35.2 47.5 51.6 45.6 28.1 22.9 22.5 22.8 53.5 90.1 40.0 6.7 85.0 57.7 48.9 42.8
icecache:budget=64  27.4 43.2 55.7 55.3 44.4 31.2 33.4 23.7 26.2 72.5 90.3 41.9 6.6 99.5 61.7 51.6 47.8
icecache:budget=128 30.0 44.7 56.5 55.0 45.4 30.0 33.5 24.3 26.5 73.0 91.3 42.4 6.5 100.0 61.5 56.7 48.6
icecache:budget=256 30.6 44.7 56.3 55.2 45.9 30.6 34.6 24.4 26.7 73.0 92.0 43.5 6.7 100.0 62.5 56.4 49.0
""")
_T1_MISTRAL = _longbench("""
full                26.8 33.1 49.3 42.8 27.3 18.8 33.0 24.2 27.1 71.0 86.2 42.8 2.9 87.0 56.9 54.3 42.2
oracle:budget=256   26.2 31.3 48.9 40.0 26.2 19.6 33.3 24.2 27.1 73.0 86.6 43.3 2.3 82.9 59.0 57.3 42.6
snapkv:budget=256   18.3 15.1 38.3 30.4 19.2 13.8 16.5 21.4 19.9 32.0 81.7 38.1 4.0 59.1 49.0 51.8 31.8
streaming:budget=256 14.2 12.3 26.4 23.2 14.8 10.1 17.5 19.8 19.8 51.0 80.5 39.9 4.0 15.6 52.0 45.4 27.8
omnikv:budget=256   16.5 22.8 43.8 34.7 19.2 16.6 24.4 22.0 24.8 70.5 81.7 38.6 3.1 35.2 36.5 38.4 33.0
magicpig:budget=256 21.0 28.0 46.5 38.4 19.5 17.5 30.8 23.3 25.8 70.0 83.7 39.5 2.5 85.0 49.4 48.3 39.1
pqcache:budget=256  21.0 25.8 42.5 18.1 20.3 16.0 29.5 21.7 27.1 70.0 85.8 39.7 2.5 75.5 54.2 49.2 37.4
arkvale:budget=256  18.0 15.2 41.5 30.7 17.0 13.2 21.6 21.6 23.1 58.0 85.8 40.6 2.1 41.5 51.4 47.2 33.0
icecache:budget=64  23.9 29.0 47.4 40.5 23.5 18.3 30.6 21.8 26.0 70.5 85.9 41.5 3.5 56.5 53.2 50.4 39.0
icecache:budget=128 25.1 30.5 48.7 40.4 26.7 18.7 30.3 22.0 26.1 70.5 85.7 42.4 3.4 70.2 53.6 51.5 40.4
icecache:budget=256 25.2 31.0 48.4 40.4 26.0 18.3 31.5 23.1 26.9 71.0 86.3 42.8 3.9 85.1 54.7 53.2 41.7
""")
_T2_QWEN = _longbench("""
full                32.6 45.5 50.4 59.6 56.0 40.1 33.2 23.9 25.2 72.0 70.8 37.1 18.0 100.0 12.4 18.4 43.4
icecache:budget=64  29.5 43.9 50.9 61.4 55.8 38.8 30.8 23.8 24.3 71.0 70.0 35.7 15.0 97.0 10.5 17.3 42.2
icecache:budget=128 32.1 44.8 53.3 61.6 54.6 38.5 31.0 23.6 24.8 72.0 70.3 36.2 15.5 100.0 10.7 17.3 42.6
icecache:budget=256 32.2 44.1 51.9 60.2 55.1 38.9 32.4 24.3 24.7 71.5 70.7 37.4 16.5 100.0 11.8 18.0 43.1
""")
_T2_LONGCHAT = _longbench("""
full                20.8 29.4 43.1 33.0 24.4 14.7 30.8 22.8 26.7 66.5 84.0 22.5 0.0 30.5 54.7 59.2 35.2
icecache:budget=64  18.5 26.9 40.6 34.2 22.7 14.0 29.3 20.9 25.6 66.5 84.3 21.9 1.5 26.1 52.5 56.8 33.9
icecache:budget=128 19.9 27.7 40.9 33.9 24.2 14.4 28.6 21.8 25.9 66.5 84.2 22.3 1.5 27.3 52.6 57.7 34.3
icecache:budget=256 20.4 29.5 43.0 34.6 23.7 14.2 29.8 22.7 26.1 66.5 84.7 22.9 0.0 28.5 53.6 59.0 35.0
""")
_T5 = _longbench("""
icecache-reuse:budget=256 29.1 43.6 53.4 55.1 44.3 29.0 31.8 24.3 26.2 72.0 91.1 41.0 7.2 100.0 60.7 53.1 47.7
""")
_T3 = table("""
                    accuracy
full                48.2
snapkv:budget=0.1   44.7
streaming:budget=0.1 44.4
omnikv:budget=0.1   42.7
magicpig:budget=0.1 43.1
pqcache:budget=0.1  46.2
arkvale:budget=0.1  30.9
icecache:budget=0.1 47.4
""")
_T4 = table("""
                     single-150k multi-150k qa-150k single-200k multi-200k qa-200k single-250k multi-250k qa-250k
full                      100.0 97.0 93.0   100.0 92.0 95.0   100.0 91.0 91.3
icecache:budget=256       100.0 98.0 92.0   100.0 91.3 95.0   100.0 93.0 91.7
icecache-reuse:budget=256 100.0 98.0 91.0   100.0 91.0 94.3   100.0 92.0 92.0
""")
_T6 = table("""
                    completion once range periodic average
full                97.627 0.349 0.488 0.135 0.324
icecache:budget=256 95.322 0.377 0.454 0.164 0.331
pqcache:budget=256  88.691 0.318 0.395 0.105 0.273
""")
_RULER = {
    "single": tuple(f"ruler_niah_single_{i}" for i in (1, 2, 3)),
    "multi": tuple(f"ruler_niah_multikey_{i}" for i in (1, 2, 3)),
    "qa": ("ruler_qa_1", "ruler_qa_2"),
}
_WORDS = {f"{k}k": ("passkey", 1000 * k) for k in range(10, 101, 10)}
_ALL = " ".join(["100"] * len(_WORDS))
_F6 = table(f"""
                    {" ".join(_WORDS)}
icecache:budget=256 {_ALL}
icecache:budget=128 {_ALL}
icecache:budget=64  {_ALL}
""")
_F5 = table("prefill rest total\nserial - - -\npipelined - - -\nin-chunks - - -")
_F7 = table("""
                          tt2t tpot
full                      -    -
icecache:budget=256       7.7  0.11
icecache:transfer=uva:budget=256 - -
icecache-reuse:budget=256 5.9  0.06
omnikv:budget=256         5.8  0.05
arkvale:budget=256        7.4  -
pqcache:budget=256        13.3 0.13
snapkv:budget=256         0.55 0.03
streaming:budget=256      0.13 0.03
""")
_F1 = table("""
                          memory tpot
full                      -      -
icecache:budget=256       -      0.11
icecache:transfer=uva:budget=256 - -
icecache-reuse:budget=256 -      0.06
omnikv:budget=256         -      0.05
arkvale:budget=256        -      -
pqcache:budget=256        -      0.13
magicpig:budget=256       -      -
snapkv:budget=256         -      0.03
streaming:budget=256      -      0.03
""")
_F8 = table("""
                          150k 200k 250k 300k
full                      -    -    -    -
icecache:budget=256       -    -    -    -
icecache-reuse:budget=256 -    -    -    -
""")
_EAGER = "bulk loading gathers on the host, so that IceCache's steps run eagerly; transfer=uva and the others' are captured"
_A100 = "Llama-3.1-8B-Instruct, A100 40GB PCIe, 64 threads"
_36K = 36 * 1024

EXPERIMENTS = (
    Experiment("icecache-t1", "LongBench by budget", "IceCache, table 1 (section 5.3)",
               {_MODEL: _T1_LLAMA, "Mistral-7B-Instruct-v0.2": _T1_MISTRAL}, _LONGBENCH, "score", "table", 2400),
    Experiment("icecache-t2", "LongBench, larger model and multi-head attention", "IceCache, table 2 (section 5.3.1)",
               {"Qwen3-32B": _T2_QWEN, "LongChat-7B-v1.5-32k": _T2_LONGCHAT}, _LONGBENCH, "score", "table", 2400),
    Experiment("icecache-t3", "GSM8K with chain of thought, 10 % budget", "IceCache, table 3 (section 5.4)",
               {"Mistral-7B-Instruct-v0.2": _T3}, Scores({"accuracy": Score("gsm8k")}), "% right", "bars", 400),
    Experiment("icecache-t4", "RULER at 150k to 250k tokens", "IceCache, table 4 (section 5.5)", {"Qwen3-4B-Instruct-2507": _T4},
               Asked({f"{kind}-{k}k": (tasks, 1000 * k) for k in (150, 200, 250) for kind, tasks in _RULER.items()}, 100, (),
                     text=True),
               "% right", "table", 3000,
               "RULER's haystack is Paul Graham's essays (--text), its questions SQuAD's and HotpotQA's; fairy tales ship instead"),
    Experiment("icecache-t5", "LongBench with reuse across layers", "IceCache, table 5 (appendix C)", {_MODEL: _T5}, _LONGBENCH,
               "score", "table", 300),
    Experiment("icecache-t6", "LongGenBench, 256 tokens", "IceCache, table 6 (appendix D)", {_MODEL: _T6},
               Scores({"completion": Score("longgenbench_16k", "completion"), "once": Score("longgenbench_16k", "once", 1),
                       "range": Score("longgenbench_16k", "range", 1), "periodic": Score("longgenbench_16k", "periodic", 1),
                       "average": Score("longgenbench_16k", "score", 1)}),
               "% completed, shares of demands met", "table", 3000,
               "judged by words, not by a model; the paper does not say which of the two lengths it ran"),
    Experiment("icecache-f1", "Device memory against time per token at 36k", "IceCache, figure 1", {_A100: _F1},
               Timed({"memory": Timing(_36K, "memory"), "tpot": Timing(_36K, "tpot")}), "MiB; s a token", "points", 25,
               f"the picture's memory is not in the text; here: KV and index on the device, dense layers included; {_EAGER}"),
    Experiment("icecache-f5", "Offloading and indexing after the prefill, and beside it", "IceCache, figure 5 (section 4.3)",
               {_A100: _F5}, Special(pipelined, ("prefill", "rest", "total"), "a GPU", {"shape": "llama-3.1-8b", "length": _36K},
                                     weights=False),
               "s", "bars", 4, "the figure is a drawing; in-chunks: of 16k tokens, whose trees begin beside the last chunk"),
    Experiment("icecache-f6", "Pass key by depth and length", "IceCache, figure 6 (section 5.2)", {_MODEL: _F6},
               Asked(_WORDS, 100, words=True), "% right", "heat", 1500),
    Experiment("icecache-f7", "Time to the second token, time per token, 36k", "IceCache, figure 7 (section 5.3.2)", {_A100: _F7},
               Timed({"tt2t": Timing(_36K, "tt2t"), "tpot": Timing(_36K, "tpot")}), "s", "bars", 20, _EAGER),
    Experiment("icecache-f8", "Time per token at 150k to 300k", "IceCache, figure 8 (section 5.5)",
               {"Qwen3-4B-Instruct-2507, H100 80GB": _F8},
               Timed({f"{k}k": Timing(1000 * k, "tpot") for k in (150, 200, 250, 300)}, "qwen3-4b"), "s a token", "lines", 30,
               "the paper gives a picture without numbers"),
)  # fmt: skip
