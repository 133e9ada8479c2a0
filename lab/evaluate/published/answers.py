"""Find the answer in a model's output, and decide whether it is right."""

from __future__ import annotations

import re
import threading
from decimal import Decimal, InvalidOperation

from kvthaw.errors import ConfigError

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def number(text: str) -> Decimal | None:
    """Return the value of a written number: commas, a dollar or percent sign and a final point do not count. None if it is none."""
    plain = text.strip().rstrip(".").replace(",", "").replace("$", "").replace("%", "").strip()
    try:
        value = Decimal(plain)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text."""
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} (or \fbox) of a text, with matched braces; None if no closed one exists."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]):
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0) if text[i - 1] != "\\" else 0
            if depth == 0:
                return text[start:i].strip()
    return None


def choice(text: str, patterns: tuple[str, ...]) -> str | None:
    """Return the letter that the first pattern with a match captures."""
    for pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return found.group(1).upper()
    return None


def same_math(gold: str, answer: str) -> bool:
    """Return whether two LaTeX answers are mathematically equal, by math-verify. Raises ConfigError if math-verify is not
    installed."""
    try:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
    except ImportError:
        raise ConfigError("answers in LaTeX are compared by math-verify: pip install kvthaw[lab]") from None
    how = [LatexExtractionConfig(), ExprExtractionConfig()]
    limit = 5 if threading.current_thread() is threading.main_thread() else None  # its time limits are signals
    truth, given = (parse(f"${text}$", how, parsing_timeout=limit, raise_on_error=False) for text in (gold, answer))
    return bool(truth) and bool(given) and bool(verify(truth, given, timeout_seconds=limit, raise_on_error=False))
