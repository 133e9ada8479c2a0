"""A pytest plugin for long runs on a GPU: `-p gpu_run --told FILE`.

Tests that take longest come first, so that processes end together. Each test that ends becomes a line of JSON in FILE at once,
with its error. So a run that is cut off still tells which tests passed. A process whose CUDA context is lost to a kernel is
replaced, so that the tests after it do not fail for it. With --gpus N each worker of pytest-xdist sees one of N GPUs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SLOWEST = (
    "tests/evaluate/", "compil", "tests/bench/", "tests/lab/", "tests/reproduce/", "tests/engine/test_replay",
    "tests/engine/", "tests/cli/", "tests/test_", "tests/inspected/", "tests/index/", "tests/cache/", "tests/methods/",
    "tests/kernels/",
)  # fmt: skip
"""Parts of tests' names, slowest first."""
LOST = ("illegal memory access", "device-side assert", "unspecified launch failure", "misaligned address")
"""What CUDA says of a context that takes no more work."""


class Told:
    """Writes lines in the process that hands tests out; ends a worker whose context is lost before its next test."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lost = path, False

    def pytest_runtest_setup(self) -> None:
        if self._lost:
            os._exit(3)  # the test counts as crashed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        why = "" if report.passed else str(report.longrepr)
        if os.environ.get("PYTEST_XDIST_WORKER"):
            self._lost = self._lost or any(text in why for text in LOST)
        elif self._path is not None and (report.when == "call" or not report.passed):
            line: dict[str, Any] = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            line |= {"at": round(time.time())} | ({"why": why[-6000:]} if why else {})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--told", type=Path, help="append a line of JSON for each test to this file")
    parser.addoption("--gpus", type=int, default=1, help="spread the workers over this number of GPUs")


def pytest_configure(config: pytest.Config) -> None:
    worker, gpus = os.environ.get("PYTEST_XDIST_WORKER"), config.getoption("--gpus")
    if worker is not None and gpus > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % gpus)
    config.pluginmanager.register(Told(config.getoption("--told")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place(item.nodeid, SLOWEST))


def place(name: str, parts: Sequence[str]) -> int:
    """Return which of the parts a name has, the first of them; behind all if none."""
    return next((i for i, part in enumerate(parts) if part in name), len(parts))
