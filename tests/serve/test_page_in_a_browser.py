"""The server's page in a browser, where there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from servers import Served

from tests.inspected.browser import browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TEXT = "A mouse had a long tale. It told the tale to a cat.\n\nThe cat slept. The mouse went home and told nobody. " * 2


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_a_question_about_a_pasted_text_is_answered(served: Served, tmp_path: Path, width: int, scheme: str) -> None:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path / "profile") as page:
        page.show(served.url, width, scheme=scheme)
        page.wait("document.querySelector('#status')?.textContent.startsWith('up to')")
        assert page.run("document.querySelector('#title').textContent") == "tiny"
        assert page.run("document.title").startswith("tiny")
        page.run("document.querySelector('#context').value = ''")  # other tests of this server keep contexts
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT)}")
        page.run("document.querySelector('#limit').value = 6")
        page.run("document.querySelector('#question').value = 'Who slept?'; document.querySelector('#question').focus()")
        page.key("Enter")
        page.wait("document.querySelector('.told')")
        told = page.run("document.querySelector('.told small').textContent")
        assert "per token" in told
        assert "rows per token" in told
        assert page.run("document.querySelector('.turn.asked').textContent") == "Who slept?"
        page.wait("document.querySelector('.pane .text').textContent.includes('A mouse had a long tale.')")
        assert page.run("document.documentElement.scrollWidth") == width
        if page.run("document.querySelectorAll('.told button').length"):
            page.run("document.querySelector('.told button').click()")
        assert page.run("document.querySelector('#answer').getAttribute('role')") == "listbox"
        page.run("document.querySelector('#fresh').click()")
        assert page.run("document.querySelector('#turns').children.length") == 0
        assert page.errors == []
