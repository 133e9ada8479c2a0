"""Heat maps as SVG: what is green, what is red, what is not known."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from kvthaw.evaluate.heat import heat

GREEN, RED, GREY = "hsl(120 60% 58%)", "hsl(0 60% 58%)", "#e5e7eb"


def areas(svg: str) -> dict[str, int]:
    """Pixels of each colour in the first panel."""
    paths = ET.fromstring(svg).find(".//{*}g").findall("{*}path")  # type: ignore[union-attr]
    found = {}
    for path in paths:
        boxes = re.findall(r"h(\d+)v(\d+)", path.attrib["d"])
        found[path.attrib["fill"]] = sum(int(w) * int(h) for w, h in boxes)
    return found


def test_a_cell_has_the_colour_of_its_share() -> None:
    shares = {(0.0, 4096): 1.0, (0.5, 4096): 1.0, (0.9, 4096): 0.0, (0.0, 8192): 1.0}
    svg = heat({"quest": shares, "a<b": {}}, [0.0, 0.5, 0.9], [4096, 8192])
    cell = 16 * 4
    assert areas(svg) == {GREEN: 3 * cell, RED: cell, GREY: 2 * cell}
    texts = [text.text for text in ET.fromstring(svg).findall("{*}text")]
    assert texts == ["quest", "4k", "8k", "0 %", "90 %", "a<b", "4k", "8k"]


def test_nothing_is_no_heat_map() -> None:
    for nothing in (({}, [0.0], [1]), ({"a": {}}, [], [1]), ({"a": {}}, [0.0], [])):
        with pytest.raises(ValueError, match="needs panels"):
            heat(*nothing)  # type: ignore[arg-type]
