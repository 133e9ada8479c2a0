"""ParisKV (Qi et al., 2026): tables 1 to 3 and 5 to 7, figures 1 and 6 to 11."""

from __future__ import annotations

from kvthaw.reproduce.devices import kernels
from kvthaw.reproduce.experiment import Experiment, Table, table
from kvthaw.reproduce.plans import Asked, Score, Scores
from kvthaw.reproduce.special import Special, Together, drifted, regions
from kvthaw.reproduce.timed import Timed, Timing
from kvthaw.reproduce.watched import View, Watched

_Q4, _Q8, _R1, _LLAMA = "Qwen3-4B-Thinking-2507", "Qwen3-8B", "DeepSeek-R1-Distill-Llama-8B", "Llama-3.1-8B-Instruct"
_NAMES = {
    "Full": "full", "ParisKV": "pariskv:retrieved=100",
    "PQCache": "pqcache:sink=128:window=256:buffer=512:retrieved=0.2",
    "MagicPIG": "magicpig:sink=128:window=256:buffer=512:retrieved=0.5",
    "ShadowKV": "shadowkv:window=256:budget=1152", "FreeKV": "freekv:sink=64:window=256:retrieved=128",
    "Quest": "quest:budget=1152", "RetroInfer": "retroinfer:budget=1152", "SOCKET": "socket:budget=1152",
    "Twilight": "twilight:budget=1152",
}  # fmt: skip
"""Of the tables of accuracy: regions as in table 1, which the paper keeps the same in all methods (section 5), and appendix D.1."""
_TIMED = _NAMES | {
    "ParisKV": "pariskv:window=512:retrieved=100",
    "PQCache": "pqcache:budget=0.2",
    "MagicPIG": "magicpig:sink=128:window=512:budget=0.5",
}
"""Of the tables of speed (appendix D.2): sink 128 and local window 512, MagicPIG's the same, PQCache's its own."""
_BASELINES = (
    "MagicPIG takes what its hashes draw (half of the tokens bounds nothing); Quest, RetroInfer, SOCKET and Twilight have the "
    "1,152 tokens of the paper's ShadowKV, since the paper gives them no number; of these its outliers have 216, in the paper 384"
)


def _named(columns: str, rows: str, names: dict[str, str] = _NAMES) -> Table:
    """A table whose rows have the paper's names."""
    lines = [line.split(None, 1) for line in rows.splitlines() if line.strip()]
    return table("\n".join([columns, *(f"{names[name]} {values}" for name, values in lines)]))


_T1_ROWS = {
    "AIME25": ("pariskv:window=256:buffer=512:full_threshold=2048", "aime25"),
    "MATH500": ("pariskv:window=256:buffer=256:full_threshold=1024", "math500"),
    "GPQA-Diamond": ("pariskv:window=128:buffer=512:full_threshold=2048", "gpqa_diamond"),
    "LongBench-V2": ("pariskv:window=256:buffer=512:full_threshold=2048", "longbench_v2_cot"),
    "RULER": ("pariskv:window=256:buffer=512:full_threshold=2048", "ruler"),
}
_T1 = table("""
             local update full-threshold longest
AIME25       256 512 2048 38900
MATH500      256 256 1024 38900
GPQA-Diamond 128 512 2048 32800
LongBench-V2 256 512 2048 1024+512
RULER        256 512 2048 128
""")
_T2_COLUMNS = "GPQA-pass@1 MATH500-pass@1 AIME25-pass@8"
_T2 = {
    _Q4: _named(
        _T2_COLUMNS,
        """
Full     64.14 88.60 86.67
PQCache  38.38 58.80 3.33
MagicPIG 32.32 46.40 6.67
ParisKV  72.22 92.80 80.00
""",
    ),
    _R1: _named(
        _T2_COLUMNS,
        """
Full     49.49 80.40 50.00
PQCache  23.81 66.75 13.30
MagicPIG 27.78 49.00 13.30
ParisKV  57.07 84.40 53.30
""",
    ),
    _Q8: _named(
        _T2_COLUMNS,
        """
Full     54.54 87.40 83.33
PQCache  47.85 69.21 16.67
MagicPIG 33.84 45.80 10.00
ParisKV  55.05 93.00 73.33
""",
    ),
}
_SPLIT = ("Short-Easy", "Short-Hard", "Medium-Easy", "Medium-Hard", "Long-Easy", "Long-Hard")
_V2_COLUMNS = " ".join(("Overall", *_SPLIT))
_T5 = {
    _Q4: _named(
        _V2_COLUMNS,
        """
Full       25.84 27.12 16.53 36.36 25.20 26.67 28.57
PQCache    17.91 16.95 19.00 13.60 19.00 20.00 19.05
MagicPIG   16.70 18.64 10.74 14.77 20.47 28.89 12.70
ShadowKV   16.30 13.60 14.80 22.20 9.90 21.30 19.00
FreeKV     19.68 20.34 13.22 21.59 24.41 22.22 17.46
Quest      19.12 32.00 16.18 21.43 12.50 21.05 24.24
RetroInfer 23.69 34.50 31.70 22.70 22.20 13.60 9.70
SOCKET     17.93 20.00 22.06 16.67 12.50 15.79 21.21
Twilight   19.12 28.00 14.71 21.43 15.62 21.05 24.24
ParisKV    24.60 35.59 19.49 26.14 22.05 28.89 23.81
""",
    ),
    _Q8: _named(
        _V2_COLUMNS,
        """
Full       33.59 50.85 34.71 32.95 25.98 37.78 28.57
PQCache    25.50 23.70 31.60 28.20 24.00 25.00 20.00
MagicPIG   10.34 8.47 15.70 7.95 7.87 13.33 7.94
ShadowKV   15.90 40.70 23.10 6.80 13.40 6.70 3.20
FreeKV     15.31 28.81 24.79 15.91 11.81 6.70 3.20
Quest      23.90 36.00 25.00 28.57 15.62 31.58 18.18
RetroInfer 20.48 44.80 36.70 20.50 7.90 4.50 3.20
SOCKET     17.93 24.00 22.06 14.29 20.31 10.53 9.09
Twilight   20.32 36.00 26.47 19.05 12.50 15.79 15.15
ParisKV    33.07 52.54 34.71 34.09 26.77 37.21 19.67
""",
    ),
    _R1: _named(
        _V2_COLUMNS,
        """
Full       13.12 18.64 15.70 12.50 8.66 11.11 14.29
PQCache    19.90 18.60 21.50 21.60 22.20 15.60 14.30
MagicPIG   13.92 15.25 11.57 11.36 14.17 17.78 17.46
ShadowKV   14.51 18.60 23.10 13.60 14.20 2.20 4.80
FreeKV     17.50 44.07 30.58 9.09 8.66 6.67 4.76
Quest      23.51 24.00 27.94 28.57 14.06 26.32 24.24
RetroInfer 15.66 27.60 20.00 20.50 9.50 4.50 9.70
SOCKET     21.51 20.00 14.71 30.95 21.88 15.79 27.27
Twilight   20.72 20.00 14.71 26.19 23.44 15.79 24.24
ParisKV    28.43 37.29 25.62 28.41 25.20 31.11 30.16
""",
    ),
}
_T3_ROWS = [_NAMES[name] for name in ("Full", "PQCache", "MagicPIG", "ParisKV")]
_T3 = {model: Table(said.columns, {row: said.rows[row] for row in _T3_ROWS}) for model, said in _T5.items()}
_V2 = {"Overall": Score("longbench_v2_cot")} | {
    name: Score("longbench_v2_cot", " ".join(reversed(name.lower().split("-")))) for name in _SPLIT
}
_RULER = {
    "s1_niah": "niah_single_1", "s2_niah": "niah_single_2", "mk1_niah": "niah_multikey_1", "mk2_niah": "niah_multikey_2",
    "mv_niah": "niah_multivalue", "mq_niah": "niah_multiquery", "fwe": "fwe", "qa_1": "qa_1", "qa_2": "qa_2", "vt": "vt",
}  # fmt: skip
_T6 = _named(
    " ".join(_RULER),
    """
Full       100.00 100.00 96.88 89.58 98.44 99.74 71.18 86.46 51.04 47.92
PQCache    5.21 50.00 45.83 30.21 16.67 20.31 55.21 68.75 40.62 4.79
MagicPIG   100.00 94.79 83.33 34.38 73.44 78.12 70.08 73.96 42.71 53.33
ShadowKV   100.00 98.96 96.88 73.96 89.06 96.35 61.11 81.25 50.00 55.42
SOCKET     100.00 100.00 96.88 72.92 92.71 98.18 33.33 80.21 46.88 68.13
Twilight   98.96 100.00 95.83 76.04 90.36 97.92 57.29 80.21 48.96 74.17
RetroInfer 95.83 98.96 95.83 55.21 94.53 97.40 61.11 78.12 42.71 54.79
Quest      99.00 98.96 94.79 64.58 83.59 94.79 62.85 79.17 44.79 70.83
ParisKV    100.00 100.00 96.88 82.01 95.83 98.70 56.25 84.38 48.96 71.87
""",
)
_T7 = _named(
    "128K-pre 128K-dec 256K-pre 256K-dec 384K-pre 384K-dec",
    """
Quest      37.28 20.78 117.71 46.30 OOM OOM
Twilight   34.56 1106.14 OOM OOM OOM OOM
RetroInfer 35.74 29.14 126.71 37.53 274.85 33.31
Full       33.30 23.13 116.20 33.29 OOM OOM
SOCKET     38.29 225.00 OOM OOM OOM OOM
MagicPIG   55.10 120.57 141.10 230.24 272.80 487.77
PQCache    25.50 243.91 104.70 754.76 238.80 1207.81
ShadowKV   51.77 18.76 152.12 19.11 309.26 20.74
ParisKV    43.00 24.42 139.50 32.16 290.40 37.19
""",
    _TIMED,
)
_EIGHTHS = {f"{i}/8": (i / 8, (i + 1) / 8) for i in range(8)}
_NONE = " ".join("-" * 8)
_DRIFT = ("prompt-only", "all-keys")
_F1_ROWS = tuple(_NAMES[name] for name in ("ParisKV", "PQCache", "MagicPIG"))
_F1 = table(f"{' '.join(_EIGHTHS)} distance\n" + "\n".join(f"{row} {_NONE} -" for row in (*_F1_ROWS, *_DRIFT)))
_SIZES = ("16K", "64K", "256K")
_F6 = table("""
            16K 64K 256K
collision   - - 9.2
bucket_topk 9.4 - -
rerank      3-4 3-4 3-4
fetch       40 40 40
""")
_BATCHES = {"64K": (1, 4, 8), "128K": (1, 2, 4, 8), "256K": (1, 2, 5), "384K": (1, 3)}


def _batched(measure: str) -> Timed:
    return Timed({f"{at}x{rows}": Timing(1024 * int(at[:-1]), measure, rows) for at, each in _BATCHES.items() for rows in each},
                 "qwen3-8b")  # fmt: skip


_F7_COLUMNS = [f"{at}x{rows}" for at, each in _BATCHES.items() for rows in each]
_F7 = table(f"{' '.join(_F7_COLUMNS)}\nfull {' '.join('-' * 12)}\n{_TIMED['ParisKV']} {' '.join('-' * 12)}")
_F11 = table(f"""
{" ".join(_F7_COLUMNS)}
full - - - 24.87 - OOM OOM - OOM OOM OOM OOM
{_TIMED["ParisKV"]} - - - 24.32 - - 58.92 - - - - -
""")
_LONG = ("128K", "256K", "384K", "512K", "1024K")
_F8_COLUMNS = [f"{at}-{what}" for at in _LONG for what in ("pre", "dec")]
_F8 = _named(
    " ".join(_F8_COLUMNS),
    """
Full     - - - - OOM OOM OOM OOM OOM OOM
PQCache  - - - - - - - - - 2179
MagicPIG - - - - - - - - - 830
ParisKV  - - - - - - - - - 49
""",
    _TIMED,
)


def _long(sizes: tuple[str, ...]) -> Timed:
    return Timed({f"{at}-{name}": Timing(1024 * int(at[:-1]), measure) for at in sizes
                  for name, measure in (("pre", "ttft"), ("dec", "tpot-ms"))})  # fmt: skip


_BETAS = ("0.02", "0.05", "0.1", "0.2")
_F9_COLUMNS = {f"{k}k": View("text", 1000 * k, 32) for k in (4, 8, 16, 32, 64, 128)}
_F9 = table(
    f"{' '.join(_F9_COLUMNS)}\n"
    + "\n".join(f"pariskv:rho={max(beta, '0.2')}:beta={beta}:retrieved=100 - - - - - -" for beta in _BETAS)
)
_F10 = table("""
                                                                            coarse final
pariskv:retrieved=100                                                       16.1 64.3
pariskv:rotate=False:retrieved=100                                          - -
pariskv:centroids=learned:retrieved=100                                     - -
pariskv:centroids=learned:rotate=False:retrieved=100                        - -
pariskv:centroids=learned:rotate=False:normalise=False:retrieved=100        6 36.5
""")
_AIME = View("aime25", 0, 16_000, every=64)
_OWN = {
    "aime25": {"pariskv": "full_threshold=2048"},
    "gpqa_diamond": {"pariskv": "window=128:full_threshold=2048"},
    "math500": {"pariskv": "buffer=256:full_threshold=1024"},
}
"""What table 1 has beside the method's own; the prompts of other benchmarks are longer than its threshold."""
_A = "a GPU that it does not name"

EXPERIMENTS = (
    Experiment("pariskv-t1", "Settings by benchmark", "ParisKV, table 1", {"any": _T1},
               Special(regions, tuple(_T1.columns), "nothing", {"methods": _T1_ROWS}, weights=False), "tokens", "table", 0,
               "kvthaw's benchmarks end answers at their own longest; pariskv-t2 takes the paper's"),
    Experiment("pariskv-t2", "Long answers", "ParisKV, table 2 (section 5.1)", _T2,
               Scores({"GPQA-pass@1": Score("gpqa_diamond"), "MATH500-pass@1": Score("math500"),
                       "AIME25-pass@8": Score("aime25", "pass")},
                      samples={"aime25": 8}, options=_OWN,
                      new_tokens={"aime25": 38_900, "math500": 38_900, "gpqa_diamond": 32_800}),
               "% right", "table", 6000, _BASELINES),
    Experiment("pariskv-t3", "LongBench v2, reasoning first", "ParisKV, table 3 (section 5.1)", _T3, Scores(_V2, 120_000),
               "% right", "table", 2400, _BASELINES),
    Experiment("pariskv-t5", "LongBench v2, reasoning first, all baselines", "ParisKV, table 5 (appendix D.1)", _T5,
               Scores(_V2, 120_000), "% right", "table", 6000, _BASELINES),
    Experiment("pariskv-t6", "RULER at 128k", "ParisKV, table 6 (appendix D.1)", {_LLAMA: _T6},
               Asked({name: (f"ruler_{of}", 128_000) for name, of in _RULER.items()}, 96, (), text=True), "% right", "table", 2400,
               f"{_BASELINES}; RULER's haystack is Paul Graham's essays (--text), its questions SQuAD's and HotpotQA's"),
    Experiment("pariskv-t7", "Prefill and decoding at 128k to 384k", "ParisKV, table 7 (appendix D.1.2)",
               {"Llama-3.1-8B, " + _A: _T7}, _long(_LONG[:3]), "s; ms a token", "table", 60, _BASELINES),
    Experiment("pariskv-f1", "Recall over a long answer; drift of centroids", "ParisKV, figure 1", {_Q8: _F1},
               Together((
                   (Watched({name: _AIME._replace(part=part) for name, part in _EIGHTHS.items()}, 2), _F1_ROWS),
                   (Special(drifted, ("distance",), "--model, --data (aime25: a folder, or hub)",
                            {"source": _AIME}), _DRIFT),
               )), "% of the exact rows; 1 - cosine of generated keys to their centroid", "lines", 120,
               "the paper gives a picture; centroids move where those of the prompt are farther than those of all keys"),
    Experiment("pariskv-f6", "Kernels beside Torch", "ParisKV, figure 6", {_A: _F6},
               Special(kernels, _SIZES, "a GPU", {"sizes": {"16K": 16_384, "64K": 65_536, "256K": 262_144}}, weights=False),
               "times as fast as Torch", "lines", 3),
    Experiment("pariskv-f7", "Tokens a second by length and batch", "ParisKV, figure 7", {"Qwen3-8B, " + _A: _F7},
               _batched("throughput"), "tokens a second", "lines", 60,
               "the paper says: at most 2.3, 2.2, 2.8 times full attention's peak at 64k, 128k, 256k; what fits not is left out"),
    Experiment("pariskv-f8", "Prefill and decoding at 128k to 1M", "ParisKV, figure 8 and section 5.2",
               {"Llama-3.1-8B, " + _A: _F8},
               _long(_LONG), "s; ms a token", "lines", 90,
               "the paper says: 10.0, 23.5, 32.5, 38.9 and 44.4 times faster than PQCache; its budget here is 20 %"),
    Experiment("pariskv-f9", "Recall by share of candidates and length", "ParisKV, figure 9", {"a model not named": _F9},
               Watched(_F9_COLUMNS),
               "% of the exact 100 rows", "lines", 20, "the paper gives a picture and in words 5 to 10 %"),
    Experiment("pariskv-f10", "Recall without its parts", "ParisKV, figure 10 (section 5.3)", {_Q8: _F10},
               Watched({"coarse": _AIME._replace(field="ceiling"), "final": _AIME}), "% of the exact 100 rows", "bars", 60,
               "the paper's coarse recall is of another number of candidates"),
    Experiment("pariskv-f11", "Time per step by length and batch", "ParisKV, figure 11", {"Qwen3-8B, " + _A: _F11},
               _batched("tpot-ms"), "ms a step", "lines", 60, "the paper's OOM is of its GPU"),
)  # fmt: skip
