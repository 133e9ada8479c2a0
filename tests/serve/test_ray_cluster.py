"""Several replicas on a local Ray cluster: one application, which the tests use and change in their order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import until

import bytemodel
from examples.ray_serve import NAME, application
from kvthaw.serve.build import build
from kvthaw.serve.protocol import listen

ray = pytest.importorskip("ray", reason="needs pip install ray[serve]")
serve = pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
SEQS, WAITING = 2, 6
SETTINGS: dict[str, Any] = {"max_seqs": SEQS, "max_waiting": WAITING}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.5",
}
DOCUMENT = "Once upon a time a king had three sons. " * 16
JSON = {"Content-Type": "application/json"}
LONG = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """Of an application that has one replica at first, and two at most."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
        model = bytemodel.save(folder / "model")
        make = partial(build, str(model), "quest", kv_dir=folder / "kv", name="tiny", device="cpu", budget=64, **SETTINGS)
        ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
        try:
            serve.start(http_options={"port": port})
            scaled = application(make, **SETTINGS, replicas=(1, 2), num_gpus=0, num_cpus=0.5, grace=20, upscale_delay=1)
            serve.run(scaled, name=NAME)
            yield f"http://127.0.0.1:{port}"
            serve.shutdown()
        finally:
            ray.shutdown()


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=64)) as client:
        yield client


def complete(http: httpx2.Client, prompt: str | list[int] = "Hi", session: str | None = None, **more: Any) -> httpx2.Response:
    headers = {} if session is None else {"x-session-id": session}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "seed": 1} | more
    return http.post("/v1/completions", json=body, headers=headers)


def replica(response: httpx2.Response) -> str:
    return response.headers["x-replica-id"]


def running() -> int:
    states = serve.status().applications[NAME].deployments["Replica"].replica_states
    return states.get("RUNNING", 0)


def of_each(http: httpx2.Client) -> dict[str, str]:
    """A session of each of the two replicas."""
    found = {replica(complete(http, session=f"{i}")): f"{i}" for i in range(16)}
    assert len(found) == 2
    return found


def test_a_queue_is_bounded_and_starts_a_second_replica(http: httpx2.Client) -> None:
    assert running() == 1

    def ask(number: int) -> httpx2.Response:
        return complete(http, f"{number} {'x' * 64}", **LONG | {"max_tokens": 400})

    with ThreadPoolExecutor(40) as threads:
        answers = list(threads.map(ask, range(40)))
    codes = Counter(answer.status_code for answer in answers)
    print("burst of 40:", codes)
    assert set(codes) == {200, 429}
    assert codes[200] >= SEQS + WAITING
    assert all("data: [DONE]" in answer.text for answer in answers if answer.status_code == 200)
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    until(lambda: running() == 2, 90)


def test_sessions_and_prompts_stay_with_their_replica(http: httpx2.Client) -> None:
    said: dict[str, list[str]] = {}
    for turn in range(5):
        for number in range(16):
            said.setdefault(f"session {number}", []).append(replica(complete(http, f"{turn}", session=f"{number}")))
            said.setdefault(f"prompt {number}", []).append(replica(complete(http, [number] * 600 + [turn], max_tokens=1)))
    share = sum(max(Counter(each).values()) for each in said.values()) / sum(len(each) for each in said.values())
    spread = Counter(each[0] for each in said.values())
    print(f"sticky share {share:.3f} of {sum(len(each) for each in said.values())} requests; of each replica {spread}")
    assert share >= 0.95
    assert len(spread) == 2
    assert min(spread.values()) > 4


def test_what_one_replica_knows_is_answered_for_all(http: httpx2.Client) -> None:
    sessions = of_each(http)
    for number, session in enumerate(sessions.values()):
        card = http.post("/v1/contexts", json={"name": f"mine-{number}", "text": "Hi"}, headers={"x-session-id": session})
        assert card.status_code == 200
    assert {"mine-0", "mine-1"} <= {card["id"] for card in http.get("/v1/contexts").json()["data"]}
    assert set(re.findall(r'num_requests_running{replica="(\w+)"', http.get("/metrics").text)) == set(sessions)
    recorded = complete(http, recall="selected")
    assert http.get(f"/v1/recalls/{recorded.json()['id']}").status_code == 200
    assert http.get("/v1/recalls/none").status_code == 404
    assert http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert http.post("/v1/completions", content=b"x" * (17 << 20), headers=JSON).status_code == 413


def test_a_client_that_leaves_frees_its_place(http: httpx2.Client) -> None:
    def busy() -> float:
        return sum(float(each) for each in re.findall(r"num_requests_running{[^}]*} ([\d.]+)", http.get("/metrics").text))

    with http.stream("POST", "/v1/completions", json={"prompt": "Hi"} | LONG) as stream:
        lines = stream.iter_lines()  # its end closes the stream
        next(lines)
        until(lambda: busy() == 1)
    until(lambda: busy() == 0)


def test_a_replica_that_dies_takes_only_its_own_requests(http: httpx2.Client) -> None:
    """And its documents are answered by another."""
    sessions = of_each(http)
    kept = http.post("/v1/contexts", json={"name": "sons", "text": DOCUMENT})
    owner = replica(kept)
    assert replica(complete(http, " Who?", context="sons")) == owner
    actor = ray.get_actor(f"SERVE_REPLICA::{NAME}#Replica#{owner}", namespace="serve")
    streams: dict[str, str] = {}
    others: list[int] = []
    ended = threading.Event()

    def read(name: str) -> None:
        streams[name] = complete(http, session=sessions[name], **LONG).text

    def ask(number: int) -> None:
        while not ended.is_set():
            others.append(complete(http, f"{number} {len(others)}").status_code)

    threads = [threading.Thread(target=read, args=(name,)) for name in sessions]
    threads += [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.7)
    ray.kill(actor)
    began = time.monotonic()
    try:
        until(lambda: replica(complete(http, " Who?", context="sons")) != owner, 60)
        seconds, taken = time.monotonic() - began, complete(http, " Who?", context="sons")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    print(f"{seconds:.1f} s until the document was answered by another; others: {Counter(others)}")
    assert taken.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > len(DOCUMENT) - 128
    (other,) = set(sessions) - {owner}
    assert streams[other].rstrip().endswith("data: [DONE]")
    assert '"code": "replica_unavailable"' in streams[owner].rstrip().splitlines()[-1]
    assert set(others) <= {200, 503}
    assert others.count(503) <= 3, "those that ran there"
    until(lambda: running() == 2, 90)


def test_replicas_that_are_taken_away_finish_what_they_began(http: httpx2.Client) -> None:
    with http.stream("POST", "/v1/completions", json={"prompt": "Hi"} | LONG | {"max_tokens": 300}) as stream:
        lines = stream.iter_lines()
        seen = [next(lines)]
        serve.delete(NAME, _blocking=False)
        seen += lines
    assert "data: [DONE]" in seen
    until(lambda: NAME not in serve.status().applications, 60)


def test_the_command_ends_what_runs_and_exits(url: str, folder: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    settings = [f"model={folder / 'model'}", "device=cpu", "budget=64", "grace=0.5"]
    command = [sys.executable, str(EXAMPLE), *settings]
    environment = os.environ | QUIET | {"RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("serving "):
                    break
            else:
                pytest.fail("".join(said))
            threading.Thread(target=process.stdout.read, daemon=True).start()
            seen: list[str] = []
            with httpx2.stream("POST", f"{url}/v1/completions", json={"prompt": "Hi"} | LONG, timeout=60) as stream:
                for line in stream.iter_lines():
                    if not seen:
                        process.send_signal(signal.SIGTERM)
                    seen.append(line)
            assert '"finish_reason":"abort"' in seen[-4]
            assert process.wait(60) == 0
            assert NAME not in serve.status().applications
        finally:
            process.kill()
