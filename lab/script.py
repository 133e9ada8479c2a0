"""What the scripts of this folder share. They run on a machine that has torch, transformers, triton and numpy alone."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvthaw.errors import CacheError, KvthawError
from kvthaw.evaluate.results import Record, noted
from kvthaw.kernels import HAS_TRITON
from lab.bench.card import provenance
from lab.bench.settings import ShapeSetting

END = "<!-- until here -->"
HELP = {
    "shape": "the model's shape, with random weights; shipped, where it is allowed: the model that ships",
    "layers": "layers of the shape; all unless given",
    "seqs": "sequences that are decoded together",
    "step-tokens": "tokens of a scheduler's step",
    "device-memory": "device memory that a cache may fill",
    "host-memory": "host memory for KV; what the system says is free unless given",
    "method": "separated by commas",
    "limit": "seconds after which a check, or a compilation, is given up",
    "speed": "requests come so many times as fast; 0: all at once",
    "trace": "a file of requests; left out, requests are drawn",
    "unchecked": "where the tests have run on this machine",
    "quick": "fewer and shorter cases",
    "out": "append the lines to this file",
    "commit": "what the lines name as the commit",
}
"""What options are for that several scripts take."""


def options(about: str | None, /, **defaults: Any) -> argparse.Namespace:
    """Read a command line. defaults: by option, a type where there is none, False for a flag."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        option, known = name.replace("_", "-"), not isinstance(default, type)
        kind: dict[str, Any] = {"type": type(default) if known else default, "default": default if known else None}
        parser.add_argument(f"--{option}", help=HELP.get(option), **({"action": "store_true"} if default is False else kind))
    return parser.parse_args()


def on_a_model(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of MODEL and OUT.jsonl or --publish, with the options of what measures a pretrained model."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--publish", nargs="*", type=Path, help="files of results, for the tables")
    parser.add_argument("--text", type=Path, help="a book instead of the one that ships")
    parser.add_argument("--name", help="of the model, in the results")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help=HELP["commit"])
    return parser


class Report:
    """The lines of a benchmark, printed and appended to a file if one is given, each as it comes: what all of them say, what is
    reported, and the machine."""

    def __init__(self, out: Path | None, commit: str | None, **base: Any) -> None:
        self.card = provenance(commit)
        self._out, self._base = out, base

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Add a flat line."""
        self.write({**self._base, **line, **self.card})

    def record(self, setting: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Add a record, as `kvthaw.evaluate.results` reads it."""
        self.write({"setting": setting, **found, "about": self.card})

    def write(self, line: Mapping[str, Any]) -> None:
        """Add a line as it is."""
        text = json.dumps(line)
        print(text, flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def put(path: Path, text: str, mark: str) -> None:
    """Replace what stands between a mark and END in a page. Ends the script where it has none."""
    whole = path.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(mark)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{path} has no {mark} followed by {END}")
    path.write_text(f"{before}{mark}\n\n{text}\n\n{END}{after}", encoding="utf-8")


def commits(lines: Sequence[Mapping[str, Any]]) -> str:
    """Name the commit that measured most lines, and each other with its methods."""
    methods = defaultdict[str, dict[str, None]](dict)
    for line in lines:
        if line["method"] != "full":
            methods[line["commit"]][line["method"]] = None
    first, *others = sorted(methods, key=lambda commit: -len(methods[commit]))
    return ", ".join([first, *(f"{commit} for {', '.join(f'`{name}`' for name in methods[commit])}" for commit in others)])


def paragraph(text: str) -> str:
    """Break the lines of a paragraph as those of the pages that people write."""
    return textwrap.fill(text, 132, break_on_hyphens=False, break_long_words=False)


def run_as_script(main: Callable[[], object]) -> None:
    """Errors of kvthaw are one line."""
    try:
        main()
    except KvthawError as error:
        sys.exit(f"kvthaw: {error}")


def printing(out: Path | None) -> dict[str, Any]:
    """`say`, `watch` and `note` of a benchmark: what is measured next and since when it runs, then the record, in JSON unless a
    file is given that keeps it."""
    begin = time.perf_counter()

    def say(record: Record) -> None:
        print(record.to_json() if out is None else brief(record), flush=True)

    def watch(what: str, done: int, of: int) -> None:
        noted(f"{time.perf_counter() - begin:.0f} s, {done + 1} of {of}: {what}")

    return {"say": say, "watch": watch, "note": noted}


def run_kernels(
    about: str | None,
    lines: Callable[..., Iterable[Mapping[str, Any]]],
    base: Mapping[str, Any],
    *,
    gpu: bool = True,
    **more: Any,
) -> None:
    """Report the lines of a benchmark of kernels. base: what all of them say. more: its options beside --quick; see options."""
    given = vars(options(about, **more, quick=False, out=Path, commit=str))
    report = Report(given.pop("out"), given.pop("commit"), **base)

    def run() -> None:
        if gpu and not (torch.cuda.is_available() and HAS_TRITON):
            raise CacheError("timing kernels needs a CUDA device and Triton; the tests compare them with their definitions")
        torch.manual_seed(time.time_ns() % (1 << 31))
        with torch.inference_mode():
            for line in lines(**given):
                report(line)

    run_as_script(run)


def brief(record: Record) -> str:
    """Say what was measured, in a few words."""
    mean, median, most = (f"{1e3 * record[name]:.2f}" for name in ("tpot_s", "itl_p50_s", "itl_p95_s"))
    setting = ShapeSetting(**record.setting)
    words = [f"{setting}: {mean} ms a token (median {median}, p95 {most})", f"{record['tokens_per_s']:.0f} tokens/s"]
    for name, value in (("prompt", record["ttft_s"]), ("filled in", record["fill_s"])):
        if value is not None:
            words.append(f"{name} {value:.2f} s")
    if record["hit_rate"] is not None:
        words.append(f"{record['hit_rate']:.1%} hits")
    if record["share_of_full"] is not None:
        words.append(f"{record['share_of_full']:.1%} of full's KV")
    return ", ".join(words)
