"""Packages look one way, as docs/architecture.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import kvthaw

SOURCE = Path(kvthaw.__file__).parent
ORDER = (
    *(
        "errors",
        "formatting",
        "typecheck",
        "counter_rng",
        "regions",
        "native",
        "types",
        "kernels",
        "cache",
        "index",
        "methods",
        "engine",
    ),
    *("evaluate", "bench", "demo", "cli", "__main__"),
)


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of kvthaw that a file imports, wherever it does, but not for annotations alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (name for other in node.orelse for name in imports(other))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "kvthaw":
            inside = (node.module or "").partition(".")[2]
            yield from [inside] if inside else [name.name for name in node.names]
        elif isinstance(node, ast.Import):
            yield from (name.name.partition(".")[2] for name in node.names if name.name.startswith("kvthaw."))
        else:
            yield from imports(node)


def place(module: str) -> int | None:
    """Where in the order; None for the package's own names (`from kvthaw import attach`)."""
    return next((i for i, name in enumerate(ORDER) if f"{module}.".startswith(f"{name}.")), None)


def test_packages_import_what_stands_before_them() -> None:
    seen, wrong = 0, []
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        mine = place(module)
        assert mine is not None or module == "__init__", f"{module} has no place in the order"
        for other in imports(ast.parse(path.read_text(encoding="utf-8"))):
            theirs = place(other)
            seen += theirs is not None
            if mine is not None and theirs is not None and theirs > mine:
                wrong.append(f"{module} imports {other}")
    assert not wrong
    assert seen > 500


def test_kernels_take_tables_and_no_stores() -> None:
    """They name nothing of the packages above, annotations included."""
    for path in sorted((SOURCE / "kernels").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvthaw."):
                theirs = place((node.module or "").removeprefix("kvthaw."))
                assert theirs is not None
                assert theirs <= ORDER.index("kernels"), f"{path.name} imports {node.module}"
