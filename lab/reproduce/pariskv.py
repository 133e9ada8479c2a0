"""How ParisKV's tables and figures are measured; what the paper says is in papers/pariskv.toml.

Rows of accuracy have regions as in table 1, which the paper keeps the same in all methods (section 5), and appendix D.1. Rows of
speed (appendix D.2) have sink 128 and local window 512, MagicPIG too; PQCache has its own.
"""

from __future__ import annotations

from lab.reproduce.devices import kernels
from lab.reproduce.experiment import experiments
from lab.reproduce.plans import Asked, Score, Scores
from lab.reproduce.special import Special, Together, drifted, regions
from lab.reproduce.timed import Timed, Timing
from lab.reproduce.watched import View, Watched

_SETTINGS = {
    "AIME25": ("pariskv:window=256:buffer=512:full_threshold=2048", "aime25"),
    "MATH500": ("pariskv:window=256:buffer=256:full_threshold=1024", "math500"),
    "GPQA-Diamond": ("pariskv:window=128:buffer=512:full_threshold=2048", "gpqa_diamond"),
    "LongBench-V2": ("pariskv:window=256:buffer=512:full_threshold=2048", "longbench_v2_cot"),
    "RULER": ("pariskv:window=256:buffer=512:full_threshold=2048", "ruler"),
}
_OWN = {
    "aime25": {"pariskv": "full_threshold=2048"},
    "gpqa_diamond": {"pariskv": "window=128:full_threshold=2048"},
    "math500": {"pariskv": "buffer=256:full_threshold=1024"},
}
"""What table 1 adds to the method's own; the prompts of other benchmarks are longer than its threshold."""
_SPLIT = ("Short-Easy", "Short-Hard", "Medium-Easy", "Medium-Hard", "Long-Easy", "Long-Hard")
_V2 = Scores({"Overall": Score("longbench_v2_cot")} | {
    name: Score("longbench_v2_cot", " ".join(reversed(name.lower().split("-")))) for name in _SPLIT
}, 120_000)  # fmt: skip
_RULER = {
    "s1_niah": "niah_single_1", "s2_niah": "niah_single_2", "mk1_niah": "niah_multikey_1", "mk2_niah": "niah_multikey_2",
    "mv_niah": "niah_multivalue", "mq_niah": "niah_multiquery", "fwe": "fwe", "qa_1": "qa_1", "qa_2": "qa_2", "vt": "vt",
}  # fmt: skip
_AIME = View("aime25", 0, 16_000, every=64)
_DRIFTING = (
    "pariskv:retrieved=100",
    "pqcache:sink=128:window=256:buffer=512:retrieved=0.2",
    "magicpig:sink=128:window=256:buffer=512:retrieved=0.5",
)
_BATCHES = {"64K": (1, 4, 8), "128K": (1, 2, 4, 8), "256K": (1, 2, 5), "384K": (1, 3)}
_LONG = ("128K", "256K", "384K", "512K", "1024K")


def _batched(measure: str) -> Timed:
    return Timed({f"{at}x{rows}": Timing(1024 * int(at[:-1]), measure, rows) for at, each in _BATCHES.items() for rows in each},
                 "qwen3-8b")  # fmt: skip


def _long(sizes: tuple[str, ...]) -> Timed:
    return Timed({f"{at}-{name}": Timing(1024 * int(at[:-1]), measure) for at in sizes
                  for name, measure in (("pre", "ttft"), ("dec", "tpot-ms"))})  # fmt: skip


EXPERIMENTS = experiments("pariskv", {
    "pariskv-t1": Special(regions, ("local", "update", "full-threshold", "longest"), "nothing", {"methods": _SETTINGS},
                          weights=False),
    "pariskv-t2": Scores(
        {"GPQA-pass@1": Score("gpqa_diamond"), "MATH500-pass@1": Score("math500"), "AIME25-pass@8": Score("aime25", "pass")},
        samples={"aime25": 8}, options=_OWN, new_tokens={"aime25": 38_900, "math500": 38_900, "gpqa_diamond": 32_800},
    ),
    "pariskv-t3": _V2,
    "pariskv-t5": _V2,
    "pariskv-t6": Asked({name: (f"ruler_{of}", 128_000) for name, of in _RULER.items()}, 96, (), text=True),
    "pariskv-t7": _long(_LONG[:3]),
    "pariskv-f1": Together((
        (Watched({f"{i}/8": _AIME._replace(part=(i / 8, (i + 1) / 8)) for i in range(8)}, 2), _DRIFTING),
        (Special(drifted, ("distance",), "--model, --data (aime25: a folder, or hub)", {"source": _AIME}),
         ("prompt-only", "all-keys")),
    )),
    "pariskv-f6": Special(kernels, ("16K", "64K", "256K"), "a GPU", {"sizes": {"16K": 16_384, "64K": 65_536, "256K": 262_144}},
                          weights=False),
    "pariskv-f7": _batched("throughput"),
    "pariskv-f8": _long(_LONG),
    "pariskv-f9": Watched({f"{k}k": View("text", 1000 * k, 32) for k in (4, 8, 16, 32, 64, 128)}),
    "pariskv-f10": Watched({"coarse": _AIME._replace(field="ceiling"), "final": _AIME}),
    "pariskv-f11": _batched("tpot-ms"),
})  # fmt: skip
