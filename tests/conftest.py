"""Loads what every test stands on."""

from __future__ import annotations

import pytest


def pytest_collection(session: pytest.Session) -> None:
    """Load common_fixtures.py where tests are collected: a process that only hands them to workers need not wait for torch."""
    session.config.pluginmanager.import_plugin("common_fixtures")
