"""Figures: their grids on a small machine, their plots from lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvthaw import ConfigError, KvthawError
from kvthaw.bench.shapes import SHAPES
from kvthaw.evaluate.results import Record, ResultsFile
from kvthaw.formatting import short
from lab import figures, filled
from lab.bench import shaped
from lab.bench.settings import ShapeSetting
from lab.bench.shaped import ShapeBench
from lab.evaluate import plot
from lab.figures import Options
from lab.plans import FIGURES
from timed import measured, tinier

pytestmark = pytest.mark.usefixtures("small")

pytest.importorskip("matplotlib")


def of(line: Record, setting: ShapeSetting, **measures: Any) -> Record:
    """The same of another setting."""
    return Record(setting.to_dict(), {**line.measures, **measures})


@pytest.mark.parametrize("name", FIGURES)
def test_every_grid_can_be(name: str) -> None:
    for device in ("cpu", "NVIDIA H200"):
        found = figures.grid(name, Options(), device)
        assert len(found) == len(set(found)) > 3
        assert {one.device for one in found} == {device}
        assert all(one.steps == "eager" for one in found) == (device == "cpu")
        assert {one.steps for one in found} - {"eager"} <= {*figures.PLANS[name].steps}
    small = figures.grid(name, Options(shape="tiny", shrink=64), "cpu")
    assert max(one.length for one in small) <= 16384
    assert {one.shape for one in small} == {"tiny"}


@pytest.fixture(scope="module")
def line() -> Record:
    """Some record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", tinier())
        return measured("hf-dynamic", lengths=[16], new_tokens=8)[0]


def test_a_figure_is_measured_once_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Record) -> None:
    methods = ("full", "pariskv-plus", "prkv")
    asked = Options(("length",), methods, "tiny", shrink=64, out=tmp_path / "out.jsonl", plot=tmp_path)
    wanted = figures.grid("length", asked, "cpu")
    assert {one.method for one in wanted} == set(methods)
    ResultsFile(asked.out).add(*(of(line, one) for one in wanted[:-1]))
    found = figures.main(asked)  # the last alone is measured
    assert [ShapeSetting(**line.setting) for line in found["length"]] == wanted
    assert found["length"][-1]["method"] == "prkv"
    assert found["length"][-1]["hit_rate"] == pytest.approx(0.7, abs=0.03)
    picture = tmp_path / "length.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    monkeypatch.setattr(shaped, "build", lambda *_, **__: pytest.fail("measured again"))
    notes: list[str] = []
    assert figures.main(replace(asked, draw=True), note=notes.append) == found
    assert notes == [f"wrote {picture}"]
    assert picture.exists()


def test_runs_that_a_drawing_misses_are_said(tmp_path: Path, line: Record) -> None:
    asked = Options(names=("throughput",), draw=True, out=tmp_path / "out.jsonl", plot=tmp_path)
    wanted = figures.grid("throughput", asked, "NVIDIA H200")
    ResultsFile(asked.out).add(*(of(line, replace(one, shared=not one.dense)) for one in wanted[:-2]))
    notes: list[str] = []
    figures.main(asked, note=notes.append)
    said, *missing = notes[0].splitlines()
    assert said == "throughput is drawn without"
    assert missing == [f"  {one}" for one in wanted[-2:]], "those that shared their rows are there"


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_drawn_from_lines(name: str, line: Record) -> None:
    settings = figures.grid(name, Options(), "NVIDIA H200")
    lines = [of(line, one, ttft_s=1.0, elapsed_s={"256": 1.0, "512": 2.0, "1024": 4.0}) for one in settings]
    figure = plot.new(8, 4)
    figures.PLANS[name].draw(figure, lines)
    labels = {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}
    labels |= {text.get_text() for axes in figure.axes for text in axes.texts}  # names beside their points
    drawn = sum(len(axes.lines) + len(axes.patches) for axes in figure.axes)
    assert labels
    assert drawn >= len({(one.method.replace(":iterations=4", ""), one.budget, one.retrieved) for one in settings})


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    notes: list[str] = []
    asked = Options(names=("throughput",), shape="tiny", shrink=512, host_bytes=1 << 20)
    assert figures.main(asked, note=notes.append) == {"throughput": []}
    assert sum("more host memory than there is" in note for note in notes) >= len(figures.grid("throughput", asked, "cpu"))
    assert "length is 256" in notes[0]


def test_what_came_out_is_drawn_before_a_failure_is_raised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: Record
) -> None:
    def measure(_: ShapeBench, group: list[ShapeSetting]) -> list[Record]:
        if group[0].method == "prkv":
            raise ConfigError("no pages today")
        return [of(line, one) for one in group]

    monkeypatch.setattr(ShapeBench, "_measure", measure)
    asked = Options(names=("length",), shape="tiny", shrink=512, out=tmp_path / "out.jsonl", plot=tmp_path / "new" / "folder")
    with pytest.raises(KvthawError, match="no pages today"):
        figures.main(asked)
    assert (tmp_path / "new" / "folder" / "length.png").read_bytes().startswith(b"\x89PNG")


def test_layers_share_the_host_where_it_is_too_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: Record) -> None:
    notes: list[str] = []
    asked = Options(names=("length",), shape="tiny", shrink=512, out=tmp_path / "out.jsonl")
    (wanted,) = [one for one in figures.grid("length", asked, "cpu") if one.method == "prkv" and one.length == 2048]

    def check(one: ShapeSetting, *_: object) -> None:
        if one.length == 2048 and one.method == "prkv" and not one.shared:
            raise ConfigError("the host is too small")
        if one != replace(wanted, shared=True):
            raise ConfigError("not wanted")

    monkeypatch.setattr(filled.room, "check", check)
    monkeypatch.setattr(ShapeBench, "_measure", lambda _, group: (of(line, one) for one in group))
    (found,) = figures.main(asked, note=notes.append)["length"]
    assert ShapeSetting(**found.setting) == replace(wanted, shared=True)
    assert "the host is too small" in notes
    assert figures.known_records("length", ResultsFile(asked.out), asked) == [found]


def test_bad_options_are_refused(tmp_path: Path) -> None:
    for asked, words in (
        (Options(names=("lenght",)), "name is 'lenght'; did you mean 'length'[?]"),
        (Options(shrink=0), "shrink is 0"),
        (Options(draw=True), "draw=1 needs out"),
        (Options(names=("length",), draw=True, out=tmp_path / "none.jsonl", plot=tmp_path), "holds no line of length"),
        (Options(names=("length",), shape="huge"), "shape is 'huge'"),
    ):
        with pytest.raises(ConfigError, match=words):
            figures.main(asked)


def test_lengths_are_short() -> None:
    assert [short(n) for n in (100, 1024, 36864, 524288, 1 << 20, 3 << 19)] == ["100", "1k", "36k", "512k", "1M", "1.5M"]
