"""The counts that `make words` keeps of prose."""

from __future__ import annotations

import runpy
from pathlib import Path

WORDS = runpy.run_path(str(Path(__file__).parent.parent / ".ci" / "words.py"))

BAD = '''
def grow(n):
    """Have room for so many tokens. n: how many. m: of which.

    It takes some 5 ms and .9 GB of page-locked memory.
    """
    raise ValueError("memory cannot be had")  # those that wait
'''


def test_each_rule_finds_what_breaks_it() -> None:
    found = sorted(rule for rule, *_ in WORDS["python"](BAD))
    twice = ["2 agent"] * 3 + ["3 numbers"] * 2
    assert found == ["1 verb", *twice, "5 terms", *["6 arguments"] * 2, "7 errors"]
    assert not list(WORDS["python"]('"""Grow the table to n tokens, in 0.9 ms.\n\nn: tokens per sequence.\n"""'))


def test_documents_are_read_but_for_their_code() -> None:
    text = "# Title\n\n`some 5` of these\n\n" + "word " * 26 + ".\n\nA " + "x" * 140 + "\n\n`" + "x" * 140 + "`\n"
    assert sorted(rule for rule, *_ in WORDS["document"](text)) == ["4 length", "8 columns"]
