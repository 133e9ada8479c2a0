"""What the scripts of this folder share. They run on a machine that has torch, transformers, triton and numpy alone."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvthaw.bench.card import noted, provenance
from kvthaw.bench.settings import DecodeSetting
from kvthaw.errors import KvthawError
from kvthaw.evaluate.results import Record


class Report:
    """The lines of a benchmark of kernels, printed and appended to a file if one is given, each as it comes: what all of them say,
    what is reported, and the machine."""

    def __init__(self, out: Path | None, commit: str | None, **base: Any) -> None:
        self.lines: list[dict[str, Any]] = []
        self._out, self._base, self._card = out, base, provenance(commit)

    def __call__(self, line: dict[str, Any]) -> None:
        self.lines.append({**self._base, **line, **self._card})
        text = json.dumps(self.lines[-1])
        print(text, flush=True)
        if self._out is not None:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            with self._out.open("a") as file:
                file.write(text + "\n")


def tell(line: str, out: Path | None) -> None:
    """Print a line, and append it to a file if one is given."""
    print(line, flush=True)
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


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
    main: Callable[..., Iterable[object]], about: str | None, more: Mapping[str, tuple[int, str]] | None = None
) -> None:
    """A benchmark of kernels by what all of them take, and more: name -> default, False for a flag, and what it is for."""
    parser = argparse.ArgumentParser(description=about)
    for name, (default, text) in (more or {}).items():
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="what the lines name as the commit")
    given = vars(parser.parse_args())
    run_as_script(lambda: main(**given))


def brief(record: Record) -> str:
    """Say what was measured, in a few words."""
    mean, median, most = (f"{1e3 * record[name]:.2f}" for name in ("tpot_s", "itl_p50_s", "itl_p95_s"))
    setting = DecodeSetting(**record.setting)
    words = [f"{setting}: {mean} ms a token (median {median}, p95 {most})", f"{record['tokens_per_s']:.0f} tokens/s"]
    for name, value in (("prompt", record["ttft_s"]), ("filled in", record["fill_s"])):
        if value is not None:
            words.append(f"{name} {value:.2f} s")
    if record["hit_rate"] is not None:
        words.append(f"{record['hit_rate']:.1%} hits")
    if record["share_of_full"] is not None:
        words.append(f"{record['share_of_full']:.1%} of full's KV")
    return ", ".join(words)
