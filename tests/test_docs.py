"""What the docs say is what the code says."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from transformers import PreTrainedModel
from typer.testing import CliRunner

import lab.cli
from kvthaw import cli
from kvthaw.cli.serve import serve
from kvthaw.evaluate.variant import read_variant
from kvthaw.methods import METHODS, resolve
from lab.__main__ import app as laboratory
from lab.ablations import registered
from lab.cells import read_cells, write_cells
from lab.evaluate.published import BENCHMARKS
from lab.evaluate.tasks import SUITES, TASKS
from lab.methods_table import BEGIN, PAGE, markdown
from lab.script import END, put
from zoo import build, prompt

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "eval",
    "generate",
    "chat",
    "compare",
    "bench",
    "decode",
    "prefill",
    "serving",
    "demo",
    "methods",
    "serve",
    "inspect",
    "task",
    "published",
    "perplexity",
    "plan",
}
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md"))]


def test_the_table_of_methods_is_the_generated_one() -> None:
    found = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert found.strip() == markdown(), "python -m lab.methods_table has not been run"


def test_every_task_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text().partition("## Published benchmarks")[0]
    assert [name for name in (*TASKS, *SUITES) if f"`{name}`" not in text] == []
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(set(re.findall(r"`(\w+)`", " ".join(rows))) - {*TASKS, *SUITES}) == [], "no other"


def test_every_published_benchmark_stands_in_the_docs() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text().partition("## Published benchmarks")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(rows[: rows.index(" `generate_until` ")]))
    assert sorted(named) == sorted(BENCHMARKS)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To a file that is there, and to a heading of it."""
    lost = []
    for link, _, heading in (one.partition("#") for one in re.findall(r"\]\(([^)\s]+)", (ROOT / page).read_text())):
        path = (ROOT / page).parent / link if link else ROOT / page
        there = "://" in link or (path.exists() and (not heading or path.suffix != ".md" or heading in headings(path)))
        lost += [] if there else [f"{link}#{heading}"]
    assert lost == []


def headings(path: Path) -> set[str]:
    """What a link may name of a page: headings as GitHub and the site write them."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one.lower()).strip().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES)
def test_named_methods_exist(page: str) -> None:
    """Outside the notes, which keep what was tried and left, their options exist too."""
    named = re.findall(r"`([a-z0-9-]+)((?::\w+=[^:`]+)+)`", (ROOT / page).read_text())
    with registered():
        assert [name for name, _ in named if name not in METHODS] == []
        if not page.startswith("docs/notes/"):
            for name, options in named:
                resolve(read_variant(name + options).method)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/notes/")])
def test_notes_name_results_that_are_kept(page: str) -> None:
    named = re.findall(r"`([\w-]+\.jsonl)`", (ROOT / page).read_text())
    assert [name for name in named if not (ROOT / "lab" / "results" / name).exists()] == []


def test_every_note_is_listed() -> None:
    listed = re.findall(r"\]\((\S+?\.md)\)", (ROOT / "docs" / "notes" / "README.md").read_text())
    assert sorted([*listed, "README.md"]) == sorted(path.name for path in (ROOT / "docs" / "notes").glob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/notes/")])
def test_files_that_are_named_are_there(page: str) -> None:
    """As from the top level, or as a part of a path in the package or among the tests."""
    named = set(re.findall(r"`([\w/.*]+(?:\.\w+|/))`", (ROOT / page).read_text()))
    files = [name for name in named if name.endswith(("/", ".py", ".md", ".toml"))]
    places = (ROOT / "src", ROOT / "tests")
    assert [name for name in files if not (any(ROOT.glob(name)) or any(any(place.rglob(name)) for place in places))] == []


def test_every_folder_and_file_of_the_package_has_its_place_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Folders")[2].partition("## ")[0]
    package = Path(cli.__file__).parents[1]
    parts = [f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"]
    parts += [path.name for path in package.glob("*.py") if not path.name.startswith("__")]
    assert len(parts) > 12
    assert [part for part in parts if f"`{part}" not in text] == []


def test_tables_of_the_comparison_come_from_its_cells() -> None:
    compared = runpy.run_path(str(ROOT / "lab" / "compared.py"))
    cells = read_cells(ROOT / "lab" / "results" / "compare.jsonl")
    for page, text in compared["PAGES"].items():
        found = (ROOT / page).read_text().partition(compared["BEGIN"])[2].partition(END)[0]
        assert found.strip() == text(cells, read_cells(compared["SEEDS"])), (
            f"python -m lab.compared has not been run for {page}"
        )


def test_of_cells_that_are_published_again_the_last_counts(tmp_path: Path) -> None:
    compared, first = (
        runpy.run_path(str(ROOT / "lab" / "compared.py")),
        ROOT / "lab" / "results" / "compare.jsonl",
    )
    one = next(cell for cell in read_cells(first) if cell.method == "quest")
    write_cells([replace(one, method="quest:page=64"), replace(one, kv_host_bytes=1)], tmp_path / "new.jsonl")
    cells = compared["newest"]([first, tmp_path / "new.jsonl"])
    assert len(cells) == len(read_cells(first)) + 1
    assert [cell.kv_host_bytes for cell in cells if cell.asked == one.asked] == [1]


def test_what_stands_between_the_marks_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before <!-- mark --> old {END} after")
    put(path, "new", "<!-- mark -->")
    assert path.read_text() == f"before <!-- mark -->\n\nnew\n\n{END} after"
    path.write_text("no marks")
    with pytest.raises(SystemExit, match=r"page\.md has no"):
        put(path, "new", "<!-- mark -->")


def test_every_command_that_is_shown_can_be_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "own_method.py").touch()
    monkeypatch.chdir(tmp_path)  # where the plugin is that some name
    monkeypatch.setattr("kvthaw.methods.METHODS.load_plugin", lambda _: [])
    monkeypatch.setattr("typer.rich_utils.rich_format_help", lambda **_: None)  # whose tables nobody reads here
    texts = [(ROOT / page).read_text().replace("\\\n", " ") for page in (*PAGES, "Makefile")]
    modules = [
        importlib.import_module(f"{of.__name__}.{one.name}")
        for of in (cli, lab.cli)
        for one in pkgutil.iter_modules(of.__path__)
    ]
    texts += [value for module in modules for name, value in vars(module).items() if name.endswith("EXAMPLES")]
    commands = "eval|generate|chat|compare|bench|reproduce|demo|methods|serve|inspect|plan"
    pattern = rf"(?:kvthaw|python -m lab) (?:{commands}) [^`\n#|>)]*--[a-z][^`\n#|>)]*"
    shown = [line for text in texts for line in re.findall(pattern, text.replace("[/]", "`"))]
    assert shown
    parts = {line: shlex.split(line) for line in shown}
    kinds = {tuple(part for part in split if part.startswith("--") or part in COMMANDS): line for line, split in parts.items()}
    for line in kinds.values():  # one of each command and its options, whatever their values
        at = parts[line].index("--plugin") if "--plugin" in parts[line] else len(parts[line])  # a file that is not here
        asked = [*parts[line][:at], "--help", *parts[line][at:]]
        program, words = (cli.app, asked[1:]) if asked[0] == "kvthaw" else (laboratory, asked[3:])
        said = CliRunner().invoke(program, words)  # options are looked up before help is shown
        assert said.exit_code == 0, f"{line}: {said.output}"


def test_every_option_of_the_server_is_in_its_page() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    options = [f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters if name != "served"]
    assert len(options) > 20
    assert [option for option in options if f"`{option}" not in text] == []


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return build("llama", max_position_embeddings=1 << 16)


@pytest.mark.parametrize(
    "page", ["../README.md", "index.md", "choose.md", "planning.md", "documents.md", "own-method.md", "troubleshooting.md"]
)
def test_code_on_a_page_runs(
    page: str, llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One block after the other, with a model and its inputs at hand."""
    monkeypatch.chdir(tmp_path)
    ids = prompt(1, 100)
    names = {"model": llama, "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)}}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert blocks
    before = list(METHODS)
    for block in blocks:
        exec(block, names)  # as a reader would
    for method in set(METHODS) - set(before):
        METHODS.unregister(method)


def test_the_readme_is_read_in_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 800
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert all(table.count("\n") - 2 <= 6 and table.splitlines()[0].count("|") - 1 <= 5 for table in tables)


def test_the_method_that_is_explained_is_the_example() -> None:
    first = re.findall(r"```python\n(.*?)```", (ROOT / "docs/own-method.md").read_text(), re.DOTALL)[0]
    assert first == (ROOT / "examples/own_method.py").read_text()


def test_every_page_stands_in_the_site_s_navigation() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = [page for entry in site["nav"] for page in entry.values()]
    assert len(pages) <= 15
    assert sorted(re.findall(r"\]\((.+?)\)", (ROOT / "docs" / "llms.txt").read_text())) == sorted(pages)
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_api_page_documents_what_there_is() -> None:
    lines = [line for line in (ROOT / "docs" / "api.md").read_text().splitlines() if line.startswith(":")]
    names = [line.removeprefix("::: ") for line in lines]
    assert {f"kvthaw.{name}" for name in ("attach", "detach", "Cache", "Batch", "Scheduler")} <= set(names)
    assert all(pkgutil.resolve_name(name) for name in names), "a line that is no directive names nothing"
