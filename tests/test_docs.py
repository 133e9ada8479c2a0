"""What the docs say is what the code says."""

from __future__ import annotations

import importlib
import pkgutil
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvthaw import cli
from kvthaw.evaluate.cells import read_cells
from kvthaw.evaluate.compare import under
from kvthaw.evaluate.describe import markdown
from kvthaw.evaluate.overview import by_budget
from kvthaw.evaluate.published import BENCHMARKS
from kvthaw.evaluate.tasks import SUITES, TASKS

ROOT = Path(__file__).parents[1]


def test_the_table_of_methods_is_the_generated_one() -> None:
    assert (ROOT / "docs" / "methods.md").read_text().endswith("\n\n" + markdown())


def test_every_task_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text()
    assert [name for name in (*TASKS, *SUITES) if f"`{name}`" not in text] == []
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(set(re.findall(r"`(\w+)`", " ".join(rows))) - {*TASKS, *SUITES}) == [], "no other"


def test_every_published_benchmark_stands_in_the_docs() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "docs" / "published.md").read_text().splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(rows[: rows.index(" `generate_until` ")]))
    assert sorted(named) == sorted(BENCHMARKS)


def test_the_readme_names_files_that_are_there() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("docs/results.png", "docs/log.md", "docs/structure.md", "docs/methods.md", "docs/tasks.md", "CONTRIBUTING.md"):
        assert name in readme
        assert (ROOT / name).exists()


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text())
    assert [link for link in links if "://" not in link and not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/structure.md", "docs/glossary.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    """As from the top level, or as a part of a path in the package or among the tests."""
    named = set(re.findall(r"`([\w/.*]+(?:\.\w+|/))`", (ROOT / page).read_text()))
    files = [name for name in named if name.endswith(("/", ".py", ".md", ".toml"))]
    places = (ROOT / "src", ROOT / "tests")
    assert [name for name in files if not (any(ROOT.glob(name)) or any(any(place.rglob(name)) for place in places))] == []


def test_every_folder_and_file_of_the_package_has_its_place_in_the_structure() -> None:
    text = (ROOT / "docs" / "structure.md").read_text().partition("## Folders")[2].partition("## ")[0]
    package = Path(cli.__file__).parents[1]
    parts = [f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]
    parts += [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    assert len(parts) > 12
    assert [part for part in parts if f"`{part}" not in text] == []


def test_the_readme_says_what_the_comparison_found() -> None:
    compared = runpy.run_path(str(ROOT / "benchmarks" / "compared.py"))
    cells = read_cells(ROOT / "benchmarks" / "results" / "compare.jsonl")
    for path, text in (
        ("README.md", compared["short"](cells)),
        ("docs/compare.md", by_budget(under(cells, ("dense", 0))).markdown()),
    ):
        found = (ROOT / path).read_text().partition(compared["BEGIN"])[2].partition(compared["END"])[0]
        assert text in found, f"benchmarks/compared.py has not been run for {path}"


def test_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    compared = runpy.run_path(str(ROOT / "benchmarks" / "compared.py"))
    path = tmp_path / "page.md"
    path.write_text(f"before {compared['BEGIN']} old {compared['END']} after")
    compared["put"](path, "new")
    assert path.read_text() == f"before {compared['BEGIN']}\n\nnew\n\n{compared['END']} after"
    path.write_text("no marks")
    with pytest.raises(SystemExit, match=r"page\.md has no"):
        compared["put"](path, "new")


def test_every_command_that_is_shown_can_be_given() -> None:
    files = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *(ROOT / "docs").glob("*.md"))
    texts = [path.read_text().replace("\\\n", " ") for path in files]
    for one in pkgutil.iter_modules(cli.__path__):
        module = vars(importlib.import_module(f"kvthaw.cli.{one.name}"))
        texts += [value for name, value in module.items() if name.endswith("EXAMPLES")]
    commands = "eval|generate|compare|bench|demo|methods"
    shown = [
        line
        for text in texts
        for line in re.findall(rf"kvthaw ((?:{commands}) [^`\n#|>)]*--[a-z][^`\n#|>)]*)", text.replace("[/]", "`"))
    ]
    assert len(shown) > 50
    for line in shown:
        said = CliRunner().invoke(cli.app, [*shlex.split(line), "--help"])  # options are looked up before help is shown
        assert said.exit_code == 0, f"{line}: {said.output}"
