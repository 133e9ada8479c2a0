"""The page that shows recalled tokens, as one file, and its data."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from typing import Any

import torch

from kvthaw.engine.text import TextStream, decode
from kvthaw.errors import ConfigError
from kvthaw.evaluate.variant import Variant
from kvthaw.inspect.pack import pack, pack_sets, stacked
from kvthaw.inspect.passages import passages
from kvthaw.inspect.recorder import Recording
from kvthaw.inspect.run import Inspection, Run
from kvthaw.regions import BUDGET

MOST_BYTES = 10_000_000
"""Default for the largest page, in bytes."""


def asset(name: str) -> str:
    """Return a file of the page."""
    return (resources.files("kvthaw.inspect") / "web" / name).read_text(encoding="utf-8")


def label(variant: Variant) -> str:
    """Return the label of a method and its budget."""
    limited = variant.budget is not None or variant.retrieved is not None
    return replace(variant, budget=variant.budget if limited else BUDGET, dense_layers=None).label


def texts(tokenizer: Any, tokens: Sequence[int], after: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds; a token within a character adds nothing.

    after: tokens that precede these.
    """
    stream = TextStream(tokenizer, after=after)
    pieces = [stream.push(token) for token in tokens]
    rest = stream.finish()
    if pieces:
        pieces[-1] += rest
    return pieces


def text_data(tokenizer: Any, document: Sequence[int], question: Sequence[int], answer: Sequence[int]) -> dict[str, Any]:
    """Return the text of all tokens and where each ends, in UTF-16 units, as browsers count. Special tokens have no text."""
    pieces, before = list[str](), list[int]()
    for part in (document, question, answer):
        pieces += texts(tokenizer, part, before)
        before += part
    special = set(getattr(tokenizer, "all_special_ids", ()))
    pieces = ["" if token in special else piece for token, piece in zip(before, pieces, strict=True)]
    lengths = torch.tensor([len(piece.encode("utf-16-le")) // 2 for piece in pieces])
    return {
        "text": "".join(pieces),
        "lengths": pack(lengths),
        "document": len(document),
        "answer": len(document) + len(question),
    }


def run_data(name: str, recording: Recording, tokens: int, *, grain: int = 1, **more: Any) -> dict[str, Any]:
    """Return what one method recalled of `tokens` positions. `grain` positions count as one."""
    layers, rows = stacked(recording.selected, -1)
    groups = -(-tokens // grain)
    data: dict[str, Any] = {"name": name, "layers": layers, "heads": rows.shape[2], "grain": grain, **more}
    data["selected"] = pack_sets(rows // grain, groups)
    if any(recording.exact):
        _, best = stacked(recording.exact, -1)
        _, mass = stacked(recording.mass, 0)
        data["exact"] = pack_sets(best // grain, groups, rows // grain)
        data["mass"] = pack((mass.clamp(0, 1) * 255).round())
    return data


def passage_data(
    recording: Recording, tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]
) -> list[tuple[int, int, float]]:
    """Return where the passages of a prompt begin and end that an answer came from, and the share of heads."""
    found = passages(recording, texts(tokenizer, prompt), texts(tokenizer, answer, prompt))
    return [(one.start, one.stop, round(one.share, 3)) for one in found]


def replay_data(
    run: Run, tokenizer: Any, tokens: int, prompt: Sequence[int] = (), answer: Sequence[int] = (), *, grain: int = 1
) -> dict[str, Any]:
    """Return a run's recalled tokens, the sources of its answer, its alternative tokens and its bytes by memory."""
    said = words(tokenizer, run.said)
    known = {"places": run.places} if any(run.places.values()) else {}
    best = passage_data(run.recording, tokenizer, prompt, answer)
    more = known | ({"said": said} if said else {}) | ({"passages": best} if best else {})
    return run_data(label(run.variant), run.recording, tokens, grain=grain, **more)


def words(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token alone."""
    return [decode(tokenizer, [token]) for token in tokens]


def standalone(inspection: Inspection, tokenizer: Any, title: str, *, most_bytes: int = MOST_BYTES) -> str:
    """Return the page with an inspection's data. If it is too large, merge as few neighbouring positions as needed into one;
    the page states their number. Raises ConfigError if no merging makes it small enough."""
    parts = inspection.document, inspection.question, inspection.answer
    head = {"title": title} | text_data(tokenizer, *parts)
    tokens, grain, size = sum(map(len, parts)), 1, most_bytes + 1
    while grain <= tokens:
        runs = [replay_data(run, tokenizer, tokens, parts[0], parts[2], grain=grain) for run in inspection.runs]
        page = _with_data(title, head | {"runs": runs})
        size = len(page.encode())
        if size <= most_bytes:
            return page
        grain *= 2
    raise ConfigError(f"the page has {size:,} bytes however it is packed; it may have {most_bytes:,}")


def served() -> str:
    """Return the page that asks a server for its data."""
    scripts = "".join(f'<script src="{name}" defer></script>' for name in ("page.js", "chat.js"))
    return _page("kvthaw", '<link rel="stylesheet" href="page.css">', scripts)


def _with_data(title: str, data: dict[str, Any]) -> str:
    style, script = asset("page.css"), asset("page.js")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    embedded = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    return _page(title, head, f'<script type="application/json" id="data">{embedded}</script><script>{script}</script>')


def _page(title: str, head: str, end: str) -> str:
    before, _, rest = asset("page.html").partition("<!--head-->")
    body, _, after = rest.partition("<!--end-->")
    return before.replace("<!--title-->", escape(title)) + head + body + end + after


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
