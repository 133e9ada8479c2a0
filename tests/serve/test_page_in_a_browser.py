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

CONTRASTS = """(() => {
    const numbers = (color) => (color.match(/[-\\d.]+/g) ?? []).map(Number);
    const parse = (color) => {
        const [r, g, b, a = 1] = numbers(color.replace(/^color\\(srgb/, ""));
        const most = color.startsWith("color(") ? 1 : 255;
        return [r / most, g / most, b / most, a];
    };
    const over = (top, below) => top.slice(0, 3).map((each, i) => each * top[3] + below[i] * (1 - top[3]));
    const light = (color) => {
        const [r, g, b] = color.map((each) => each <= .03928 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const contrast = (one, other) => {
        const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
        return (high + .05) / (low + .05);
    };
    const behind = (node) => {
        if (!node) return [1, 1, 1];
        const color = parse(getComputedStyle(node).backgroundColor);
        return color[3] === 1 ? color.slice(0, 3) : over(color, behind(node.parentElement));
    };
    const found = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const node = texts.currentNode.parentElement;
        const shown = texts.currentNode.textContent.trim() && node.checkVisibility() && !node.closest(":disabled");
        if (!shown || ["SCRIPT", "STYLE", "OPTION", "NOSCRIPT"].includes(node.tagName)) continue;
        const ground = behind(node), color = over(parse(getComputedStyle(node).color), ground);
        const said = texts.currentNode.textContent.trim().slice(0, 30);
        found.push([contrast(color, ground), 4.5, `${node.tagName}.${node.className}: ${said}`]);
    }
    const controls = "button, select, textarea, input:not([type=file], [type=radio], [type=checkbox])";
    for (const node of document.querySelectorAll(controls)) {
        if (!node.checkVisibility() || node.disabled) continue;
        const around = behind(node.parentElement), fill = behind(node), edge = parse(getComputedStyle(node).borderTopColor);
        const drawn = getComputedStyle(node).borderTopWidth === "0px" ? 0 : contrast(over(edge, fill), around);
        const plain = node.matches(".drop, .told button, #grid button"); // its text alone says what it is
        if (!plain) found.push([Math.max(drawn, contrast(fill, around)), 3, `edge of ${node.tagName}#${node.id}`]);
    }
    return found.filter(([has, wants]) => has < wants - .005).map(([has, wants, what]) => `${has.toFixed(2)} < ${wants}: ${what}`);
})()"""
"""What has less contrast than WCAG 2.1 AA asks: text 4.5 (1.4.3), edges of controls 3 (1.4.11)."""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_the_page_is_read_and_used_without_a_mouse(served: Served, tmp_path: Path, width: int, scheme: str) -> None:
    assert CHROMIUM is not None
    with browser(CHROMIUM, tmp_path / "profile") as page:
        page.show(served.url, width, scheme=scheme)
        page.wait("document.querySelector('#contexts input')")
        assert page.run(CONTRASTS) == []
        page.run("document.querySelector('#contexts [value=\"\"]').click()")
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT)}")
        page.run("document.querySelector('#limit').value = 6; document.querySelector('#question').value = 'Who slept?'")
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        page.run("document.querySelector('#ask').requestSubmit()")
        page.wait("document.querySelector('.told') && document.querySelector('.pane .text p')")
        page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        page.run("document.querySelectorAll('.pane .text p').forEach((each, i) => each.classList.add(`h${i % 8 + 1}`))")
        page.run("document.querySelectorAll('#grid button').forEach((each, i) => each.style.setProperty('--share', i % 2))")
        assert page.run(CONTRASTS) == []
        nodes = page.call("Accessibility.getFullAXTree")["nodes"]
        focusable = [node for node in nodes if any(one["name"] == "focusable" for one in node.get("properties", ()))]
        controls = [node for node in focusable if node["role"]["value"] not in ("RootWebArea", "generic")]
        assert len(controls) > 10
        assert [node["role"]["value"] for node in controls if not node.get("name", {}).get("value")] == []
        seen = set()
        page.run("document.activeElement?.blur(); window.scrollTo(0, 0)")
        for _ in range(60):
            page.key("Tab", 9)
            seen.add(
                page.run("document.activeElement.id || document.activeElement.className || document.activeElement.tagName")
            )
            assert page.run(
                "document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none'"
            )
        assert {
            "question",
            "send",
            "document",
            "file",
            "name",
            "keep",
            "limit",
            "second",
            "method",
            "budget",
            "compare",
            "text",
        } <= seen
        assert page.errors == []


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
        page.run("document.querySelector('#limit').value = 40")
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


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1280, 360])
def test_the_page_follows_the_newest_answer(served: Served, tmp_path: Path, width: int) -> None:
    """In a wide window the form covers its end."""
    assert CHROMIUM is not None
    bottom = "document.querySelector('.answers:last-child').getBoundingClientRect().bottom"
    with browser(CHROMIUM, tmp_path / "profile") as page:
        page.show(served.url, width)
        page.wait("document.querySelector('#contexts input')")
        page.run("document.querySelector('#contexts [value=\"\"]').click()")
        page.run(f"document.querySelector('#document').value = {json.dumps(TEXT)}; document.querySelector('#limit').value = 40")
        for n in range(1, 5):
            if n == 4:
                page.run("window.scrollTo(0, 0)")
            page.run("document.querySelector('#question').value = 'Who?\\n'.repeat(16) + 'Who?'")
            page.run("document.querySelector('#ask').requestSubmit()")
            page.wait(f"document.querySelectorAll('.told').length === {n} && !document.querySelector('#send').disabled")
            assert page.run(
                f"{bottom} <= Math.min(innerHeight, document.querySelector('#ask').getBoundingClientRect().top) + 1"
            )
        assert page.run("scrollY") > 0
        assert page.errors == []
