"""Draws docs/results.png from benchmarks/results/*.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def main() -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    passkey = [line for line in lines("passkey") if (line["budget"], line["dense_layers"], line["seed"]) == (64, 0, 0)]
    shown = {
        "oracle": "oracle",
        "pariskv": "pariskv",
        "icecache": "icecache",
        "icecache:preset=paper:query_beam_share=0.0015": "icecache, descending by points, 0.0015 n of them",
        "streaming": "streaming",
    }
    for i, (method, label) in enumerate(shown.items()):
        runs = sorted((line for line in passkey if line["method"] == method), key=lambda line: line["length"])
        lift = 1.2 * (2 - i) if i < 3 else 0.0  # equal lines beside each other
        left.plot(
            [r["length"] for r in runs], [100 * r["accuracy"] + lift for r in runs], marker="o", markersize=3, label=label
        )
    left.set(
        xscale="log", xlabel="context, tokens", ylabel="pass keys found, %", title="Budget 64, every layer (shipped model)"
    )
    left.set_xticks([4096, 16384, 32768, 65536], ["4k", "16k", "32k", "64k"])
    left.minorticks_off()
    left.legend(fontsize=7, loc="center left", bbox_to_anchor=(0, 0.3))
    runs = [line for line in lines("decode_h200") if line["length"] == 36864]
    names = [f"{r['method']} ({r['steps']})" for r in runs]
    right.barh(names[::-1], [1e3 * r["itl_p50_s"] for r in runs][::-1], color="C0")
    right.set(xlabel="time per output token, median, ms", title="8B shape, 36k tokens, one H200")
    right.tick_params(axis="y", labelsize=7)
    figure.savefig(HERE.parent / "docs" / "results.png", dpi=130)


if __name__ == "__main__":
    main()
