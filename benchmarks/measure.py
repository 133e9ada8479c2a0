"""What gpu.sh measures that no command does: python3 -m benchmarks.measure OUT COMMIT HOST_BYTES PART [METHOD].

parts: breakdown (of METHOD), prefill, chunks, indexing
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import indexing, room
from benchmarks.filled import FilledBench
from benchmarks.script import Report, printing, run_as_script
from kvthaw.bench import prefill
from kvthaw.bench.card import noted, where
from kvthaw.bench.settings import grid
from kvthaw.evaluate.results import ResultsFile

SHAPE = "llama-3.1-8b"


def breakdown(out: Path, commit: str, host_bytes: int, method: str, length: int = 131072, steps: str = "captured") -> None:
    """Time decoding, and break the steps down by kernels."""
    wanted = {"budget": 256, "retrieved": None, "dense_layers": None, "new_tokens": 64, "seed": 0, "device": where()[1]}
    bench = FilledBench(ResultsFile(out), commit=commit, host_bytes=host_bytes, **printing(out))
    bench.profile = True
    settings = grid((method,), [length], [1], [steps], shape=SHAPE, prompt="filled", **wanted)
    bench.run([one for one in settings if bench.fits(one)])
    bench.judge()


def prefills(out: Path, commit: str, host_bytes: int) -> None:
    """Time prompts in chunks. Of 512k tokens four layers: all would take 130 s, twice."""
    pariskv: dict[str, Any] = {"budget": None, "retrieved": 100}
    settings = [
        *prefill.grid(SHAPE, ["pariskv", "pariskv-plus"], [1 << 17], [1 << 14], chunks_only=True, **pariskv),
        *prefill.grid(SHAPE, ["pariskv-plus"], [1 << 19], [1 << 14], chunks_only=True, layers=4, **pariskv),
        *prefill.grid(SHAPE, ["icecache-digest"], [1 << 17], [1 << 14], chunks_only=True, budget=256),
        *prefill.grid(SHAPE, ["pariskv-plus"], [1 << 17], [1 << 14], **pariskv),
    ]
    take(settings, out, commit, host_bytes)


def chunks(out: Path, commit: str, host_bytes: int) -> None:
    """Time prompts in chunks beside one pass, of our own methods, with a few of the layers."""
    ours = ("pariskv-plus", "clusterkv-plus", "prkv-plus", "icecache-digest-device")
    settings = prefill.grid(SHAPE, ours, [1 << 17], [1 << 14], layers=4, budget=1024)
    settings += prefill.grid(SHAPE, ours[:1], [1 << 19], [1 << 14], layers=2, budget=1024, chunks_only=True)
    take(settings, out, commit, host_bytes)


def take(settings: list[prefill.PrefillSetting], out: Path, commit: str, host_bytes: int) -> None:
    """Measure prompts, and note each as it comes."""
    known, watch = ResultsFile(out), printing(out)["watch"]
    for record in prefill.run(settings, known, host_bytes=host_bytes, commit=commit, watch=watch):
        over = room.over_floor(record)
        noted(
            f"{prefill.PrefillSetting(**record.setting)}: {record['indexed_s']} s"
            + (f", {over:.2f} of the floor" if over else "")
        )


def main(arguments: list[str]) -> None:
    """See the module."""
    if len(arguments) < 4:
        sys.exit(__doc__)
    out, commit, host_bytes, part = Path(arguments[0]), arguments[1], int(arguments[2]), arguments[3]
    if part == "breakdown":
        breakdown(out / "breakdown.jsonl", commit, host_bytes, arguments[4])
    elif part == "prefill":
        prefills(out / "prefill.jsonl", commit, host_bytes)
    elif part == "chunks":
        chunks(out / "prefill.jsonl", commit, host_bytes)
    elif part == "indexing":
        report = Report(out / "indexing.jsonl", commit, bench="indexing")
        for line in indexing.lines(SHAPE, 32768, ("clusterkv", "clusterkv-plus", "prkv")):
            report(line)
    else:
        sys.exit(f"no part {part}\n{__doc__}")


if __name__ == "__main__":
    run_as_script(lambda: main(sys.argv[1:]))
