"""Loads what every test stands on."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest


def pytest_sessionstart() -> None:
    """Refuse to run without the package of baselines, which `make` installs too."""
    if find_spec("kvthaw_baselines") is None:
        how = ".venv/bin/pip install --no-deps --no-build-isolation --editable packages/kvthaw-baselines"
        pytest.exit(f"kvthaw-baselines is not installed: run {how}", returncode=4)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the folder for pictures of the documents, such as docs; without it a test keeps them to itself."""
    parser.addoption("--pictures", default=None, help="write the documents' pictures of the server's page here")


def pytest_collection(session: pytest.Session) -> None:
    """Load common_fixtures.py where tests are collected: a process that only hands them to workers need not wait for torch. What is
    loaded and collected stays, so garbage is not looked for meanwhile."""
    gc.disable()
    session.config.pluginmanager.import_plugin("common_fixtures")
