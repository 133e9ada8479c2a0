"""Finding answers, and whether they are right."""

from __future__ import annotations

from decimal import Decimal

import pytest

from lab.evaluate.published.answers import boxed, choice, last_number, number, same_math


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("18.", 18),
        ("$1,234", 1234),
        ("-3.50", "-3.5"),
        ("070", 70),
        ("12%", 12),
        ("", None),
        ("x", None),
        ("NaN", None),
    ],
)
def test_a_number_is_its_value(text: str, value: int | str | None) -> None:
    assert number(text) == (None if value is None else Decimal(value))


def test_the_last_number_counts() -> None:
    assert last_number("She sold 3 for $2 each, so $1,006.50.") == Decimal("1006.5")
    assert last_number("3 - 5 is -2") == -2
    assert last_number("none") is None


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{4} and \boxed{never closed", "4"),
        (r"\fbox{a}", "a"),
        ("nothing", None),
    ],
)
def test_the_last_closed_box_counts(text: str, inside: str | None) -> None:
    assert boxed(text) == inside


def test_the_first_pattern_that_matches_gives_the_letter() -> None:
    assert choice("it is (B), answer: c", (r"(?i)answer: ([A-D])", r"\(([A-D])\)")) == "C"
    assert choice("it is (B)", (r"(?i)answer: ([A-D])", r"\(([A-D])\)")) == "B"
    assert choice("it is E", (r"is ([A-D])",)) is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        (r"\frac{14}{3}", r"\dfrac{14}{3}", True),
        ("0.5", r"\frac12", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", True),
        (r"(0,9) \cup (9,36)", r"(0,9)\cup(9,36)", True),
        (r"\frac{14}{3}", r"\frac{13}{3}", False),
        (r"(0,9) \cup (9,36)", "(0,36)", False),
        ("2", "", False),
    ],
)
def test_latex_is_compared_as_mathematics(gold: str, answer: str, same: bool) -> None:
    pytest.importorskip("math_verify")
    assert same_math(gold, answer) is same
