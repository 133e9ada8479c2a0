"""PRKV (under review): tables 1 to 6, figures 1 to 3, 6 to 9 and 20 to 23."""

from __future__ import annotations

from kvthaw.reproduce.devices import estimates, layouts
from kvthaw.reproduce.experiment import Experiment, Table, table
from kvthaw.reproduce.plans import Asked, Score, Scores
from kvthaw.reproduce.special import Special, Together, shares, spread
from kvthaw.reproduce.timed import Timed, Timing
from kvthaw.reproduce.watched import View, Watched

_LLAMA, _QWEN = "Llama-3.1-8B-Instruct", "Qwen2.5-14B-Instruct"
_BUDGETS = (4096, 2048, 1024, 512, 256)
_WRITTEN = {"Quest": "quest:page=32:window=64:retrieved=", "ArkVale": "arkvale:retrieved=", "ShadowKV": "shadowkv:retrieved=",
            "SnapKV": "snapkv:budget=", "PRKV": "prkv:retrieved="}  # fmt: skip
_SPLIT = ("Overall", "Easy", "Hard", "Short", "Medium", "Long")
_V2 = {name: Score("longbench_v2", "score" if name == "Overall" else name.lower()) for name in _SPLIT}
_BY_SIZE = Scores(_V2, 128_000)


def _by_budget(full: str, blocks: str) -> Table:
    """The paper's table: full attention's line, then a line a method for each budget, 4,096 to 256."""
    budget, lines = 0, [" ".join(_SPLIT), f"full {full}"]
    for name, *values in map(str.split, filter(str.strip, blocks.splitlines())):
        budget = int(name) if name.isdigit() else budget
        if values:
            lines.append(f"{_WRITTEN[name]}{budget} {' '.join(values)}")
    return table("\n".join(lines))


_T2 = _by_budget(
    "30.8 30.7 30.9 38.3 27.0 25.9",
    """
4096
Quest    24.85 22.92 26.05 30.0 21.86 22.22
ArkVale  30.62 28.65 31.83 36.11 27.91 26.85
ShadowKV 29.62 29.17 29.9 33.89 28.84 24.07
SnapKV   30.42 28.65 31.51 33.89 30.23 25.0
PRKV     30.62 28.12 32.15 36.67 28.84 24.07
2048
Quest    25.25 22.92 26.69 31.11 23.72 18.52
ArkVale  30.13 31.49 29.27 36.05 27.04 26.0
ShadowKV 30.62 29.69 31.19 36.11 28.37 25.93
SnapKV   30.42 28.12 31.83 36.67 28.37 24.07
PRKV     30.62 28.65 31.83 37.22 28.84 23.15
1024
Quest    18.09 19.27 17.36 18.89 17.67 17.59
ArkVale  29.56 31.29 28.51 37.12 25.43 26.19
ShadowKV 30.22 27.6 31.83 33.9 29.3 25.9
SnapKV   29.62 28.12 30.55 35.56 27.44 24.07
PRKV     30.82 30.21 31.19 35.56 29.77 25.0
512
Quest    10.54 9.9 10.93 12.22 9.77 9.26
ArkVale  29.22 28.65 29.58 33.89 27.91 24.07
ShadowKV 30.0 27.6 31.5 34.4 28.4 25.9
SnapKV   29.03 28.12 29.58 36.67 26.05 22.22
PRKV     30.62 31.25 30.23 36.11 29.77 23.15
256
Quest    5.96 3.65 7.4 8.33 5.58 2.78
ArkVale  29.22 27.6 30.23 33.89 27.91 24.07
ShadowKV 29.82 29.17 30.23 36.67 28.37 21.3
SnapKV   28.43 25.52 30.23 34.44 25.58 24.07
PRKV     30.42 28.65 31.51 33.89 30.23 25.0
""",
)
_T3 = _by_budget(
    "31.6 35.4 29.3 37.2 30.2 25.0",
    """
4096
Quest    28.48 30.9 26.95 33.73 25.25 26.04
ArkVale  34.19 41.15 29.9 37.78 34.88 26.85
ShadowKV 31.81 33.85 30.55 41.67 27.44 24.07
SnapKV   31.21 33.33 29.9 38.33 29.3 23.15
PRKV     34.2 40.1 30.5 38.9 34.4 25.9
2048
Quest    27.69 28.27 27.33 35.75 23.26 23.15
ArkVale  34.39 41.67 29.9 38.89 34.42 26.85
ShadowKV 31.61 34.9 29.58 39.44 28.37 25.0
SnapKV   31.21 33.33 29.9 38.33 29.3 23.15
PRKV     35.59 42.71 31.19 38.89 35.81 29.63
1024
Quest    25.5 25.65 25.4 29.61 26.98 15.74
ArkVale  34.59 40.62 30.87 39.44 34.42 26.85
ShadowKV 32.41 35.94 30.23 39.44 29.77 25.93
SnapKV   31.21 33.33 29.9 38.33 29.3 23.15
PRKV     35.39 43.75 30.23 38.33 35.81 29.63
512
Quest    22.91 26.18 20.9 26.82 23.26 15.74
ArkVale  33.4 38.02 30.55 37.22 33.49 26.85
ShadowKV 29.22 31.77 27.65 36.11 27.91 20.37
SnapKV   31.21 33.33 29.9 38.33 29.3 23.15
PRKV     35.19 41.67 31.19 39.44 34.42 29.63
256
Quest    20.22 24.72 17.38 22.89 20.2 15.62
ArkVale  33.4 40.62 28.94 38.33 33.02 25.93
ShadowKV 30.82 33.33 29.26 38.89 28.37 22.22
SnapKV   31.21 33.33 29.9 38.33 29.3 23.15
PRKV     34.0 42.19 28.94 36.11 34.42 29.63
""",
)
_T6 = _by_budget(
    "39.36 40.62 38.59 42.22 38.6 36.11",
    """
4096
Quest   35.39 30.9 26.95 33.73 25.25 26.04
ArkVale 37.77 38.54 37.3 41.11 37.67 32.41
PRKV    38.77 40.1 37.94 42.22 38.14 34.26
2048
Quest   33.8 35.42 32.8 37.78 33.95 26.85
ArkVale 37.38 38.02 36.98 41.11 36.74 32.41
PRKV    37.77 38.54 37.3 41.11 37.21 33.33
1024
Quest   33.4 34.9 32.48 37.78 33.02 26.85
ArkVale 36.18 36.98 35.69 41.11 34.88 30.56
PRKV    36.78 36.98 36.66 41.11 35.81 31.48
""",
)
_T1_COLUMNS = "AIME24-pass@4 AIME24-avg@4 MATH500-pass@4 MATH500-avg@4"
_T1 = {
    "Qwen3-4B": table(f"""
{_T1_COLUMNS}
full                            86.67 74.17 95.40 94.20
quest:page=32:window=64:retrieved=1024    70.00 56.67 84.80 78.50
arkvale:retrieved=1024          76.67 62.50 85.40 84.30
shadowkv:retrieved=1024         76.67 59.17 85.00 81.10
snapkv-refreshed:retrieved=1024 83.33 67.50 93.60 90.00
prkv:retrieved=1024             86.67 75.00 95.00 93.80
"""),
    "Qwen3-8B": table(f"""
{_T1_COLUMNS}
full                            83.33 74.17 96.20 95.10
quest:page=32:window=64:retrieved=1024    76.67 65.83 86.80 78.60
arkvale:retrieved=1024          80.00 68.33 87.00 86.90
shadowkv:retrieved=1024         76.67 67.50 86.80 82.60
snapkv-refreshed:retrieved=1024 83.33 67.50 93.60 93.60
prkv:retrieved=1024             83.33 73.33 95.40 94.40
"""),
}
_T4 = {
    _QWEN: table("""
                    32K 64K 128K
prkv:retrieved=512  0.25 0.25 0.25
prkv:retrieved=1024 0.4062 0.375 0.3438
prkv:retrieved=2048 0.5 0.4844 0.4219
prkv:retrieved=4096 0.6016 0.5781 0.5
"""),
    _LLAMA: table("""
                    32K 64K 128K
prkv:retrieved=512  0.625 0.5625 0.5
prkv:retrieved=1024 0.6875 0.625 0.5625
prkv:retrieved=2048 0.7344 0.7031 0.625
prkv:retrieved=4096 0.7891 0.75 0.6875
"""),
}
_T5 = table("""
       prefill-NHD prefill-HND decode-NHD decode-HND
4096   1.0358 1.2567 0.0359 0.0320
8192   4.9863 4.8339 0.0331 0.0320
16384  19.1479 19.0742 0.0568 0.0565
32768  76.4648 77.2803 0.0971 0.0956
65536  325.6366 317.4488 0.1809 0.1777
131072 1548.4492 1546.6578 0.3658 0.3981
""")
_F1 = table("""
         us ratio
full     - 1
magicpig - 15
arkvale  - -
""")
_F2 = {
    _LLAMA: table("""
                        layer-10 layer-20 layer-30
oracle:retrieved=1024   - - -
arkvale:retrieved=1024  - - -
"""),
    "Qwen3-8B": table("""
                        AIME
oracle:retrieved=4096   95
arkvale:retrieved=4096  80
"""),
}
_PARTS = {f"{4 * i}/16": (i / 4, (i + 1) / 4) for i in range(4)}
_STATIC = "prkv:share=1.0:interval=1000000:retrieved=1024:window="
_F3 = table(f"""
                                {" ".join(_PARTS)}
oracle:retrieved=1024           - - - -
{_STATIC}1                      65 65 65 65
{_STATIC}64                     - - - -
prkv:share=0.0:retrieved=1024   - - - -
prkv:share=0.25:retrieved=1024  - - - -
""")
_SHARES = tuple(f"prkv:share={share}" for share in ("0.0", "0.25", "0.5", "0.75", "1.0"))
_F8_COLUMNS = {
    "AIME24": View("aime24", 0, 16_000, "attention_mass", "retrieved=1024", every=64),
    "LongBench-v2": View("longbench_v2", 64_000, 512, "attention_mass", "retrieved=1024", every=8),
    "NIAH": View("niah_single", 128_000, 32, "attention_mass", "retrieved=1024"),
}
_F8 = table(f"{' '.join(_F8_COLUMNS)}\n" + "\n".join(f"{row} - - -" for row in _SHARES))
_POSITIONS = {f"{2 * i}k": (i / 8, (i + 1) / 8) for i in range(8)}
_F20 = table(f"{' '.join(_POSITIONS)}\n" + "\n".join(f"{row} {' '.join('-' * 8)}" for row in _SHARES))
_F6 = {
    model: Table(
        ("LongBench-v2", "NIAH"), {row: {"LongBench-v2": of["Overall"], "NIAH": None} for row, of in said.rows.items()}
    )
    for model, said in ((_LLAMA, _T2), (_QWEN, _T3))
}
_NIAH = {"NIAH": (("niah_single",), 64_000)}
_TENTHS = tuple(f"{10 * i}%" for i in range(10))
_F9 = table(f"""
                       {" ".join(_TENTHS)} of-truth
oracle:retrieved=1024  {" ".join("-" * 10)} 100
arkvale:retrieved=1024 {" ".join("-" * 10)} -
""")
_F7_LEFT = ("full", "prkv:retrieved=1024", "arkvale:retrieved=1024", "shadowkv:retrieved=1024")
_F7_RIGHT = tuple(
    f"prkv:retrieved=1024:transfer={how}" for how in ("each", "each:layout=page", "bulk", "bulk:layout=page", "uva")
)
_F7 = table("32k+512 400+16k tpot-ms\n" + "\n".join(f"{row} - - -" for row in (*_F7_LEFT, *_F7_RIGHT)))
_F22 = table("prompt tpot-ms\nprkv:retrieved=1024:transfer=bulk - -\nprkv:retrieved=1024:transfer=bulk:layout=page - -")
_F23 = table("prefill-% decode-% amortised-%\nprkv:retrieved=1024 8 50 0.3")
_FOUR = {f"{name}-{what}@4": Score(of, metric) for name, of in (("AIME24", "aime24"), ("MATH500", "math500"))
         for what, metric in (("pass", "pass"), ("avg", "score"))}  # fmt: skip
_GPU = "one GPU behind PCIe 4"

EXPERIMENTS = (
    Experiment("prkv-t1", "AIME24 and MATH500, four answers each, 1,024 tokens", "PRKV, table 1 (section 5.1)", _T1,
               Scores(_FOUR, samples={"aime24": 4, "math500": 4}), "% right", "table", 6000),
    Experiment("prkv-t2", "LongBench v2 by budget, Llama", "PRKV, table 2 (appendix E.1)", {_LLAMA: _T2}, _BY_SIZE, "% right",
               "table", 1800),
    Experiment("prkv-t3", "LongBench v2 by budget, Qwen2.5-14B", "PRKV, table 3 (appendix E.1)", {_QWEN: _T3}, _BY_SIZE, "% right",
               "table", 3000),
    Experiment("prkv-t4", "The automatic static share", "PRKV, table 4 (appendix G)", _T4,
               Special(shares, ("32K", "64K", "128K"), "--model, --data (longbench_v2: a folder, or hub)",
                       {"lengths": {"32K": 32_000, "64K": 64_000, "128K": 128_000}, "prompt": "longbench_v2", "samples": 8}),
               "static share", "lines", 20, "the paper takes LongBench, whose prompts are rarely so long; here LongBench v2, cut"),
    Experiment("prkv-t5", "Attention over NHD and HND", "PRKV, table 5 (appendix I)", {_GPU: _T5},
               Special(layouts, tuple(_T5.columns), "a GPU", {"heads": 32, "kv_heads": 8, "dim": 128}, weights=False), "ms",
               "table", 1, "the paper does not give the heads; here those of Llama-3.1-8B"),
    Experiment("prkv-t6", "LongBench v2 by budget, Qwen2.5-32B", "PRKV, table 6 (appendix J)", {"Qwen2.5-32B-Instruct": _T6},
               _BY_SIZE, "% right", "table", 5000, "the paper's Quest row at 4,096 repeats parts of its table 3"),
    Experiment("prkv-f1", "Time of MagicPIG's and ArkVale's estimation at 64k", "PRKV, figure 1", {_GPU: _F1},
               Special(estimates, ("us", "ratio"), "a GPU", {"shape": "llama-3.1-8b", "length": 65_536}, weights=False),
               "us; times full attention's", "bars", 2, "the paper's MagicPIG estimates on the CPU; here on the device"),
    Experiment("prkv-f2", "Attention mass of ArkVale and of the exact top-k", "PRKV, figure 2", _F2,
               Together((
                   (Watched({f"layer-{n}": View("niah_single", 37_000, 32, "attention_mass", layer=n) for n in (10, 20, 30)}),
                    tuple(_F2[_LLAMA].rows)),
                   (Watched({"AIME": View("aime24", 0, 32_000, "attention_mass", every=128)}), tuple(_F2["Qwen3-8B"].rows)),
               )),
               "% of attention", "bars", 60, "the paper says of the needle: ArkVale is 25 points below"),
    Experiment("prkv-f3", "Reuse of the top-k with and without local tokens; three static shares", "PRKV, figure 3", {_LLAMA: _F3},
               Watched({name: View("longbench_gov_report", 32_000, 256, "attention_mass", part=part, every=4)
                        for name, part in _PARTS.items()}, 4), "% of attention", "lines", 30),
    Experiment("prkv-f6", "LongBench v2 and needles by budget", "PRKV, figure 6", _F6,
               Together(((Scores({"LongBench-v2": Score("longbench_v2")}, 128_000), ()),
                         (Asked(_NIAH, 20, text=True), ()))),
               "% right", "table", 2400,
               "LongBench v2 as in tables 2 and 3; a model judges needles in the paper, here the number must stand in the answer"),
    Experiment("prkv-f7", "Latency of long prompts and long answers; transfers", "PRKV, figure 7", {_GPU: _F7},
               Together((
                   (Timed({"32k+512": Timing(32_768, "total", new_tokens=512),
                           "400+16k": Timing(400, "total", new_tokens=16_000)}), _F7_LEFT),
                   (Timed({"tpot-ms": Timing(32_768, "tpot-ms", new_tokens=128)}, steps="eager"), _F7_RIGHT),
               )), "s; ms a token", "bars", 40,
               "the paper says: at most 6.75 times ArkVale's speed, 1.5 times by contiguous pages, 7.7 times by batched transfer; "
               "here ArkVale and ShadowKV share PRKV's transfer; the transfers' steps are all eager"),
    Experiment("prkv-f8", "Attention mass by static share", "PRKV, figure 8", {_LLAMA: _F8, "Qwen3-8B": _F8},
               Watched(_F8_COLUMNS, 4), "% of attention", "lines", 240),
    Experiment("prkv-f9", "Where selected tokens stand", "PRKV, figure 9 (appendix D)", {_LLAMA: _F9},
               Special(spread, (*_TENTHS, "of-truth"), "--model",
                       {"source": View("niah_single", 37_000, 15, layer=5), "step": 13}),
               "% of the tokens selected", "bars", 3, "the paper gives a picture of the places"),
    Experiment("prkv-f20", "Attention mass by static share over 16k tokens, k = 1,024", "PRKV, figure 20 (appendix F)",
               {"Qwen3-8B": _F20},
               Watched({name: View("aime24", 0, 16_000, "attention_mass", "retrieved=1024", part=part, every=64)
                        for name, part in _POSITIONS.items()}, 4), "% of attention", "lines", 200),
    Experiment("prkv-f21", "Attention mass by static share over 16k tokens, k = 2,048", "PRKV, figure 21 (appendix F)",
               {"Qwen3-8B": _F20},
               Watched({name: View("aime24", 0, 16_000, "attention_mass", "retrieved=2048", part=part, every=64)
                        for name, part in _POSITIONS.items()}, 4), "% of attention", "lines", 200),
    Experiment("prkv-f22", "Restructured pages: a map of tokens, and rows moved on the host", "PRKV, figure 22 (appendix H)",
               {_GPU: _F22},
               Timed({"prompt": Timing(32_768, "tt2t", new_tokens=256), "tpot-ms": Timing(32_768, "tpot-ms", new_tokens=256)}),
               "s; ms a token", "bars", 4, "the figure is a drawing; what is measured here is what the rewrite of rows costs"),
    Experiment("prkv-f23", "What the static set and the pages cost", "PRKV, figure 23 (appendix H)",
               {"Llama-3.1-8B-Instruct, " + _GPU: _F23},
               Timed({"prefill-%": Timing(32_768, "index-%", new_tokens=256),
                      "decode-%": Timing(32_768, "refresh-%", new_tokens=256),
                      "amortised-%": Timing(32_768, "amortised-%", new_tokens=256)}),
               "% of the prompt; of a step; of a step over 128", "bars", 4,
               "the paper times a layer that makes its set anew; here all layers in turn, from the mean and the median of steps"),
)  # fmt: skip
