"""What kvthaw serve refuses before it serves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from said import Said, refused


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kvthaw.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    refused(Said("serve"), 1, "pip install kvthaw[serve]")


def test_wrong_options_cost_no_loading(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n \n")
    refused(Said("serve", "--api-key-file", str(tmp_path / "keys")), 1, "keys is empty")
    refused(Said("serve", "--method", "icecach"), 1, "icecache")
    refused(Said("serve", "--host-memory", "much"), 1, "--host-memory", "much")
    refused(Said("serve", "--port", "70000"), 2, "port")
    refused(Said("serve", "--ray", "--replicas", "2:1"), 1, "--replicas", "2:1")
    refused(Said("serve", "--replicas", "2"), 1, "--replicas", "--ray")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    refused(Said("serve", "--ray"), 1, "pip install kvthaw[ray]")


def test_an_address_that_is_taken() -> None:
    from kvthaw.serve.server import listen

    with listen("127.0.0.1", 0) as taken:
        refused(Said("serve", "--port", str(taken.getsockname()[1])), 1, "in use")


def test_a_fraction_is_no_budget_of_a_server(model: str) -> None:
    refused(Said("serve", model, "--port", "0", "--budget", "0.1"), 1, "budget", "0.1")
