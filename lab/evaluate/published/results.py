"""Summaries of a run over a benchmark, with pass@k and avg@k."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.results import BYTES, Record, largest, mean, means, shared
from lab.evaluate.metrics import CHAT, wilson
from lab.evaluate.probe import QUALITY


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """Return the probability that one of k answers is right, if `right` of `drawn` answers are right.

    This is the unbiased estimate of Chen et al., 2021, section 2.1. Raises ConfigError unless 1 <= k <= drawn and 0 <=
    right <= drawn.
    """
    if not 1 <= k <= drawn:
        raise ConfigError(f"k is {k}; it must lie between 1 and the {drawn} answers drawn")
    if not 0 <= right <= drawn:
        raise ConfigError(f"right is {right}; it must lie between 0 and the {drawn} answers drawn")
    return 1 - math.comb(drawn - right, k) / math.comb(drawn, k)


_SAME = (
    *("benchmark", "method", "budget", "retrieved", "dense_layers", "question", "temperature", "top_p", "max_new_tokens"),
    *("judge", "model", "weights", "dtype", "device", "versions"),
)


def summarize(records: Sequence[Record], full: Iterable[Record] = ()) -> dict[str, Any]:
    """Summarize one variant's answers, equally many per question, and full attention's to the same questions.

    score: avg@k, the mean over questions of the mean over answers. score_95: Wilson's interval around it with n questions;
    None for metrics that are no share of right answers.
    pass_at: pass@k for k = 1, 2, 4, ... and all, counting answers with a score of 1.
    scores: the benchmark's other counts.
    drift: recall_at_k in each quarter of the answers, if probed.
    ended: the share of answers that were not cut at the limit.
    """
    asked, theirs = _by_item(records), _by_item(full)
    drawn = min(len(found) for found in asked.values())
    right = {item: sum(record["scores"]["score"] == 1 for record in found) for item, found in asked.items()}
    share = all(record["scores"]["score"] in (0, 1) for record in records)
    score = _averaged(asked)
    ks = sorted({*(k for k in (1, 2, 4, 8, 16, 32, 64) if k < drawn), drawn}) if share else []
    names = dict.fromkeys(name for record in records for name in record["scores"] if name != "score")
    return {
        **shared(records, *_SAME),
        **{name: records[0].setting.get(name) for name in CHAT},
        "n": len(asked),
        "samples": drawn,
        "score": score,
        "score_95": wilson(score, len(asked)) if share else None,
        "full_score": _averaged(theirs) if theirs else None,
        "pass_at": {k: sum(pass_at_k(right[item], len(asked[item]), k) for item in asked) / len(asked) for k in ks},
        **{name: mean(record.measures.get(name) for record in records) for name in QUALITY},
        "drift": [mean(record["drift"][k] for record in records) for k in range(4)] if "drift" in records[0].measures else [],
        "scores": {name: mean(record["scores"].get(name) for record in records) or 0.0 for name in names},
        **means(records, "ended", "tokens", "new_tokens", "attended_mean", "hit_rate"),
        **largest(records, "attended_max", *BYTES),
    }


def _by_item(records: Iterable[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record["item"]].append(record)
    return dict(found)


def _averaged(asked: dict[str, list[Record]]) -> float:
    each = [sum(record["scores"]["score"] for record in found) / len(found) for found in asked.values()]
    return float(sum(each) / len(each))
