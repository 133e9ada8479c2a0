"""The documents' pictures of the page: SmolLM2 answers from 256 rows a head, beside full attention.

.venv/bin/pytest tests/serve/test_page_pictures.py -p no:xdist --pictures docs
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from servers import serving

from kvthaw.engine.hf.model import load, silence
from lab.evaluate.assets import read_own
from lab.packaged import FOLDER
from tests.inspected.browser import browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MODEL = FOLDER.expanduser() / "smollm2.gguf"
QUESTION = "Who built the organ?"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.skipif(not MODEL.exists(), reason=f"needs {MODEL}, which python -m lab demo fetches")
def test_pictures_of_an_answer_and_where_it_came_from(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    assert CHROMIUM is not None
    asked = request.config.getoption("--pictures")
    if not asked:
        pytest.skip("--pictures FOLDER takes them, in half a minute; test_page_in_a_browser.py tries the page")
    folder = Path(asked)
    silence()
    text = read_own("skarholm.txt")
    how = {"method": "thaw", "budget": 256, "block_size": 512, "max_seqs": 1, "capacity": 2048, "name": "SmolLM2-135M-Instruct"}
    with serving(*load(str(MODEL)), **how) as served, browser(CHROMIUM, tmp_path / "profile") as page:
        served.http.timeout = 600
        assert served.post("/v1/contexts", name="skarholm", document=text).status_code == 200
        for name, width, scheme, other in (("page", 1280, "light", "full"), ("page-small", 360, "dark", "")):
            page.show(served.url, width, 820, scheme=scheme)
            page.wait("document.querySelector('#second')?.options.length > 1", 60)
            page.run(f"document.querySelector('#second').value = '{other}'; document.querySelector('#limit').value = 40")
            page.run(
                f"document.querySelector('#question').value = '{QUESTION}'; document.querySelector('#ask').requestSubmit()"
            )
            page.wait(f"document.querySelectorAll('.told').length === {2 if other else 1}", 300)
            assert page.run(
                "[...document.querySelectorAll('.turn.answer')].every((one) => one.textContent.includes('Jonas Eide'))"
            )
            assert "Jonas Eide" in page.run("document.querySelector('.told button').textContent")
            assert page.run("document.documentElement.scrollWidth") == width
            page.wait("document.querySelector('.pane .h6')", 20)
            page.run("document.activeElement.blur()")
            page.picture(folder / f"{name}.png")
            assert page.errors == []
