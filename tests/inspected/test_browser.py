"""The page in a browser, where there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import browser

from kvthaw.inspect.page import standalone
from kvthaw.inspect.recorder import Recording
from kvthaw.inspect.run import Inspection, Run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS, LAYERS, TOKENS = 5, (1, 3), 400


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(map(chr, tokens))


def made() -> Inspection:
    letters = [ord(c) for c in ("<script>x</script> & a “long” tale. " * 12)[:TOKENS]]
    runs = []
    for name in ("one", "other"):
        recording = Recording()
        for _ in range(STEPS):
            for kind in (recording.selected, recording.exact):
                kind.append({layer: torch.randint(-1, TOKENS, (2, 9), dtype=torch.int32) for layer in LAYERS})
            recording.mass.append({layer: torch.rand(2) for layer in LAYERS})
        places = {place: [1000 * t for t in range(STEPS)] for place in ("device", "host", "fetched")}
        runs.append(Run(SimpleNamespace(method=name, budget=64, retrieved=None), recording, [65] * STEPS, places))  # type: ignore[arg-type]
    return Inspection(letters[:-9], letters[-9:], [ord(c) for c in "tail."], runs)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_choices_show_what_they_recalled(tmp_path: Path) -> None:
    inspection = made()
    (tmp_path / "page.html").write_text(standalone(inspection, Letters(), "<b>A</b> tale"))
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path / "profile") as page:
        page.show((tmp_path / "page.html").as_uri(), 360)
        page.wait("document.querySelectorAll('.pane .text span').length")
        read = "JSON.stringify([...document.querySelectorAll('.sum')].map((each) => parseInt(each.textContent)))"

        def recalled(steps: range, layers: tuple[int, ...], heads: tuple[int, ...]) -> list[int]:
            return [
                len({int(row) for t in steps for n in layers for h in heads for row in run.recording.selected[t][n][h]} - {-1})
                for run in inspection.runs
            ]

        assert page.run("document.documentElement.scrollWidth") == 360
        shown = "getComputedStyle(document.querySelector('{}')).display != 'none'"
        assert [page.run(shown.format(part)) for part in ("#beside", "#key-row", "h2")] == [False, False, True]
        assert page.run("document.querySelector('.text').textContent") == "".join(
            map(chr, [*inspection.document, *inspection.question, *inspection.answer])
        )
        assert json.loads(page.run(read)) == recalled(range(STEPS), LAYERS, (0, 1))
        page.run("document.querySelectorAll('#answer span')[1].click()")
        assert json.loads(page.run(read)) == recalled(range(1, 2), LAYERS, (0, 1))
        page.run("document.querySelector('#answer span').focus()")
        page.key("ArrowRight")
        page.key("ArrowRight")
        assert json.loads(page.run(read)) == recalled(range(2, 3), LAYERS, (0, 1))
        page.run("document.querySelector('#grid').children[5].click()")  # the second layer's second head
        assert json.loads(page.run(read)) == recalled(range(2, 3), LAYERS[1:], (1,))
        page.key("Escape")
        assert json.loads(page.run(read)) == recalled(range(STEPS), LAYERS, (0, 1))
        assert page.errors == []
