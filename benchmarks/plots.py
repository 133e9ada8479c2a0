"""Draws docs/results.png and docs/recall.png from benchmarks/results/*.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

HERE = Path(__file__).parent


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def main() -> None:
    results().savefig(HERE.parent / "docs" / "results.png", dpi=130)
    recall().savefig(HERE.parent / "docs" / "recall.png", dpi=130)


def recall(length: int = 32768) -> Figure:
    """What is found at 32k: ParisKV by its ratios and without its parts (its paper's figures 9 and 10), ClusterKV by distance and
    number of clusters (figure 11b). Of several lines of a setting the one of most prompts, of these the latest."""
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    for line in lines("recall"):
        key = line["method"], line["budget"]
        if line["length"] == length and line["samples"] >= found.get(key, line)["samples"]:
            found[key] = line
    figure = Figure(figsize=(16, 4.4), layout="constrained")
    ratios, parts, clusters = figure.subplots(1, 3, width_ratios=(1, 1.15, 1))

    def swept(label: str, settings: dict[float, str], color: str) -> None:
        runs = {at: found[method, None] for at, method in settings.items()}
        ratios.plot(list(runs), [run["recall_at_k"] for run in runs.values()], "o-", markersize=3, color=color, label=label)
        ratios.plot(list(runs), [run["ceiling"] for run in runs.values()], ":", color=color)

    paper = "pariskv:preset=paper"
    for i, rho in enumerate((0.2, 0.3, 0.5)):
        betas = [beta for beta in (0.05, 0.1, 0.2, 0.3) if (f"{paper}:rho={rho}:beta={beta}", None) in found]
        swept(f"the paper's tiers, rho {rho}", {beta: f"{paper}:rho={rho}:beta={beta}" for beta in betas}, f"C{i + 1}")
    swept("default: graded votes, keys from their centre", {b: f"pariskv:beta={b}" for b in (0.05, 0.1, 0.15, 0.2)}, "C0")
    ratios.axhline(0.85, color="grey", linewidth=0.8)
    ratios.set(xlabel="beta, candidates of the keys", ylabel="recall_at_100", title="ParisKV (dotted: the candidates' ceiling)")
    ratios.legend(fontsize=7)

    shown = {
        "default (beta .1)": "pariskv",
        "keys as they are": "pariskv:centre=False",
        "the paper's tiers": paper,
        "binary votes": f"{paper}:votes=binary",
        "no rotation": f"{paper}:rotate=False",
        "centroids learned on the prompt": f"{paper}:centroids=learned",
        "learned, no rotation": f"{paper}:centroids=learned:rotate=False",
        "learned, keys not normalised": f"{paper}:centroids=learned:normalise=False",
        "learned, neither": f"{paper}:centroids=learned:rotate=False:normalise=False",
        "group by mean": "pariskv:policy=mean",
        "group by mean_query": "pariskv:policy=mean_query",
    }
    for place, method in enumerate(shown.values()):
        run = found[method, None]
        parts.barh(place, run["ceiling"], color="0.85")
        parts.barh(place, run["recall_at_k"], color="C0" if method.count("paper") == 0 else "C1")
    parts.set_yticks(range(len(shown)), list(shown), fontsize=8)
    parts.invert_yaxis()
    parts.set(xlabel="recall_at_100 (grey: ceiling)", xlim=(0.4, 1), title="ParisKV without its parts, at the prompt's end")

    for i, distance in enumerate(("cosine", "l2", "inner")):
        for budget, style in ((256, ":"), (1024, "-")):
            counts = (200, 400, 600, 800)
            runs = [found[f"clusterkv:preset=paper:distance={distance}:clusters={count}", budget] for count in counts]
            marks = {"marker": "o", "markersize": 3, "color": f"C{i}"}
            label = f"{distance}, {budget} tokens"
            clusters.plot(counts, [run["recall_at_rows"] for run in runs], style, label=label, **marks)
    clusters.set_xticks((200, 400, 600, 800))
    clusters.set(xlabel="clusters of the prompt", ylabel="recall of the exact rows", title="ClusterKV, as in its paper")
    clusters.legend(fontsize=7)
    figure.suptitle(
        f"Share of the exact best rows that are selected, {length:,} tokens, shipped model, every layer", fontsize=10
    )
    return figure


def results() -> Figure:
    """Pass keys, and time per output token."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    passkey = [line for line in lines("passkey") if (line["budget"], line["dense_layers"], line["seed"]) == (64, 0, 0)]
    shown = {
        "oracle": "oracle",
        "pariskv:preset=paper": "pariskv, as in its paper",
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
    return figure


if __name__ == "__main__":
    main()
