"""Benchmarks as scripts, python3 -m kvthaw.bench.NAME, for machines without the command line's packages."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvthaw.errors import KvthawError


def run_as_script(main: Callable[[], Iterable[object]]) -> None:
    """Errors of kvthaw are one line."""
    try:
        main()
    except KvthawError as error:
        sys.exit(f"kvthaw: {error}")


def noted(text: str) -> None:
    """Say something beside the lines."""
    print(text, file=sys.stderr, flush=True)


def printing(out: Path | None) -> dict[str, Callable[..., None]]:
    """`say` and `watch` of a benchmark: what is measured next and since when it runs, then the line, in JSON unless a file is given
    that keeps it."""
    begin = time.perf_counter()

    def say(line: Any) -> None:
        print(line.to_json() if out is None else line.brief(), flush=True)

    def watch(what: str, done: int, of: int) -> None:
        noted(f"{time.perf_counter() - begin:.0f} s, {done + 1} of {of}: {what}")

    return {"say": say, "watch": watch}


def parted(arguments: list[str]) -> list[list[str]]:
    """Arguments between the "--"."""
    found: list[list[str]] = [[]]
    for one in arguments:
        if one == "--":
            found.append([])
        else:
            found[-1].append(one)
    return found


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
    parser.add_argument("--json", action="store_true", help="print JSON lines; there is no other form")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter cases")
    parser.add_argument("--out", type=Path, help="append the lines to this file")
    parser.add_argument("--commit", help="what the lines name as the commit")
    given = vars(parser.parse_args())
    del given["json"]
    run_as_script(lambda: main(**given))
