"""Count where prose breaks the rules of CONTRIBUTING.md, "Words". The counts in words.json may only fall.

    python .ci/words.py             compare the counts of all prose with the recorded ones, and record those that fell
    python .ci/words.py FILE ...    list what these files break

Prose: docstrings, comments and error messages of src/, packages/ and parts of lab/, and the documents. It takes a second.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_suffix(".json")
DOCS = ("README.md", "CHANGELOG.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))))
LONG, COLUMNS, CELL = 25, 132, 300
ANYWHERE = {
    "2 agent": r"\b(?:so|as) (?:many|much)\b(?! as)|\bthose (?:that|of|which)\b|\bof (?:which|whom)\b|\bwhat is \w+ of\b",
    "3 numbers": r"(?<![\w.])\.\d|\bsome \d|\bbeside\b",
    "5 terms": r"\b(?:page-lock\w*|by and by|gives? back|gives? (?:its|their) places? (?:up|back)|foresee\w*|no longer there|alike"
    r"|anew|(?:is|are|been) told|none where|nobody|in the place of|(?:goes|go) on|but for|what is left|whatever is asked"
    r"|stands? (?:in|where|behind|before|for))\b",
}
FIRST = re.compile(r"(?:Have|Let|Say|Be|Tell)\b")
"""Rule 1: what a docstring does not begin with."""
ARGUMENTS = re.compile(r"[.;] [a-z_]+(?:, [a-z_]+)*: ")
"""Rule 6: an argument that is explained behind another, in one line."""
Found = Iterator[tuple[str, int, str]]


def prose(text: str, line: int) -> Found:
    """Yield the rules that a text breaks, each with its line and the words."""
    for rule, pattern in ANYWHERE.items():
        for match in re.finditer(pattern, text):
            yield rule, line + text.count("\n", 0, match.start()), match[0]
    for sentence in re.split(r"(?<=[.:;!?])\s+|\n\s*\n|\n\s*[-|#]|\s\|\s", text):  # a cell of a table is a sentence
        if len(sentence.split()) > LONG:
            yield "4 length", line + text.count("\n", 0, text.find(sentence)), " ".join(sentence.split())[:60]


def python(source: str) -> Found:
    """Yield what docstrings, comments and errors of a Python file break."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value
            yield from prose(text, node.lineno)
            if FIRST.match(text):
                yield "1 verb", node.lineno, text[:60].split("\n")[0]
            for match in ARGUMENTS.finditer(text):
                yield "6 arguments", node.lineno + text.count("\n", 0, match.start()), match[0][2:]
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            specs = [part.format_spec for part in ast.walk(node.exc.args[0]) if isinstance(part, ast.FormattedValue)]
            formats = {id(part) for spec in specs if spec is not None for part in ast.walk(spec)}
            parts = (part for part in ast.walk(node.exc.args[0]) if id(part) not in formats)
            said = [part.value for part in parts if isinstance(part, ast.Constant)]
            text = " ".join(part for part in said if isinstance(part, str))
            yield from prose(text, node.lineno)
            if re.search(r"cannot be had|there is none|can not", text):
                yield "7 errors", node.lineno, text[:60]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from prose(token.string, token.start[0])


def document(text: str) -> Found:
    """Yield what a document breaks, except its code and the targets of its links."""
    text = re.sub(r"```.*?```|`[^`\n]*`|(?<=\])\([^)\s]*\)", lambda code: re.sub(r"[^\n]", "x", code[0]), text, flags=re.DOTALL)
    yield from prose(text, 1)
    for number, line in enumerate(text.split("\n"), 1):
        cells = max(map(len, line.split("|"))) if line.startswith("|") else 0
        if cells > CELL or (not cells and len(line) > COLUMNS and " " in line.strip()):
            yield "8 columns", number, line[:60]


def found(path: Path) -> Found:
    """Yield what a file breaks."""
    text = path.read_text(encoding="utf-8")
    yield from python(text) if path.suffix == ".py" else document(text)


def main(names: list[str]) -> int:
    """List what files break, or compare all counts with the recorded ones. Returns the exit status."""
    for name in names:
        for rule, line, words in sorted(found(Path(name)), key=lambda one: one[1]):
            print(f"{name}:{line}: {rule}: {words}")
    if names:
        return 0
    code = [
        path
        for folder in ("src", "packages", "lab/cli", "lab/evaluate", "lab/reproduce")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    paths = [*code, *(ROOT / name for name in DOCS)]
    counts = Counter(rule for path in paths for rule, *_ in found(path))
    recorded = Counter(json.loads(RECORD.read_text())) if RECORD.exists() else counts
    rose = counts - recorded
    for rule, more in sorted(rose.items()):
        print(f"{rule}: {counts[rule]} places break it, {more} more than were; list those of a file: make words FILES=PATH")
    if not rose:
        RECORD.write_text(json.dumps(dict(sorted(counts.items())), indent=2) + "\n")
        print(", ".join(f"{rule}: {count}" for rule, count in sorted(counts.items())))
    return int(bool(rose))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
