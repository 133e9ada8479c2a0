"""One table of what both sides came to, a row a measure, and what their outputs have in common."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvthaw.evaluate.results import Record
from kvthaw.formatting import short
from lab.beside.cases import LONG, VLLM, Case

Found = Sequence[tuple[Case, Record]]
NEAR = 0.1
"""By how much log-probabilities of both sides' bfloat16 models may differ."""


def table(found: Found, failed: Mapping[Case, str]) -> str:
    """Return the table in Markdown, medians of turns, and the cases that failed below it."""
    methods = list(dict.fromkeys(case.method for case, _ in found)) + [case.method for case in failed]
    columns = [VLLM, *(method for method in dict.fromkeys(methods) if method != VLLM)]
    version = next((record["about"]["vllm"] for case, record in found if case.side == VLLM and "about" in record.measures), "")
    heads = [f"vLLM {version}".strip(), *(f"kvthaw {method}" for method in columns[1:])]
    rows = [["", *heads, "kvthaw's best of vLLM's"], ["---"] * (len(heads) + 2)]
    asked = dict.fromkeys(case.question for case in [*(case for case, _ in found), *failed] if case.part != "check")
    for question in asked:
        own = [(case, record) for case, record in found if case.question == question]
        case = next(case for case in [*(case for case, _ in own), *failed] if case.question == question)
        lost = {other.method for other in failed if other.question == question}
        for name, words, factor, unit in measures(case.part):
            values = {
                method: [factor * record[name] for one, record in own if one.method == method and name in record.measures]
                for method in columns
            }
            middle = {method: statistics.median(some) for method, some in values.items() if some}
            if not middle and not lost:
                continue
            cells = [f"{middle[m]:,.{unit}f}" if m in middle else "failed" if m in lost else "" for m in columns]
            if name == "output_tokens_per_s" and case.part == "batch":
                seqs = {one.method: record["seqs"] for one, record in own}
                cells = [
                    f"{cell} ({seqs[m]} sequences)" if m in middle else cell for m, cell in zip(columns, cells, strict=True)
                ]
            rows.append([f"{subject(case)}: {words}", *cells, share(middle, more=name == "output_tokens_per_s")])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *(f"failed: {case}: {why}" for case, why in failed.items())] if failed else []
    return "\n".join(lines)


def measures(part: str) -> list[tuple[str, str, float, int]]:
    """Return what rows a part has: the measure's name, its words, its factor and its decimals."""
    first = ("ttft_s", "first token, s", 1.0, 2)
    steps = [("tpot_s", "ms a token", 1e3, 2), ("itl_p95_s", "ms a token, p95", 1e3, 2)]
    rate = ("output_tokens_per_s", "output tokens/s", 1.0, 0)
    if part in LONG:
        return {"first": [first], "decode": steps, "batch": [rate]}[part]
    latencies = [(f"{name}_p{n}_s", name, n) for name in ("ttft", "itl") for n in (50, 95, 99)]
    return [rate, *((key, f"{name.upper()} p{n}, ms", 1e3, 0 if name == "ttft" else 1) for key, name, n in latencies)]


def subject(case: Case) -> str:
    """Return what a row is about."""
    if case.part == "short":
        return f"{case.seqs} requests, {short(case.length)} in, {case.new} out"
    if case.part == "trace":
        return f"{case.trace}, {f'{case.rate:g} requests/s' if case.rate else 'all at once'}"
    return short(case.length) + (", batch" if case.part == "batch" else "")


def share(values: Mapping[str, float], *, more: bool) -> str:
    """Return the best of kvthaw's values, more or less being better, as a share of vLLM's."""
    ours = [value for method, value in values.items() if method != VLLM]
    if not ours or not values.get(VLLM):
        return ""
    return f"{(max if more else min)(ours) / values[VLLM]:.2f}"


def difference(found: Found) -> tuple[bool, str] | None:
    """Compare the answers of both sides. Returns whether they are near, and how near; None where a side has none."""
    answers: dict[str, list[dict[str, Any]]] = {case.side: record["answers"] for case, record in found}
    if len(answers) < 2:
        return None
    ours, theirs = answers.values()
    pairs = list(zip(ours, theirs, strict=True))
    first = sum(one["tokens"][0] == other["tokens"][0] for one, other in pairs)
    same = sum(a == b for one, other in pairs for a, b in zip(one["tokens"], other["tokens"], strict=True))
    tops = [(dict(map(tuple, one["top"])), dict(map(tuple, other["top"]))) for one, other in pairs]
    common = [(one, other, one.keys() & other.keys()) for one, other in tops]
    off = max((abs(one[token] - other[token]) for one, other, tokens in common for token in tokens), default=float("inf"))
    shared = min((len(tokens) / len(one) for one, _, tokens in common), default=0.0)
    words = (
        f"{first} of {len(pairs)} first tokens are equal, {same} of {sum(len(one['tokens']) for one in ours)} of all; both sides "
        f"share {shared:.0%} of the likeliest, whose log-probabilities differ by at most {off:.4f} (allowed: {NEAR})"
    )
    return off <= NEAR and shared >= 0.5, words
