"""A trace's requests are read, come at their times and get their tokens."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvthaw import Batch, Scheduler
from lab.arrivals import Arrival, arrivals
from lab.over_http import over_http
from lab.trace import replay
from zoo import build_exact

ASKED = [(0.0, 30, 4), (0.02, 9000, 5), (0.5, 12, 3)]


@pytest.mark.parametrize("form", ["azure.csv", "mooncake.jsonl.gz"])
def test_traces_are_read_and_what_is_too_long_left_out(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    if form.endswith("csv"):
        rows = [f"2023-11-16 18:15:46.{int(at * 1000):03}0000,{prompt},{new}" for at, prompt, new in ASKED]
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    else:
        rows = [json.dumps({"timestamp": 1000 * at, "input_length": prompt, "output_length": new}) for at, prompt, new in ASKED]
        path.write_bytes(gzip.compress("\n".join(rows).encode()))
    first, second = arrivals(path, 200, 100, speed=2.0)
    assert first == Arrival(0.0, 30, 4)
    assert (second.prompt, second.new, second.at) == (12, 3, pytest.approx(0.25, abs=1e-4))


def test_a_replay_serves_every_request() -> None:
    coming = arrivals(None, 5, 500, speed=0.0)
    scheduler = Scheduler(Batch(build_exact("llama", num_hidden_layers=2), "quest", max_seqs=2, capacity=500, budget=48))
    found = replay(scheduler, [Arrival(0.01 * i, one.prompt % 90 + 1, 4) for i, one in enumerate(coming)])
    assert (found["requests"], found["output_tokens"]) == (5, 20)
    assert 0 < found["itl_p50_s"] <= found["itl_p99_s"] <= found["seconds"]
    assert found["ttft_p50_s"] <= found["ttft_p95_s"]


def test_a_replay_over_http_serves_every_request() -> None:
    batch = Batch(build_exact("llama", num_hidden_layers=2), "quest", max_seqs=2, capacity=200, budget=48)
    with ThreadPoolExecutor(1) as clients:
        found = over_http(batch, [Arrival(0.01 * i, 20 + i, 4) for i in range(5)], clients)
    assert (found["requests"], found["output_tokens"]) == (5, 20)
    assert 0 < found["ttft_p50_s"] <= found["ttft_p95_s"] <= found["seconds"]
