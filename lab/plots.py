"""Draws docs/overview.png and its dark twin, docs/nearness.png, docs/results.png, docs/recall.png and docs/drift_methods.png from
lab/results/*.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.cells import read_cells
from lab.claims import by_budget
from lab.evaluate.document import Share

HERE = Path(__file__).parent
STYLES = ("-", "--", ":", "-.")


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def main() -> None:
    overview().savefig(HERE.parent / "docs" / "overview.png", dpi=150)
    overview(dark=True).savefig(HERE.parent / "docs" / "overview-dark.png", dpi=150)
    nearness().savefig(HERE.parent / "docs" / "nearness.png", dpi=130)
    results().savefig(HERE.parent / "docs" / "results.png", dpi=130)
    recall().savefig(HERE.parent / "docs" / "recall.png", dpi=130)
    drift().savefig(HERE.parent / "docs" / "drift_methods.png", dpi=130)


def drift(length: int = 8192, steps: int = 4096) -> Figure:
    """Recall of the exact rows, and attention mass, while text goes on after a prompt (ParisKV's figure 1), on the device that most
    methods were watched on."""
    every = [line for line in lines("drift") if (line["length"], line["steps"]) == (length, steps)]
    devices = [line["device"] for line in every]
    shown = [line for line in every if line["device"] == max(devices, key=devices.count)]
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    measures = (("recall_at_k", "recall of as many exact rows"), ("attention_mass", "attention mass (full attention: 1)"))
    for axis, (field, label) in zip(panels, measures, strict=True):
        for number, line in enumerate(sorted(shown, key=lambda line: -line["recall_at_k"])):
            rows = f"{line['rows']:,.0f} rows of its own draw" if line["rows"] > 101 else f"{line['retrieved']:g} rows"
            places = [(one["first"] + one["stop"]) / 2 for one in line["bins"]]
            values = [one[field] for one in line["bins"]]
            axis.plot(places, values, STYLES[number % 4], label=f"{line['method']}, {rows}", color=f"C{number}")
        axis.set(xlabel="tokens after the prompt", ylabel=label)
    panels[0].legend(fontsize=7)
    figure.suptitle(
        f"{steps:,} tokens of a book after {length:,}, places: {shown[0]['samples']}, each with its paper's regions, shipped model",
        fontsize=10,
    )
    return figure


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

    paper = "pariskv"
    for i, rho in enumerate((0.2, 0.3, 0.5)):
        betas = [beta for beta in (0.05, 0.1, 0.2, 0.3) if (f"{paper}:rho={rho}:beta={beta}", None) in found]
        swept(f"{paper}, rho {rho}", {beta: f"{paper}:rho={rho}:beta={beta}" for beta in betas}, f"C{i + 1}")
    swept("pariskv-plus", {b: f"pariskv-plus:beta={b}" for b in (0.05, 0.1, 0.15, 0.2)}, "C0")
    ratios.axhline(0.85, color="grey", linewidth=0.8)
    ratios.set(xlabel="beta, candidates of the keys", ylabel="recall_at_100", title="ParisKV (dotted: the candidates' ceiling)")
    ratios.legend(fontsize=7)

    shown = {
        "pariskv-plus (beta .1)": "pariskv-plus",
        "keys as they are": "pariskv-plus:centre=False",
        "pariskv: tiers": paper,
        "binary votes": f"{paper}:votes=binary",
        "no rotation": f"{paper}-ablated:rotate=False",
        "centroids learned on the prompt": f"{paper}-ablated:centroids=learned",
        "learned, no rotation": f"{paper}-ablated:centroids=learned:rotate=False",
        "learned, keys not normalised": f"{paper}-ablated:centroids=learned:normalise=False",
        "learned, neither": f"{paper}-ablated:centroids=learned:rotate=False:normalise=False",
        "group by mean_query": "pariskv-plus:policy=mean_query",
    }
    for place, method in enumerate(shown.values()):
        run = found[method, None]
        parts.barh(place, run["ceiling"], color="0.85")
        parts.barh(place, run["recall_at_k"], color="C0" if method.startswith("pariskv-plus") else "C1")
    parts.set_yticks(range(len(shown)), list(shown), fontsize=8)
    parts.invert_yaxis()
    parts.set(xlabel="recall_at_100 (grey: ceiling)", xlim=(0.4, 1), title="ParisKV without its parts, at the prompt's end")

    for i, distance in enumerate(("cosine", "l2", "inner")):
        for budget, style in ((256, ":"), (1024, "-")):
            counts = (200, 400, 600, 800)
            runs = [found[f"clusterkv:window=16:buffer=16:distance={distance}:clusters={count}", budget] for count in counts]
            marks = {"marker": "o", "markersize": 3, "color": f"C{i}"}
            label = f"{distance}, {budget} tokens"
            clusters.plot(counts, [run["recall_at_rows"] for run in runs], style, label=label, **marks)
    clusters.set_xticks((200, 400, 600, 800))
    clusters.set(xlabel="clusters of the prompt", ylabel="recall of the exact rows", title="ClusterKV, its window 16")
    clusters.legend(fontsize=7)
    figure.suptitle(
        f"Share of the exact best rows that are selected, {length:,} tokens, shipped model, every layer", fontsize=10
    )
    return figure


def overview(*, dark: bool = False) -> Figure:
    """Time per output token, and bytes of KV, index and dense layers on the device, by length, of one run."""
    ink = "white" if dark else "black"
    shown = {
        "full": ("full attention", ink, -3),
        "pariskv-plus": ("pariskv-plus, 100 rows", "#56B4E9" if dark else "#0072B2", -9),
        "thaw": ("thaw, 256 rows", "#E69F00" if dark else "#B5660B", 3),
    }
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (label, colour, up) in shown.items():
        mine = sorted(
            (line for line in lines("overview") if line["setting"]["method"] == method), key=lambda of: of["setting"]["length"]
        )
        at = [line["setting"]["length"] for line in mine]
        parts = "kv_device_bytes", "index_device_bytes", "kv_dense_bytes"
        held = [sum(line[part] for part in parts) / 1e9 for line in mine]
        for axes, values, above in ((left, [1e3 * line["tpot_s"] for line in mine], up), (right, held, -up - 6)):
            axes.plot(at, values, "o-", markersize=4, color=colour)
            axes.annotate(label, (at[-1], values[-1]), xytext=(7, above), textcoords="offset points", color=colour, fontsize=9)
    left.set(title="milliseconds per token")
    right.set(title="GB of GPU memory: KV cache and index")
    for axes in (left, right):
        axes.set(xlabel="context, tokens", xlim=(0, 720 << 10))
        axes.set_ylim(bottom=0)
        axes.set_xticks([n << 10 for n in (36, 128, 256, 512)], ["36k", "128k", "256k", "512k"])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(ink)
        axes.tick_params(colors=ink)
        axes.title.set_color(ink)
        axes.xaxis.label.set_color(ink)
        axes.grid(axis="y", alpha=0.25)
        axes.set_facecolor("none")
    figure.set_facecolor("#1e2129" if dark else "white")
    return figure


def nearness() -> Figure:
    """Divergence from full attention by tokens read, on pretrained models: thaw under its tolerances, and every other method."""
    every = [one for one in lines("real_models") if one["method"] != "full"]
    thaw = {"thaw", *(f"thaw:tolerance={tolerance}" for tolerance in (0.0001, 0.001, 0.004))}
    named = {"oracle": "black", "pariskv-plus": "C2", "icecache-digest-device": "C0", "retroinfer": "C1", "quest": "C3"}
    panels = {
        "SmolLM2-135M-Instruct": ("longbench-8k, settings of thaw", "longbench-8k"),
        "Gemma 3 270M": ("longbench-16k, settings of thaw", "longbench-16k"),
        "Qwen2.5-Coder-0.5B-Instruct": ("longbench-16k",),
    }
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    for axes, (model, texts) in zip(figure.subplots(1, 3, sharey=True), panels.items(), strict=True):
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for text in reversed(texts):  # what the first has counts
            found |= {(one["method"], one["budget"]): one for one in every if (one["model"], one["text"]) == (model, text)}
        others = sorted({method for method, _ in found if ":" not in method} - thaw, key=lambda name: name in named)
        for method in (*others, "thaw"):
            wanted = thaw if method == "thaw" else {method}
            mine = [one for (name, budget), one in found.items() if name in wanted and (method != "thaw" or budget == 1024)]
            points = sorted((one["attended_mean"] or one["budget"], one["kl"]) for one in mine)
            look: dict[str, Any] = {"color": named.get(method, "grey"), "linewidth": 1.2}
            if method not in named:
                look |= {"alpha": 0.35, "linewidth": 0.8}
            if method == "thaw":
                look = {"color": "C4", "linewidth": 2.4, "marker": "o", "markersize": 4}
            label = "thaw, by tolerance" if method == "thaw" else "exact top-k" if method == "oracle" else method
            axes.plot(*zip(*points, strict=True), label=label if method in named or method == "thaw" else None, **look)
        axes.set(xscale="log", yscale="log", xlabel="tokens read per KV head and step", title=model, ylim=(2e-4, 4))
        axes.set_xticks((64, 256, 1024, 4096), ["64", "256", "1,024", "4,096"])
        axes.minorticks_off()
        axes.grid(alpha=0.2)
    figure.axes[0].set_ylabel("KL(full attention || method), nats a token")
    figure.axes[2].legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), title="grey: the other methods")
    return figure


def results() -> Figure:
    """What methods keep of full attention's accuracy by budget, and time per output token by length."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    table = by_budget(read_cells(HERE / "results" / "compare.jsonl"))
    budgets = [int(column.split()[0]) for column in table.columns[1:]]
    accuracy = {str(row[0]): [100 * share.value for share in row[1:] if isinstance(share, Share)] for row in table.rows}
    ours = ("icecache-digest", "pariskv-plus", "clusterkv-plus", "prkv-plus")
    papers = ("icecache", "pariskv", "clusterkv", "prkv")
    others = ("socket", "retroinfer", "quest", "snapkv", "h2o", "streaming")
    for i, method in enumerate((*ours, *papers, *others)):
        look: dict[str, Any] = {"linestyle": "--" if method in papers else "-", "marker": "o", "color": f"C{i % 4}"}
        if method in others:
            look = {"linestyle": STYLES[i % 4], "color": "grey", "alpha": 0.7}
        left.plot(budgets, accuracy[method], markersize=3, label=method, **look)
    left.axhline(accuracy["full"][0], color="black", linewidth=0.8, label="full attention")
    left.set(
        xscale="log",
        xlabel="budget, tokens attended to",
        ylabel="answers right, %",
        title="7 tasks at 4k and 16k, shipped model, fresh seeds",
    )
    left.set_xticks(budgets, [str(budget) for budget in budgets])
    left.minorticks_off()
    left.legend(fontsize=7, handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))

    runs = [line for line in lines("decode") if line["setting"]["steps"] == "compiled" and line["setting"]["batch"] == 1]
    for method, colour in (
        ("full", "black"),
        *((one, f"C{i}") for i, one in enumerate((*ours[:3], "prkv"))),
        ("icecache-digest-device", "C0"),
    ):
        mine = {
            line["setting"]["length"]: 1e3 * line["itl_p50_s"]
            for line in runs
            if line["setting"]["method"].removesuffix(":iterations=4") == method and line["setting"]["hits"] != 0.0
        }
        way = "o--" if method == "icecache-digest-device" else "o-"
        right.plot(sorted(mine), [mine[n] for n in sorted(mine)], way, markersize=3, color=colour, label=method)
    right.set(xscale="log", xlabel="context, tokens", ylabel="time per output token, median, ms", ylim=(0, None))
    right.set_title("8B shape, one H200, one row, compiled")
    right.set_xticks([n << 10 for n in (36, 128, 512, 1024)], ["36k", "128k", "512k", "1M"])
    right.minorticks_off()
    right.legend(fontsize=7, handlelength=3)
    return figure


if __name__ == "__main__":
    main()
