"""How PRKV's tables and figures are measured; what the paper says is in papers/prkv.toml."""

from __future__ import annotations

from lab.reproduce.devices import estimates, layouts
from lab.reproduce.experiment import experiments
from lab.reproduce.plans import Asked, Score, Scores
from lab.reproduce.special import Special, Together, shares, spread
from lab.reproduce.timed import Timed, Timing
from lab.reproduce.watched import View, Watched

_SPLIT = ("Overall", "Easy", "Hard", "Short", "Medium", "Long")
_V2 = Scores({name: Score("longbench_v2", "score" if name == "Overall" else name.lower()) for name in _SPLIT}, 128_000)
_FOUR = {f"{name}-{what}@4": Score(of, metric) for name, of in (("AIME24", "aime24"), ("MATH500", "math500"))
         for what, metric in (("pass", "pass"), ("avg", "score"))}  # fmt: skip
_LENGTHS = {"32K": 32_000, "64K": 64_000, "128K": 128_000}
_MASS = {
    "AIME24": View("aime24", 0, 16_000, "attention_mass", "retrieved=1024", every=64),
    "LongBench-v2": View("longbench_v2", 64_000, 512, "attention_mass", "retrieved=1024", every=8),
    "NIAH": View("niah_single", 128_000, 32, "attention_mass", "retrieved=1024"),
}
_REPORT = View("longbench_gov_report", 32_000, 256, "attention_mass", every=4)
_TENTHS = tuple(f"{10 * i}%" for i in range(10))
_TRANSFERS = (
    *(f"prkv-copies:retrieved=1024:transfer=each:layout={layout}" for layout in ("token", "page")),
    "prkv:retrieved=1024:transfer=bulk",
    "prkv-copies:retrieved=1024:transfer=bulk:layout=page",
    "prkv:retrieved=1024:transfer=uva",
)


def _by_position(options: str) -> Watched:
    view = View("aime24", 0, 16_000, "attention_mass", options, every=64)
    return Watched({f"{2 * i}k": view._replace(part=(i / 8, (i + 1) / 8)) for i in range(8)}, 4)


EXPERIMENTS = experiments("prkv", {
    "prkv-t1": Scores(_FOUR, samples={"aime24": 4, "math500": 4}),
    "prkv-t2": _V2,
    "prkv-t3": _V2,
    "prkv-t4": Special(shares, tuple(_LENGTHS), "--model, --data (longbench_v2: a folder, or hub)",
                       {"lengths": _LENGTHS, "prompt": "longbench_v2", "samples": 8}),
    "prkv-t5": Special(layouts, ("prefill-NHD", "prefill-HND", "decode-NHD", "decode-HND"), "a GPU",
                       {"heads": 32, "kv_heads": 8, "dim": 128}, weights=False),
    "prkv-t6": _V2,
    "prkv-f1": Special(estimates, ("us", "ratio"), "a GPU", {"shape": "llama-3.1-8b", "length": 65_536}, weights=False),
    "prkv-f2": Together((
        (Watched({f"layer-{n}": View("niah_single", 37_000, 32, "attention_mass", layer=n) for n in (10, 20, 30)}),
         ("oracle:retrieved=1024", "arkvale:retrieved=1024")),
        (Watched({"AIME": View("aime24", 0, 32_000, "attention_mass", every=128)}),
         ("oracle:retrieved=4096", "arkvale:retrieved=4096")),
    )),
    "prkv-f3": Watched({f"{4 * i}/16": _REPORT._replace(part=(i / 4, (i + 1) / 4)) for i in range(4)}, 4),
    "prkv-f6": Together((
        (Scores({"LongBench-v2": Score("longbench_v2")}, 128_000), ()),
        (Asked({"NIAH": (("niah_single",), 64_000)}, 20, text=True), ()),
    )),
    "prkv-f7": Together((
        (Timed({"32k+512": Timing(32_768, "total", new_tokens=512), "400+16k": Timing(400, "total", new_tokens=16_000)}),
         ("full", "prkv:retrieved=1024", "arkvale:retrieved=1024", "shadowkv:retrieved=1024")),
        (Timed({"tpot-ms": Timing(32_768, "tpot-ms", new_tokens=128)}, steps="eager"), _TRANSFERS),
    )),
    "prkv-f8": Watched(_MASS, 4),
    "prkv-f9": Special(spread, (*_TENTHS, "of-truth"), "--model",
                       {"source": View("niah_single", 37_000, 15, layer=5), "step": 13}),
    "prkv-f20": _by_position("retrieved=1024"),
    "prkv-f21": _by_position("retrieved=2048"),
    "prkv-f22": Timed({"prompt": Timing(32_768, "tt2t", new_tokens=256), "tpot-ms": Timing(32_768, "tpot-ms", new_tokens=256)}),
    "prkv-f23": Timed({name: Timing(32_768, measure, new_tokens=256) for name, measure in
                       (("prefill-%", "index-%"), ("decode-%", "refresh-%"), ("amortised-%", "amortised-%"))}),
})  # fmt: skip
