"""Methods that are not kvthaw's: registered, from a file, from an installed package."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvthaw
from kvthaw.errors import ConfigError
from kvthaw.method_names import BASELINES, OWN, unknown_method
from kvthaw.methods import METHODS, resolve
from kvthaw.methods.registry import Methods

PLUGIN = '''
"""A method."""
from __future__ import annotations
from dataclasses import dataclass
import kvthaw
from kvthaw.index.exact import ExactIndex
from kvthaw.regions import Regions

@dataclass
class Options:
    sink: int = 4

def mine(*, sink: int = 4) -> kvthaw.Method:
    """The largest products."""
    return kvthaw.Method("mine", paper="-", unit="token", index=ExactIndex, regions=Regions(Options(sink).sink, 32, 16))

METHODS = {"mine": mine}
'''


def mine(*, sink: int = 4) -> kvthaw.Method:
    """Another one's options."""
    return resolve("oracle", sink=sink)


@pytest.fixture
def methods() -> Methods:
    return Methods({"oracle": "kvthaw.methods.oracle:oracle"})


def packaged(where: Path, monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    """Install a package with these entry points, as pip would."""
    info = where / "thawed-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thawed\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvthaw.methods]\n" + "".join(f"{a} = {b}\n" for a, b in points.items()))
    (where / "thawed.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(where)


def test_names_are_those_of_the_methods() -> None:
    assert tuple(METHODS) == (*OWN, *BASELINES)
    for name in OWN:
        assert resolve(name).name == name


def test_a_baseline_that_is_not_installed_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvthaw.methods.METHODS", Methods(METHODS._own))
    monkeypatch.setattr("kvthaw.methods.registry.entry_points", lambda **_: [])
    for name in BASELINES:
        with pytest.raises(ConfigError, match=rf"method is '{name}', a baseline, .*: pip install 'kvthaw\[baselines\]'"):
            resolve(f"{name}:sink=4")
    assert "did you mean 'prkv'" in str(unknown_method("prvk", OWN))


def test_a_registered_method_is_one_like_any_other(llama: kvthaw.engine.hf.PreTrainedModel) -> None:
    kvthaw.METHODS.register("mine", mine)
    try:
        assert "mine" in kvthaw.METHODS
        assert resolve("mine:sink=8").regions.sink == 8
        assert kvthaw.Cache(llama, "mine", budget=32).stats().method == "mine"
        with pytest.raises(ConfigError, match="mine has no option 'page'; there are: sink"):
            resolve("mine:page=8")
    finally:
        kvthaw.METHODS.unregister("mine")
    assert "mine" not in kvthaw.METHODS


def test_a_name_registered_again_stands_for_the_new_function(methods: Methods) -> None:
    methods.register("mine", mine)
    methods.register("mine", kvthaw.METHODS["quest"])
    assert methods["mine"] is kvthaw.METHODS["quest"]
    assert [name for name in methods if name not in BASELINES] == ["oracle", "mine"]


@pytest.mark.parametrize(
    ("name", "make", "words"),
    [("oracle", mine, "'oracle', which is a method of kvthaw's own"), ("quest", mine, "'quest', which is a method"),
     ("a:b", mine, "name is 'a:b'"), ("auto", mine, "'auto'"),
     ("mine", mine(), r"mine is Method\(.*must be a function")],
)  # fmt: skip
def test_what_cannot_be_registered_is_refused(methods: Methods, name: str, make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        methods.register(name, make)  # type: ignore[arg-type]


def test_a_function_that_makes_no_method_is_named() -> None:
    kvthaw.METHODS.register("mine", lambda: {"name": "mine"})  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(ConfigError, match=r"method mine made {"):
            resolve("mine")
    finally:
        kvthaw.METHODS.unregister("mine")


def test_a_file_names_its_methods(methods: Methods, tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text(PLUGIN)
    assert methods.load_plugin(tmp_path / "file.py") == ["mine"]
    assert methods["mine"](sink=6).regions.sink == 6
    (tmp_path / "empty.py").write_text("METHODS = {}")
    with pytest.raises(ConfigError, match=r"empty\.py has no METHODS"):
        methods.load_plugin(tmp_path / "empty.py")
    with pytest.raises(ConfigError, match=r"gone\.py'; it must be a Python file"):
        methods.load_plugin(tmp_path / "gone.py")


def test_a_package_s_method_is_imported_when_it_is_asked_for(
    methods: Methods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged(tmp_path, monkeypatch, mine="thawed:mine", broken="thawed:nothing")
    assert [name for name in methods if name not in BASELINES] == ["oracle", "mine", "broken"]
    assert methods["mine"]().unit == "token"
    with pytest.raises(ConfigError, match="method broken of thawed cannot be loaded from thawed:nothing"):
        methods["broken"]
    methods.register("broken", mine)
    assert methods["broken"] is mine


def test_a_package_may_not_take_a_name_of_kvthaw(methods: Methods, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, monkeypatch, oracle="thawed:mine")
    assert methods["oracle"] is kvthaw.METHODS["oracle"]
    with pytest.raises(ConfigError, match="method oracle of thawed has the name of another method"):
        methods.get("mine")
