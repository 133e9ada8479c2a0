"""What a run over a benchmark writes: one line an answer, and their summary with pass@k and avg@k."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvthaw.errors import ConfigError
from kvthaw.evaluate.metrics import mean, wilson
from kvthaw.evaluate.results import AsLine, Kept, OfVariant


@dataclass(frozen=True, slots=True)
class Asked(OfVariant):
    """All that an answer depends on. item, prompt: the question's id and a hash of the prompt's tokens. sample: which of the
    answers drawn for it. length: where prompts were cut, in tokens. judge: who judged, "" where nobody does."""

    benchmark: str
    item: str
    prompt: str
    sample: int
    length: int | None
    question: str
    chat: bool
    max_new_tokens: int
    stops: tuple[str, ...]
    temperature: float
    top_p: float
    judge: str
    seed: int


@dataclass(frozen=True, slots=True)
class Answered(AsLine):
    """One answer. scores: the benchmark's, "score" among them. first: what was written before a second prompt was asked, if
    one was. attended: tokens read per KV head and step, the mean over the answers drawn together."""

    setting: Asked
    tokens: int
    output: str
    first: str | None
    new_tokens: int
    ended: bool
    scores: dict[str, float]
    attended_mean: float | None
    attended_max: int | None
    hit_rate: float | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    versions: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def from_json(text: str) -> Answered:
        """The reverse. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        data["setting"]["stops"] = tuple(data["setting"]["stops"])
        data["setting"] = Asked(**data["setting"])
        return Answered(**data)


class Answers(Kept[Answered]):
    """The lines of a run."""

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path, Answered.from_json)


def pass_at_k(right: int, drawn: int, k: int) -> float:
    """The chance that of k answers, out of `drawn` of which `right` are right, one is right: the unbiased estimate of Chen et al.,
    2021, section 2.1. Raises ConfigError unless 1 <= k <= drawn and 0 <= right <= drawn."""
    if not 1 <= k <= drawn:
        raise ConfigError(f"k is {k}; it must lie between 1 and the {drawn} answers drawn")
    if not 0 <= right <= drawn:
        raise ConfigError(f"right is {right}; it must lie between 0 and the {drawn} answers drawn")
    return 1 - math.comb(drawn - right, k) / math.comb(drawn, k)


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the questions of one variant. score: avg@k, of every question's mean over its answers; score_95: Wilson's interval
    around it with n questions, None for metrics that are no share of right answers. pass_at: pass@k for k = 1, 2, 4, ... and all,
    by answers with a score of 1. scores: what else the benchmark counts. ended: the share of answers not cut at the limit."""

    benchmark: str
    method: str
    budget: int | float | None
    retrieved: int | None
    dense_layers: int
    n: int
    samples: int
    score: float
    score_95: tuple[float, float] | None
    full_score: float | None
    pass_at: dict[int, float]
    scores: dict[str, float]
    ended: float
    tokens: float
    new_tokens: float
    attended_mean: float | None
    attended_max: int | None
    hit_rate: float | None
    kv_device_bytes: int
    kv_dense_bytes: int
    kv_host_bytes: int
    question: str
    temperature: float
    top_p: float
    max_new_tokens: int
    judge: str
    model: str
    weights: str
    dtype: str
    device: str
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return asdict(self)


_SAME = (
    *("benchmark", "method", "budget", "retrieved", "dense_layers", "question", "temperature", "top_p", "max_new_tokens"),
    *("judge", "model", "weights", "dtype", "device"),
)


def summarize(lines: Sequence[Answered], full: Iterable[Answered] = ()) -> Summary:
    """One variant's lines, as many for each question, and full attention's on the same questions."""
    asked = _by_item(lines)
    drawn = min(len(found) for found in asked.values())
    right = {item: sum(line.scores["score"] == 1 for line in found) for item, found in asked.items()}
    share = all(line.scores["score"] in (0, 1) for line in lines)
    score = _averaged(asked)
    ks = sorted({*(k for k in (1, 2, 4, 8, 16, 32, 64) if k < drawn), drawn})
    theirs = _by_item(full)
    names = dict.fromkeys(name for line in lines for name in line.scores if name != "score")
    most = [line.attended_max for line in lines if line.attended_max is not None]
    rest: dict[str, Any] = {name: getattr(lines[0].setting, name) for name in _SAME}
    return Summary(
        **rest,
        n=len(asked),
        samples=drawn,
        score=score,
        score_95=wilson(score, len(asked)) if share else None,
        full_score=_averaged(theirs) if theirs else None,
        pass_at={k: sum(pass_at_k(right[item], len(asked[item]), k) for item in asked) / len(asked) for k in ks}
        if share
        else {},
        scores={name: mean(line.scores.get(name) for line in lines) or 0.0 for name in names},
        ended=sum(line.ended for line in lines) / len(lines),
        tokens=sum(line.tokens for line in lines) / len(lines),
        new_tokens=sum(line.new_tokens for line in lines) / len(lines),
        attended_mean=mean(line.attended_mean for line in lines),
        attended_max=max(most, default=None),
        hit_rate=mean(line.hit_rate for line in lines),
        kv_device_bytes=max(line.kv_device_bytes for line in lines),
        kv_dense_bytes=max(line.kv_dense_bytes for line in lines),
        kv_host_bytes=max(line.kv_host_bytes for line in lines),
        versions=lines[0].versions,
    )


def _by_item(lines: Iterable[Answered]) -> dict[str, list[Answered]]:
    found: dict[str, list[Answered]] = defaultdict(list)
    for line in lines:
        found[line.setting.item].append(line)
    return dict(found)


def _averaged(asked: dict[str, list[Answered]]) -> float:
    means = [sum(line.scores["score"] for line in found) / len(found) for found in asked.values()]
    return sum(means) / len(means)
