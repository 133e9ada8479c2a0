"""lab/reproduced.py."""

from __future__ import annotations

from lab import reproduced


def test_the_tables_of_the_docs_come_from_the_results() -> None:
    text = (
        (reproduced.HERE / "docs" / "reproduce.md").read_text().partition(reproduced.BEGIN)[2].partition("<!-- until here")[0]
    )
    assert text.strip() == reproduced.pages(), "lab/reproduced.py has not been run"
