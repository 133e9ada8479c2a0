"""Requests that come at times of a trace, their random prompts, and the latencies of the tokens that they got.

vLLM's process imports this module too, so it imports nothing of kvthaw.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it comes, in seconds after the first, and its tokens."""

    at: float
    prompt: int
    new: int


@dataclass
class Served:
    """When a request came and when its tokens did, in seconds."""

    came: float
    tokens: list[float] = field(default_factory=list)


def read(path: Path) -> Iterator[Arrival]:
    """Yield the requests of a trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        if ".csv" in path.suffixes:
            for row in csv.DictReader(lines):
                at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
                yield Arrival(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        else:
            for row in map(json.loads, lines):
                yield Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"])


def drawn(rng: random.Random) -> Iterator[Arrival]:
    """Draw requests: three a second, prompts of about 900 tokens and answers of about 200 in the median, with long tails."""
    at = 0.0
    while True:
        yield Arrival(at, max(1, int(rng.lognormvariate(6.8, 1.0))), max(1, int(rng.lognormvariate(5.3, 0.7))))
        at += rng.expovariate(3.0)


def arrivals(path: Path | None, count: int, capacity: int, speed: float) -> list[Arrival]:
    """Return the first `count` requests that fit, the first at 0 s. speed: how many times as fast they come; 0: all at once."""
    source = drawn(random.Random(0)) if path is None else read(path)
    fit = (one for one in source if one.prompt >= 1 and one.new >= 1 and one.prompt + one.new <= capacity)
    taken = list(islice(fit, count))
    return [Arrival((one.at - taken[0].at) / speed if speed else 0.0, one.prompt, one.new) for one in taken]


def at_rate(coming: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the requests with their times stretched until `rate` of them come a second; 0: all at once."""
    span = max(one.at for one in coming)
    factor = len(coming) / rate / span if rate and span else 0.0
    return [Arrival(one.at * factor, one.prompt, one.new) for one in coming]


def random_prompt(vocabulary: int, tokens: int, seed: int) -> torch.Tensor:
    """Draw a prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (tokens,), generator=generator)


def told(coming: Sequence[Arrival], served: Sequence[Served], whole: float) -> dict[str, Any]:
    """Return the rates and latencies of requests that were served within `whole` seconds."""
    first = [one.tokens[0] - one.came for one in served]
    gaps = [b - a for one in served for a, b in zip(one.tokens, one.tokens[1:], strict=False)]
    tokens = sum(len(one.tokens) for one in served)
    return {
        "requests": len(coming),
        "prompt_tokens": sum(one.prompt for one in coming),
        "output_tokens": tokens,
        "seconds": whole,
        "output_tokens_per_s": tokens / whole,
        **{f"ttft_p{n}_s": rank(first, n) for n in (50, 95, 99)},
        **{f"itl_p{n}_s": rank(gaps, n) for n in (50, 95, 99)},
    }


def rank(times: Sequence[float], percent: int) -> float:
    """Return the time that `percent` percent of the times do not exceed, 0 where there are none."""
    return sorted(times)[min(len(times) - 1, len(times) * percent // 100)] if times else 0.0
