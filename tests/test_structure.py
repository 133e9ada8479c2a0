"""Files import one way, as docs/architecture.md says; imports for annotations count too."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import kvthaw

SOURCE = Path(kvthaw.__file__).parent
ORDER = [
    *(
        "version",
        "errors",
        "formatting",
        "typecheck",
        "names",
        "counter_rng",
        "regions",
        "method_names",
        "config",
        "native",
        "kernels",
        "cache",
        "index",
        "methods",
    ),
    *(
        "testing",
        "engine",
        "answering",
        "evaluate",
        "inspect",
        "serve",
        "bench",
        "conversation",
        "cli",
    ),
    "__main__",
]
"""Packages and files of kvthaw; each imports only what comes before it."""
FILES = {
    ".".join(("kvthaw", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def modules(module: str) -> Iterator[str]:
    """The modules that a file imports, wherever it does: kvthaw's by file, others by their package."""
    path = FILES[module]
    parents = [module if path.name == "__init__.py" else module.rpartition(".")[0]]
    while "." in parents[-1]:
        parents.append(parents[-1].rpartition(".")[0])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = [parents[node.level - 1]] * bool(node.level) + [node.module] * bool(node.module)
            names = [".".join([*parts, name.name]) for name in node.names]
        for name in names:
            while name not in FILES and "." in name:
                name = name.rpartition(".")[0]
            yield name


@functools.cache
def imports() -> dict[str, set[str]]:
    return {module: set(modules(module)) - {module} for module in FILES}


def place(module: str) -> int:
    """Where a module of kvthaw stands in the order; the package itself, which imports its public names lazily, comes last."""
    name = module.removeprefix("kvthaw").removeprefix(".").partition(".")[0]
    return ORDER.index(name) if name else len(ORDER)


def circles(files: dict[str, set[str]]) -> list[list[str]]:
    """Circles of files, one a group of files that import each other."""
    found, left = [], dict(files)
    while True:
        try:
            TopologicalSorter(left).prepare()
        except CycleError as error:
            found.append(error.args[1][:-1])
            for module in found[-1]:
                del left[module]
        else:
            return found


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()})
    assert circles({module: {name for name in names if name in FILES} for module, names in imports().items()}) == []


def test_packages_import_what_stands_before_them() -> None:
    ours = [(module, name) for module, names in imports().items() for name in names if name in FILES and name != "kvthaw"]
    assert len(ours) > 500
    assert [f"{module} imports {name}" for module, name in ours if place(name) > place(module)] == []


def test_nothing_imports_the_baselines() -> None:
    assert {
        module for module, names in imports().items() if any(name.startswith("kvthaw_baselines") for name in names)
    } == set()


def test_only_the_adapter_imports_transformers() -> None:
    assert {module for module, names in imports().items() if "transformers" in names and ".engine.hf" not in module} == set()


STATE = {
    "kvthaw.cache.host_memory": "_page_locked",  # pages that the process has pinned
    "kvthaw.cache.page_locked": "_STILL_PINNED",  # pages that CUDA did not unpin
    "kvthaw.cache.streams": "_WITH_THREADS",  # fork() copies the process without its threads
    "kvthaw.engine.hf.attention": "_SERVED",  # models that share a config or modules
    "kvthaw.kernels.flash_attention_4": "_COMPILED",  # the library compiles once a process
    "kvthaw.methods": "METHODS",  # the registry that users add to
}
"""What files hold that changes: of the process, not of a model, a handle or a cache."""


def changes(value: ast.expr | None) -> bool:
    """Whether a value is an empty container, to be filled, or an object of kvthaw's with state of its own."""
    if isinstance(value, ast.List | ast.Set | ast.Dict):
        return not (value.keys if isinstance(value, ast.Dict) else value.elts)
    if not isinstance(value, ast.Call):
        return False
    name = ast.unparse(value.func).rpartition(".")[2].partition("[")[0]
    kinds = {"dict", "list", "set", "deque", "Counter", "defaultdict", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary"}
    return (name in kinds and not value.args) or name in {"PageLocked", "Methods"}


def test_no_file_holds_the_state_of_a_model_or_a_cache() -> None:
    found = {
        (module, ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target))
        for module, path in FILES.items()
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and changes(node.value)
    }
    assert found == set(STATE.items())
