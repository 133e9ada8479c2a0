"""What the docs say is what the code says."""

from __future__ import annotations

from pathlib import Path

from kvthaw.evaluate.describe import markdown

ROOT = Path(__file__).parents[1]


def test_the_table_of_methods_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "methods.md").read_text().endswith("\n\n" + markdown())


def test_the_readme_names_files_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("docs/results.png", "docs/log.md", "docs/structure.md", "docs/methods.md", "CONTRIBUTING.md"):
        assert name in readme
        assert (ROOT / name).exists()
