"""Loads what every test stands on."""

from __future__ import annotations

import gc

import pytest


def pytest_collection(session: pytest.Session) -> None:
    """Load common_fixtures.py where tests are collected: a process that only hands them to workers need not wait for torch. What is
    loaded and collected stays, so garbage is not looked for meanwhile."""
    gc.disable()
    session.config.pluginmanager.import_plugin("common_fixtures")
