"""The server's page in a browser, where there is one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from servers import Served, serving

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
        page.wait("document.querySelector('#contexts input')")
        assert page.run("document.querySelector('#title').textContent") == "tiny"
        assert page.run("document.title").startswith("tiny")
        page.run("document.querySelector('#contexts [value=\"\"]').click()")  # other tests of this server keep contexts
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT)}")
        page.run("document.querySelector('#limit').value = 6")
        page.run("document.querySelector('#question').value = 'Who slept?'; document.querySelector('#question').focus()")
        page.key("Enter")
        page.wait("document.querySelector('.told')")
        told = page.run("document.querySelector('.told small').textContent")
        assert "tokens per second" in told
        assert "rows per token" in told
        assert "were left unread" in told
        assert page.run("document.querySelector('.turn.asked').textContent") == "Who slept?"
        page.wait("document.querySelector('.pane .text').textContent.includes('A mouse had a long tale.')")
        assert page.run("document.documentElement.scrollWidth") == width
        if page.run("document.querySelectorAll('.told button').length"):
            page.run("document.querySelector('.told button').click()")
        assert page.run("document.querySelector('#answer').getAttribute('role')") == "listbox"
        page.run("document.querySelector('#fresh').click()")
        assert page.run("document.querySelector('#turns').children.length") == 0
        assert page.errors == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_two_methods_answer_side_by_side_and_a_text_is_kept(served: Served, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path / "profile") as page:
        page.show(served.url, 1280)
        page.wait("document.querySelector('#contexts input')")
        page.run("document.querySelector('#contexts [value=\"\"]').click(); window.confirm = () => true")
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT * 3)}")
        page.run("document.querySelector('#name').value = 'tale'; document.querySelector('#keep').click()")
        page.wait("document.querySelector('#contexts [value=\"tale\"]')?.checked")
        assert page.run("document.querySelector('#own').hidden")
        page.run("document.querySelector('#second').value = 'full'; document.querySelector('#limit').value = 6")
        page.run("document.querySelector('#question').value = 'Who slept?'; document.querySelector('#ask').requestSubmit()")
        page.wait("document.querySelectorAll('.told').length === 2")
        headings = page.run("[...document.querySelectorAll('.one h3')].map((each) => each.textContent)")
        assert headings == ["icecache", "full attention"]
        assert "each head read all" in page.run("document.querySelectorAll('.told')[1].textContent")
        page.run("document.querySelector('[aria-label=\"Delete tale\"]').click()")
        page.wait("!document.querySelector('#contexts [value=\"tale\"]')")
        assert page.errors == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_full_attention_tells_where_methods_that_recall_are(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """As a server without options answers about a short text."""
    assert CHROMIUM is not None
    with serving(*loaded, method="auto") as served, browser(CHROMIUM, tmp_path / "profile") as page:
        page.show(served.url, 1280)
        page.wait("document.querySelector('#second')?.options.length > 1")
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT)}")
        page.run("document.querySelector('#question').value = 'Who slept?'; document.querySelector('#limit').value = 6")
        page.run("document.querySelector('#ask').requestSubmit()")
        page.wait("document.querySelector('.told')")
        told = page.run("document.querySelector('.told small').textContent")
        assert "“Answer beside it”, has methods that recall." in told
        page.wait("document.querySelector('.pane')?.textContent.includes('all tokens read')")
        assert page.errors == []
