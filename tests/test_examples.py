"""Every example runs."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
EXPECTED = {
    "attach.py": ["planted:", "tokens attended a step"],
    "conversation.py": [
        "quiet-harbor: 4417382",
        "prompt tokens were there already",
        "of the selected rows were on the device already",
    ],
    "one_prefill_many_budgets.py": ["oracle", "streaming", "tokens attended"],
    "own_method.py": ["sign-keys: "],
    "ray_serve.py": ["replica ", "12345"],
    "serving.py": ["tokens in sequence 0", "tokens in sequence 1", "tokens attended a step"],
}


NEEDED = {"ray_serve.py": "ray.serve"}
"""Packages that the tests' environment may lack."""


def test_every_example_is_known() -> None:
    assert [path.name for path in EXAMPLES] == sorted(EXPECTED)


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if path.name in NEEDED:
        pytest.importorskip(NEEDED[path.name])
    monkeypatch.setattr(sys, "argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr().out
    assert all(text in said for text in EXPECTED[path.name]), said
