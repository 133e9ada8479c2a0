"""What benchmarks of speed came to: new lines into lab/results, and from there into the tables and plots of docs/notes/speed.md.

usage: python3 -m lab.speed [OUT...]

OUT: folders whose lines are taken in first: decode, rivals, prefill, indexing, serving, peaks, running, trace, trees,
kernels_*.jsonl.
Writes the part of docs/notes/speed.md between its marks, a short table of docs/results.md, docs/length.png and docs/throughput.png.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvthaw.evaluate.results import Record as Result
from kvthaw.formatting import short
from lab.evaluate import plot
from lab.evaluate.document import Table
from lab.script import paragraph, put

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "notes" / "speed.md"
SHORT = HERE.parent / "docs" / "results.md"
MARK = "<!-- written by lab/speed.py -->"
Record = dict[str, Any]
K = 1024
LENGTHS = (36 * K, 128 * K, 512 * K, 1024 * K)

ROWS: tuple[tuple[str, Record], ...] = (
    ("full attention, the same kernels and harness", {"method": "full"}),
    ("pariskv, 100 retrieved", {"method": "pariskv", "retrieved": 100}),
    ("pariskv-plus, 100 retrieved", {"method": "pariskv-plus", "retrieved": 100}),
    ("the same without dense layers (`dense_layers=0`)", {"method": "pariskv-plus", "retrieved": 100, "dense_layers": 0}),
    ("pariskv-plus, 100 retrieved, rows in 8 bits (`kv_dtype=fp8`)", {"method": "pariskv-plus:kv_dtype=fp8", "retrieved": 100}),
    ("clusterkv-plus, 1024 tokens, 70 % of rows on the device already", {"method": "clusterkv-plus", "hits": 0.7}),
    ("the same, 0 %", {"method": "clusterkv-plus", "hits": 0.0}),
    ("clusterkv, 1024 tokens, 70 %", {"method": "clusterkv", "hits": 0.7}),
    ("prkv-plus, 1024 tokens, 70 %", {"method": "prkv-plus", "hits": 0.7}),
    ("prkv, 1024 tokens, 70 %", {"method": "prkv", "hits": 0.7}),
    ("the same, 0 %", {"method": "prkv", "hits": 0.0}),
    *(
        (f"{name}, rows as text chooses them", {"method": name, "prompt": "text"})
        for name in ("pariskv-plus", "clusterkv-plus", "prkv")
    ),
    ("icecache-digest-device, 256 tokens, its tree searched on the device", {"method": "icecache-digest-device"}),
    ("the same, rows as text chooses them", {"method": "icecache-digest-device", "prompt": "text"}),
    ("the same, every third layer searching (`reuse=3`)", {"method": "icecache-digest-device:reuse=3"}),
    ("icecache-digest, 256 tokens, its tree on the host", {"method": "icecache-digest"}),
    ("icecache-digest:reuse=3, the same, every third layer searching", {"method": "icecache-digest:reuse=3"}),
)
SUMMARY = (
    "pariskv, 100", "pariskv-plus, 100 retrieved", "clusterkv-plus, 1024", "clusterkv, 1024", "prkv, 1024",
    "icecache-digest-device, 256 tokens, its tree", "icecache-digest, 256",
)  # fmt: skip
"""How the rows of `summary` begin."""
PROMPTED = (
    ("transformers' DynamicCache", "hf-dynamic", "eager"),
    ("transformers' OffloadedCache", "hf-offloaded", "eager"),
    ("full attention, kvthaw's kernels", "full", "eager"),
    ("icecache-digest, 256 tokens", "icecache-digest", "eager"),
    ("icecache-digest:reuse=3, 256 tokens", "icecache-digest:reuse=3", "eager"),
    ("icecache-digest, 256 tokens", "icecache-digest", "captured"),
    ("icecache-digest:reuse=3, 256 tokens", "icecache-digest:reuse=3", "captured"),
    ("icecache-digest-device, 256 tokens", "icecache-digest-device", "captured"),
    ("full attention", "full", "captured"),
    ("pariskv, 100 retrieved", "pariskv", "captured"),
    ("pariskv-plus, 100 retrieved", "pariskv-plus", "captured"),
    ("clusterkv, 1024 tokens", "clusterkv", "captured"),
    ("clusterkv-plus, 1024 tokens", "clusterkv-plus", "captured"),
    ("prkv, 1024 tokens", "prkv", "captured"),
    ("prkv-plus, 1024 tokens", "prkv-plus", "captured"),
)


def read(path: Path) -> list[Record]:
    """A file's lines; none where there is none, and not one that a stopped run has cut."""
    texts = path.read_text().splitlines() if path.exists() else []
    found = []
    for at, text in enumerate(texts):
        try:
            found.append(json.loads(text))
        except json.JSONDecodeError:
            if at + 1 < len(texts):
                raise
    return found


def key(line: Record) -> str:
    """What a newer line takes the place of: the same question, however many tokens where steps alone are timed, and whether or not
    layers shared the host."""
    if "setting" in line:
        aside = ("shared", "seed", *(["new_tokens"] if line["setting"].get("prompt") != "run" else []))
        same = {name: value for name, value in line["setting"].items() if name not in aside and value is not None}
        return json.dumps([line.get("bench"), same], sort_keys=True)
    measured = {name for name, value in line.items() if isinstance(value, float | dict | list)}
    about = {"gpu", "cpu", "torch", "transformers", "triton", "python", "commit"}
    return json.dumps({name: value for name, value in line.items() if name not in measured | about}, sort_keys=True)


def merged(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Old lines whose question is not among the new, then the new."""
    fresh = {key(line): line for line in new}
    return [line for line in old if key(line) not in fresh] + list(fresh.values())


def collect(folder: Path) -> None:
    """Lines of a folder into lab/results."""
    names = ("decode", "rivals", "prefill", "indexing", "serving", "peaks", "running", "trace", "trees")
    for path in sorted([*(folder / f"{name}.jsonl" for name in names), *folder.glob("kernels_*.jsonl")]):
        new = read(path)
        if new:
            target = HERE / "results" / path.name
            target.write_text("".join(json.dumps(line) + "\n" for line in merged(read(target), new)))


def asked(line: Record) -> Record:
    """What a line depends on."""
    found: Record = line["setting"]
    return found


def commit(lines: Iterable[Record]) -> str:
    """The commits of lines, in a sentence's brackets."""
    return ", ".join(dict.fromkeys(str(line["about"]["commit"]) for line in lines))


def matches(line: Record, wanted: Record) -> bool:
    """Whether a line answers to what is wanted, with a method's own dense layers unless it says how many; fewer iterations of
    k-means are the same method."""
    one = {**asked(line), "method": asked(line)["method"].replace(":iterations=4", "")}
    dense = "dense_layers" in wanted or one.get("dense_layers") != 0
    return dense and all(one[name] == value for name, value in wanted.items())


def best(lines: list[Record], **wanted: Any) -> Record | None:
    """The newest line that answers, of captured or compiled steps if there is one."""
    found = [line for line in reversed(lines) if matches(line, wanted)]
    return next((line for line in found if asked(line)["steps"] != "eager"), found[0] if found else None)


def ms(line: Record) -> str:
    """Mean (median, 95th percentile) milliseconds a token."""
    mean, median, most = (f"{1e3 * line[name]:.1f}" for name in ("tpot_s", "itl_p50_s", "itl_p95_s"))
    return f"{mean} ({median}, {most})"


def marked(line: Record) -> str:
    """How steps were taken, where they were not captured. Compiled steps are of versions that still had them."""
    return "" if asked(line)["steps"] == "captured" else f" {asked(line)['steps']}"


def percent(shares: Iterable[float]) -> str:
    """A share or some of neighbouring columns."""
    words = list(dict.fromkeys(f"{100 * one:.1f}" if one < 0.01 else f"{100 * one:.0f}" for one in shares))
    return f"{', '.join(words)} %" if words else ""


def devices(lines: Iterable[Record]) -> list[str]:
    """What was measured, the GPU that the pages speak of first."""
    return sorted({asked(line)["device"] for line in lines}, reverse=True)


def prompted(lines: list[Record]) -> Iterable[str]:
    """Until the second token, and a token, after a prompt of 36k: a table a device."""
    for device in devices(lines):
        rows, used = [], []
        for words, method, steps in PROMPTED:
            wanted = {"method": method, "steps": steps, "length": 36 * K, "batch": 1, "prompt": "run", "hits": None}
            line = best(lines, device=device, **wanted)
            if line is not None:
                used.append(line)
                held = sum(line[name] for name in ("kv_device_bytes", "index_device_bytes", "kv_dense_bytes"))
                rows.append([words, steps, f"{held / 1e6:,.0f} MB", f"{line['tt2t_s']:.2f} s", ms(line)])
        if rows:
            head = [
                "after a prompt of 36,864 tokens",
                "steps",
                "KV and index on the device, with dense layers",
                "until the 2nd token",
                "ms a token",
            ]
            yield f"{device}, mean (median, 95th percentile) of {used[0]['setting']['new_tokens']} tokens ({commit(used)}):"
            yield Table(head, rows).markdown()


def lengths(lines: list[Record]) -> Iterable[str]:
    """Time per output token against the length: a table a device."""
    filled = [line for line in lines if asked(line)["prompt"] != "run" and asked(line)["batch"] == 1]
    for device in devices(filled):
        yield from _lengths(device, [line for line in filled if asked(line)["device"] == device])


def _lengths(device: str, filled: list[Record]) -> Iterable[str]:
    columns = [n for n in LENGTHS if best(filled, length=n)]
    rows, used = list[list[str]](), list[Record]()
    times = {n: [line["tpot_s"] for line in filled if asked(line)["length"] == n] for n in columns}
    fastest = {n: min(of) for n, of in times.items() if len(of) > 1}
    for words, wanted in ROWS:
        asking: Record = {"prompt": "filled", **wanted}
        found = {n: line for n in columns if (line := best(filled, length=n, **asking))}
        used += found.values()
        cells = {n: ms(line) + marked(line) for n, line in found.items()}
        cells = {n: f"**{text}**" if found[n]["tpot_s"] == fastest.get(n) else text for n, text in cells.items()}
        shares = [line["share_with_dense"] or 1.0 for line in found.values()]
        if found:
            if asking["prompt"] == "text":
                words += f" ({percent(line['hit_rate'] for line in found.values())} hits)"
            rows.append([words, *(cells.get(n, "") for n in columns), percent(shares)])
    shared = [n for n in columns if any(asked(line)["shared"] for line in used if asked(line)["length"] == n)]
    how = (
        "captured in one CUDA graph, or where the tree is on the host in one more than there are searches; compiled "
        "by torch as well where marked, in versions before 2026-11-29"
    )
    there = f"; at {', '.join(map(short, shared))} layers share one layer's rows on the host" if shared else ""
    what = f"{device}, mean (median, 95th percentile) milliseconds a token, index updates counted"
    yield f"{what}, {how} ({commit(used)}{there}):"
    yield Table(["", *(short(n) for n in columns), "KV and index on the device, dense layers too, of full's"], rows).markdown()


def summary() -> str:
    """Return mean times per token by length of the first device, fewer rows than `lengths`."""
    decode = [line for line in read(HERE / "results" / "decode.jsonl") if asked(line)["shape"] == "llama-3.1-8b"]
    filled = [line for line in decode if asked(line)["prompt"] != "run" and asked(line)["batch"] == 1]
    device = devices(filled)[0]
    rows, used = list[list[str]](), list[Record]()
    for words, wanted in ROWS[:1] + tuple(row for row in ROWS if row[0].startswith(SUMMARY)):
        found = {n: best(filled, device=device, length=n, **{"prompt": "filled", **wanted}) for n in LENGTHS}
        known = [line for line in found.values() if line is not None]
        used += known
        shares = percent(line["share_with_dense"] or 1.0 for line in known[1:2] or known)
        rows.append(
            [words, *("" if line is None else f"{1e3 * line['tpot_s']:.1f}{marked(line)}" for line in found.values()), shares]
        )
    said = paragraph(f"{device}, mean milliseconds a token, captured ({commit(used)}):")
    return said + "\n\n" + Table(["", *map(short, LENGTHS), "KV and index on the device at 128k, of full's"], rows).markdown()


def batches(lines: list[Record]) -> Iterable[str]:
    """Peaks over the batches of the first device, as a sentence each."""
    first = devices(lines)[:1]
    lines = [line for line in lines if asked(line)["device"] in first]
    for method, length, more in (
        ("pariskv", 128 * K, {}),
        ("pariskv-plus", 128 * K, {}),
        ("clusterkv-plus", 32 * K, {"hits": 0.7}),
    ):
        wanted = {"length": length, "prompt": "filled", "steps": "captured"}
        every = [line for line in lines if matches(line, {"method": method, **wanted, **more})]
        mine = [line for line in every if not asked(line)["shared"]]
        full = [line for line in lines if matches(line, {"method": "full", **wanted})]
        if not mine or not full:
            continue
        most, least = (max(of, key=lambda line: float(line["tokens_per_s"])) for of in (mine, full))
        rate = f"{most['tokens_per_s'] / least['tokens_per_s']:.1f}"
        ours, theirs = (f"{line['tokens_per_s']:.0f}" for line in (most, least))
        words = f"At {short(length)}, captured, {method} gives {ours} tokens a second with {asked(most)['batch']} rows, "
        words += f"full attention {theirs} with {asked(least)['batch']}: {rate} times"
        shared = [line for line in every if asked(line)["shared"] and line["tokens_per_s"] > most["tokens_per_s"]]
        shared = sorted(shared, key=lambda line: float(line["tokens_per_s"]))[-1:]
        for line in shared:
            words += (
                f"; where all layers share one layer's rows on the host, {line['tokens_per_s']:.0f} with {asked(line)['batch']}"
            )
        yield f"{words}; the sequences of a batch share one sequence's rows on the host ({commit([most, least, *shared])})."


def peaks(lines: list[Record]) -> Iterable[str]:
    """Batches that fill a GPU, beside full attention's best of that length."""
    rows = []
    for line in (line for line in lines if "error" not in line):
        one = asked(line)
        full = [other for other in lines if asked(other)["method"] == "full" and asked(other)["length"] == one["length"]]
        rate, best_rate = line["tokens_per_s"], max((other.get("tokens_per_s", 0.0) for other in full), default=0.0)
        name = one["method"] + (f", {one['kv_dtype']} rows" if one.get("kv_dtype") else "")
        name += ", compiled" if one.get("compile") else ""
        place = "" if line["device_rate"] in (None, 1.0) else f" ({percent([line['device_rate']])} of its rows on the device)"
        cells = [name + place, short(one["length"]), str(one["seqs"]), f"{line['mean_ms']:.1f} ({line['median_ms']:.1f})"]
        rows.append([*cells, f"{rate:,.0f}", f"{rate / best_rate:.2f}" if best_rate else ""])
    if rows:
        where = f"{asked(lines[0])['device']}, {commit(lines)}"
        yield f"Batches that fill a GPU ({where}), all layers, drawn rows of their own on the device:"
        yield Table(["", "length", "sequences", "mean (median) ms a step", "tokens/s", "of full's best"], rows).markdown()


def prefills(lines: list[Record]) -> Iterable[str]:
    """Prompts with indexing, beside full attention's."""
    known = [line for line in lines if line["indexed_s"] is not None]
    base = {asked(one)["length"]: one["indexed_s"] for one in known if asked(one)["method"] == "hf-dynamic"}
    second = {asked(one)["length"]: one["tt2t_s"] for one in known if asked(one)["method"] == "hf-dynamic" and "tt2t_s" in one}
    parts = []
    for line in known:
        one = asked(line)
        way = "one pass" if one["chunk"] >= one["length"] else f"chunks of {short(one['chunk'])}"
        layers = "" if one.get("layers") is None else f", {one['layers']} of the layers"
        times = f"{line['indexed_s']:.2f} s"
        if one["length"] in base and one["method"] != "hf-dynamic" and not layers:
            times += f" ({line['indexed_s'] / base[one['length']]:.2f})"
        elif line.get("over_floor") is not None:
            times += f" ({line['over_floor']:.2f} times what the hardware allows)"
        if "tt2t_s" in line and one["length"] in second:
            times += f", second token after {line['tt2t_s']:.2f} s ({line['tt2t_s'] / second[one['length']]:.2f})"
        parts.append(f"{one['method']} {short(one['length'])} in {way}{layers} {times}")
    if parts:
        yield (
            "A prompt until all of it is offloaded and indexed, beside transformers' own "
            f"([prefill.jsonl](../../lab/results/prefill.jsonl), {commit(known)}): {'; '.join(parts)}."
        )


def served(lines: list[Record]) -> Iterable[str]:
    """A batch that requests join and leave, as a sentence."""
    lines = [{**line, **line.get("setting", {}), "commit": line.get("about", line)["commit"]} for line in lines]
    if lines:
        one, most = lines[0], max(line["captures"] for line in lines)
        each = "; ".join(f"{line['method']} {line['step_ms_p50']:.1f} ({line['step_ms_p95']:.1f})" for line in lines)
        yield (
            f"A batch of {one['max_seqs']} sequences that prompts of {short(one['length'] // 2)} to "
            f"{short(one['length'])} keep joining and leaving, captured {'once' if most == 1 else f'{most} times'}, "
            f"{lines[-1]['budget']} tokens: "
            f"median (95th percentile) milliseconds a step {each} "
            f"([serving.jsonl](../../lab/results/serving.jsonl), {', '.join(dict.fromkeys(line['commit'] for line in lines))})."
        )


def flat(line: Record) -> Record:
    """A line of the time before settings."""
    names = ("shape", "method", "steps", "length", "batch", "budget", "retrieved", "new_tokens")
    rest = {"kv_device_bytes": 0, "kv_dense_bytes": line["full_kv_bytes"], "index_device_bytes": 0} | line
    setting = {name: line.get(name) for name in names} | {
        "hits": None,
        "prompt": "run",
        "shared": False,
        "device": "NVIDIA H200",
    }
    return {**rest, "setting": setting, "about": {"commit": line["commit"]}}


def part() -> str:
    """The page's part, from lab/results."""
    old = [
        line for line in read(HERE / "results" / "decode_h200.jsonl") if line["steps"] == "eager"
    ]  # others had kernels to compile
    decode = [*map(flat, old), *read(HERE / "results" / "decode.jsonl")]
    shape = [line for line in decode if asked(line)["shape"] == "llama-3.1-8b"]
    found = [*prompted(shape), *lengths(shape), *batches(shape)]
    found += [*served(read(HERE / "results" / "serving.jsonl")), *prefills(read(HERE / "results" / "prefill.jsonl"))]
    found += peaks(read(HERE / "results" / "peaks.jsonl"))
    return "\n\n".join(part if part.startswith("|") else paragraph(part) for part in found)


def draw() -> None:
    """Both plots, from what is newest of each setting, as the tables."""
    decode = [Result.from_json(json.dumps(line)) for line in read(HERE / "results" / "decode.jsonl")]
    decode = [Result({**one.setting, "method": one["method"].replace(":iterations=4", "")}, one.measures) for one in decode]
    usual = [one for one in decode if one["shape"] == "llama-3.1-8b" and one.setting.get("dense_layers") != 0]
    filled = [one for one in usual if one["prompt"] == "filled"]
    filled = [one for one in filled if one["device"] == max(other["device"] for other in filled)]
    captured = [one for one in filled if one["steps"] == "captured" and one["hits"] != 0]
    alone = [one for one in captured if one["batch"] == 1 and one["length"] in LENGTHS]
    alone = list({(one["method"], one["length"], one["budget"], one["retrieved"]): one for one in alone}.values())
    lengths = Counter(one["method"] for one in alone)
    alone = [one for one in alone if lengths[one["method"]] > 2]
    rows = [one for one in captured if one["batch"] > 1 and one["length"] == 128 * K]
    for name, drawn, of in (("length", plot.by_length, alone), ("throughput", plot.by_batch, rows)):
        figure = plot.new(7.0, 4.2)
        drawn(figure.subplots(), sorted(of, key=lambda one: (one["method"], one["length"])))
        figure.suptitle(f"{of[0]['shape']}, {of[0]['device']}", fontsize=9)
        plot.save(figure, HERE.parent / "docs" / f"{name}.png")


def main(arguments: list[str]) -> None:
    """See the module."""
    if any(one.startswith("-") for one in arguments):
        sys.exit(__doc__)
    for folder in arguments:
        collect(Path(folder))
    put(PAGE, part(), MARK)
    put(SHORT, summary(), MARK)
    draw()


if __name__ == "__main__":
    main(sys.argv[1:])
