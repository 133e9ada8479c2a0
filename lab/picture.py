"""Draws docs/how-it-works.svg: a token's path through one decode step, with the bytes of 128k tokens of an 8B model.

python -m lab.picture
"""

from __future__ import annotations

from html import escape
from pathlib import Path

OUT = Path(__file__).parent.parent / "docs" / "how-it-works.svg"
TOKENS, LAYERS, DENSE, HEADS, QUERY_HEADS, WIDTH = 128 << 10, 32, 1, 8, 32, 128
"""Llama-3.1-8B. One layer attends to everything."""
ROW, MEANS = 2 * 2 * WIDTH, 8 + 2 * WIDTH
"""Bytes of a key and a value in bf16, and of a page's means in e4m3."""
BUDGET, HELD, PAGE = 1024, 52, 64
"""Tokens that a head reads, and how many of them are the first and latest ones; tokens of a page."""
HIT = 0.7
"""The share of selected rows that earlier steps left on the GPU, as on text."""
INDEX = 2.8
"""GiB of thaw's index by `kvthaw plan --shape llama-3.1-8b --length 128k --method thaw`, means of pages included."""

STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1b2127; } .t { font-weight: 600; } .s { font-size: 12px; fill: #59636e; }
.back { fill: #fff; } .zone { fill: #f3f6f7; stroke: #d5dce1; } .box { fill: #fff; stroke: #0b6e77; stroke-width: 1.5; }
.line { fill: none; stroke: #0b6e77; stroke-width: 2; } .n, .end { fill: #0b6e77; font-weight: 700; } .bus-end { fill: #b5660b; }
.host { stroke: #b5660b; } .bus { stroke: #b5660b; stroke-width: 4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6e9ec; } .s { fill: #9fabb7; } .back, .box { fill: #121518; } .zone { fill: #1b1f24; stroke: #323a43; }
  .box, .line { stroke: #5cc8d2; } .n, .end { fill: #5cc8d2; } .host, .bus { stroke: #e8a14a; } .bus-end { fill: #e8a14a; }
}
"""


def size(count: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.{0 if count / unit >= 10 else 1}f}".removesuffix(".0") + f" {name}"
    return f"{count:.0f} bytes"


def numbers() -> dict[str, float]:
    """Return the bytes of the picture, of all layers where nothing else is said."""
    sparse = (LAYERS - DENSE) * HEADS
    chosen = sparse * (BUDGET - HELD) * ROW
    return {
        "query": QUERY_HEADS * WIDTH * 2,  # of a layer
        "store": LAYERS * HEADS * TOKENS * ROW,
        "chosen": chosen,
        "moved": (1 - HIT) * chosen,
        "means": sparse * TOKENS / PAGE * MEANS,
        "index": INDEX * (1 << 30),
    }


def box(x: int, y: int, number: str, title: str, *lines: str, kind: str = "") -> str:
    """Return a box with a title and lines below it."""
    texts = [f'<text x="{x + 12}" y="{y + 46 + 17 * i}" class="s">{escape(line)}</text>' for i, line in enumerate(lines)]
    head = f'<text x="{x + 12}" y="{y + 24}" class="t"><tspan class="n">{number}</tspan> {escape(title)}</text>'
    return f'<rect x="{x}" y="{y}" width="186" height="100" rx="8" class="box {kind}"/>{head}{"".join(texts)}'


def arrow(path: str, kind: str = "") -> str:
    """Return an arrow along a path."""
    return f'<path d="{path}" class="line {kind}" marker-end="url(#{"bus-end" if kind else "end"})"/>'


def picture() -> str:
    """Return the picture."""
    of = {name: size(count) for name, count in numbers().items()}
    rows, pages = f"{BUDGET - HELD:,}", f"{TOKENS // PAGE:,}"
    marker = (
        '<marker id="{}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="{}" markerHeight="{}" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="{}"/></marker>'
    )
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 880 452" role="img" aria-labelledby="t">',
        '<title id="t">A decode step: the query searches the index on the GPU, missing rows come over the bus from host memory, '
        "attention reads them exactly and estimates the rest from means of pages</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{marker.format('end', 7, 7, 'end')}{marker.format('bus-end', 4, 4, 'bus-end')}</defs>",
        '<rect width="880" height="452" class="back"/>',
        '<rect x="8" y="8" width="864" height="288" rx="12" class="zone"/><text x="22" y="32" class="t">GPU</text>',
        '<rect x="8" y="352" width="864" height="92" rx="12" class="zone"/><text x="22" y="376" class="t">Host memory</text>',
        box(20, 48, "1", "Query", "of the new token,", f"{of['query']} per layer"),
        box(238, 48, "2", "Index", "3-bit codes of all keys,", f"{of['index']}: finds the best", f"at most {rows} rows a head"),
        box(456, 48, "4", "Rows", f"{of['chosen']} of {of['store']}", f"{HIT:.0%} are here already,", "from earlier steps"),
        box(674, 48, "6", "Attention", "exact over the rows,", "the first and the latest", f"{HELD} tokens, and 5"),
        box(456, 180, "5", "Remainder", f"means of {pages} pages", f"of a KV head, {of['means']}:", "an estimate of the rest"),
        '<rect x="238" y="362" width="500" height="72" rx="8" class="box host"/>',
        f'<text x="252" y="386" class="t">All {TOKENS >> 10}k rows: keys and values, {of["store"]}</text>',
        '<text x="252" y="408" class="s">Prefill writes them once. A full ring buffer adds the decoded tokens.</text>',
        arrow("M206 98H234"),
        arrow("M424 98H452"),
        arrow("M642 98H670"),
        arrow("M642 230H768V152"),
        arrow("M330 148V230H452"),
        arrow("M440 362V122H454", "bus"),
        f'<text x="452" y="326" class="t"><tspan class="n">3</tspan> over the bus: {of["moved"]} per token</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main() -> None:
    """Write the picture."""
    OUT.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
