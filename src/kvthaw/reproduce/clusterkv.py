"""ClusterKV (Liu et al., 2025): table I, figures 3 and 9 to 13."""

from __future__ import annotations

from kvthaw.reproduce.experiment import Experiment, table
from kvthaw.reproduce.plans import Read, Score, Scores
from kvthaw.reproduce.special import Special, Together, ranks
from kvthaw.reproduce.timed import Timed, Timing
from kvthaw.reproduce.watched import View, Watched

_MODEL = "glm-4-9b-chat"
_BUDGETS = (256, 512, 1024, 2048)
_SETS = {
    "2WikiMQA": "2wikimqa", "TriviaQA": "triviaqa", "HotpotQA": "hotpotqa", "MultiFieldQA": "multifieldqa_en",
    "MuSiQue": "musique", "NarrativeQA": "narrativeqa", "Qasper": "qasper", "GovReport": "gov_report",
}  # fmt: skip
_EIGHT = {name: Score(f"longbench_{of}") for name, of in _SETS.items()}
_LONGBENCH = Scores({**_EIGHT, "average": Score("")}, 32_000, mean="average")
_T1 = table("""
                       average
quest:budget=256       35.63
quest:budget=512       40.83
quest:budget=1024      43.23
quest:budget=2048      45.59
infinigen:retrieved=256   43.69
infinigen:retrieved=512   45.04
infinigen:retrieved=1024  45.13
infinigen:retrieved=2048  45.14
clusterkv:retrieved=256   46.69
clusterkv:retrieved=512   48.02
clusterkv:retrieved=1024  48.34
clusterkv:retrieved=2048  48.7
full                   49.01
""")
_NONE = " ".join("-" * len(_SETS))
_F9 = table(f"{' '.join(_SETS)}\n" + "\n".join(f"{row} {_NONE}" for row in _T1.rows))
_F10 = table("""
                       1000 2000 4000 8000 16000 31000 deviation
full                   - - - - - - 0
clusterkv:retrieved=1024  - - - - - - 0.5
quest:budget=1024      - - - - - - 4
infinigen:retrieved=1024  - - - - - - 2
""")
_F11_BUDGETS = tuple(range(256, 2049, 256))
_F11_ROWS = (
    "clusterkv", "quest", "infinigen",
    *(f"clusterkv:distance={distance}:clusters={count}" for distance, count in (
        ("cosine", 200), ("cosine", 400), ("cosine", 600), ("cosine", 800), ("l2", 400), ("inner", 400))),
)  # fmt: skip
_F11 = table(
    " ".join(map(str, _F11_BUDGETS)) + "\n" + "\n".join(f"{row} " + " ".join("-" * len(_F11_BUDGETS)) for row in _F11_ROWS)
)
_F3 = table("""
            0 10 20 30 40 50 63
token-2048  - - - - - - -
token-3200  - - - - - - -
token-7168  - - - - - - -
page-16     1-2 1-2 1-2 1-2 1-2 1-2 1-2
""")
_STEPS = {256: "total-256", 512: "total-512", 1024: "total"}
_P = {f"{p}k+{d}": Timing(1024 * p, of, new_tokens=1024) for p in (8, 16, 32) for d, of in _STEPS.items()}
_F12 = table(f"""
                        {" ".join(_P)}
full                    {" ".join("-" * len(_P))}
clusterkv:retrieved=256    {" ".join("-" * len(_P))}
clusterkv:retrieved=512    {" ".join("-" * len(_P))}
clusterkv:retrieved=1024   {" ".join("-" * len(_P))}
""")
_F13_SMALL = ("infinigen:retrieved=256", "clusterkv:retrieved=256")
_F13_LARGE = ("quest:budget=1024", "clusterkv:retrieved=1024")
_F13_HITS = ("clusterkv:retrieved=1024:keep=1", "clusterkv:retrieved=1024:keep=2")
_F13 = table("""
                              2k-tpot 8k-tpot 16k-tpot 32k-tpot R-hits
infinigen:retrieved=256          - - - - -
clusterkv:retrieved=256          - - - - -
quest:budget=1024             - - - - -
clusterkv:retrieved=1024         - - - - -
clusterkv:retrieved=1024:keep=1  - - - - 63
clusterkv:retrieved=1024:keep=2  - - - - 74
""")
_ADA = "Llama-3.1-8B, RTX 6000 Ada"

EXPERIMENTS = (
    Experiment("clusterkv-t1", "Average of eight LongBench sets by budget", "ClusterKV, table I", {_MODEL: _T1}, _LONGBENCH,
               "score", "table", 1200),
    Experiment("clusterkv-f3", "Ranks of tokens over 64 steps; important tokens a page", "ClusterKV, figure 3",
               {"Llama-3-8B": _F3},
               Special(ranks, ("0", "10", "20", "30", "40", "50", "63"), "--model, --text (a book of PG19)",
                       {"source": View("text", 8192, 64, layer=16), "steps": (0, 10, 20, 30, 40, 50, 63)}),
               "rank by attention weight; tokens of the best 1,024 a page of 16", "lines", 3,
               "the paper says in words: token 3200 becomes important after 20 steps, 2048 stops being so, 7168 changes; its "
               "layer, head and text are not given, here layer 16's first head on a book"),
    Experiment("clusterkv-f9", "Eight LongBench sets by budget", "ClusterKV, figure 9", {_MODEL: _F9}, _LONGBENCH, "score", "table",
               1200, "the paper gives pictures; its averages stand in table I"),
    Experiment("clusterkv-f10", "Perplexity of a book by length, 1,024 tokens", "ClusterKV, figure 10", {_MODEL: _F10},
               Read((1000, 2000, 4000, 8000, 16000, 31000), 64, 4), "perplexity", "lines", 30,
               "the paper says how far each deviates from full attention"),
    Experiment("clusterkv-f11", "Recall of the exact top-B, by method and by configuration", "ClusterKV, figure 11",
               {_MODEL: _F11},
               Watched({str(b): View("longbench_narrativeqa", 32_000, 32, options=f"retrieved={b}") for b in _F11_BUDGETS}),
               "% recalled", "lines", 30, "the paper gives a picture: ClusterKV above both, cosine above L2 and inner product"),
    Experiment("clusterkv-f12", "Latency by prompt, answer and budget", "ClusterKV, figure 12", {_ADA: _F12}, Timed(_P), "s",
               "bars", 40, "the paper says: twice as fast as full attention at 32k + 1,024 with 1,024 tokens"),
    Experiment("clusterkv-f13", "Latency beside InfiniGen and Quest; hits of the rows kept", "ClusterKV, figure 13 and section V-C",
               {_ADA: _F13},
               Together((
                   (Timed({"2k-tpot": Timing(1920, "tpot")}, steps="eager"), _F13_SMALL),
                   (Timed({f"{p}k-tpot": Timing(1024 * p, "tpot", new_tokens=320) for p in (8, 16, 32)}), _F13_LARGE),
                   (Timed({"R-hits": Timing(32 * 1024, "hits", new_tokens=320)}), _F13_HITS),
               )),
               "s a token; % of rows", "bars", 20,
               "the paper says: 2.3 times faster than InfiniGen (there OPT-6.7B, here Llama-3.1-8B's shape, both with eager steps, "
               "since InfiniGen's cannot be captured), within 5 % of Quest; hits of random weights say nothing of a text's"),
)  # fmt: skip
