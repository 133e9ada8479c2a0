"""Clients that leave, queues that are full, steps that fail, servers that end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import pytest
from servers import TEMPLATE, Served, serving, until
from transformers import PreTrainedModel

import bytemodel
from forked import forked
from kvthaw.engine.sampling import Sampling
from kvthaw.engine.token_bytes import TokenBytes
from kvthaw.serve import app, worker
from kvthaw.serve.protocol import listen
from kvthaw.serve.server import run

LONG: dict[str, Any] = {"prompt": "Hi there", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def running(served: Served) -> int:
    return len(served.service.batch.requests)


def long_stream(served: Served) -> Any:
    extra = {"ignore_eos": True}
    return served.openai.completions.create(model="tiny", prompt="Hi there", max_tokens=2000, stream=True, extra_body=extra)


def test_a_client_that_leaves_a_stream_frees_its_place(served: Served) -> None:
    stream = long_stream(served)
    next(iter(stream))
    assert running(served) == 1
    stream.close()
    until(lambda: running(served) == 0 and served.service.worker.open == 0, 3)


def test_a_client_that_waits_for_all_and_leaves_frees_its_places(served: Served) -> None:
    with pytest.raises(httpx2.TimeoutException):
        served.http.post("/v1/completions", json=LONG | {"n": 6}, timeout=0.5)
    until(lambda: not served.service.worker.scheduler.busy and served.service.worker.open == 0, 3)


def test_a_client_with_many_requests_leaves_a_place_to_another(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, max_seqs=2, api_keys=("many", "few")) as served:
        streams = [long_stream(served) for _ in range(6)]
        until(lambda: running(served) == 2)
        assert {one.spec.client for one in served.service.batch.requests} == {"key 0"}
        body = LONG | {"max_tokens": 3}
        answer = served.http.post("/v1/completions", json=body, headers={"Authorization": "Bearer few"})
        assert answer.status_code == 200
        assert served.service.worker.open == 6, "none of the others has ended"
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("keys", [(), ("only",)])
def test_clients_are_told_apart_by_address_where_they_share_a_key(loaded: tuple[Any, Any], keys: tuple[str, ...]) -> None:
    with serving(*loaded, api_keys=keys) as served, long_stream(served):
        until(lambda: running(served) == 1)
        assert [one.spec.client for one in served.service.batch.requests] == ["127.0.0.1"]


def test_a_full_queue_is_told_at_once(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, max_seqs=1, max_waiting=1) as served:
        first, second = long_stream(served), long_stream(served)
        next(iter(first))
        began = time.perf_counter()
        with pytest.raises(openai.RateLimitError) as raised:
            served.openai.completions.create(model="tiny", prompt="x" * 1000)
        assert time.perf_counter() - began < 20
        assert int(raised.value.response.headers["retry-after"]) >= 1
        first.close()
        next(iter(second))
        second.close()


def test_a_request_of_many_outputs_lets_others_by(loaded: tuple[Any, Any]) -> None:
    """It has all places while nobody waits; its outputs are those that it gets alone."""
    many = {"prompt": "abc", "max_tokens": 40, "ignore_eos": True, "n": 8, "temperature": 1, "seed": 4}
    with serving(*loaded, max_seqs=4, max_waiting=4) as served:
        alone = served.post("/v1/completions", **many).json()["choices"]
        with ThreadPoolExecutor() as pool:
            first = pool.submit(served.post, "/v1/completions", **many)
            until(lambda: running(served) == 4)
            assert served.post("/v1/completions", **many).status_code == 429
            for _ in range(2):
                assert served.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200
            assert not first.done()
            assert first.result().json()["choices"] == alone


def test_a_step_that_fails_once_is_taken_again(served: Served) -> None:
    wanted = served.post("/v1/completions", **LONG | {"max_tokens": 20}).json()["choices"][0]["text"]
    with failing(served, after=10, times=1):
        assert served.post("/v1/completions", **LONG | {"max_tokens": 20}).json()["choices"][0]["text"] == wanted


def test_a_step_that_fails_again_ends_its_requests_alone(served: Served) -> None:
    wanted = served.post("/v1/completions", **LONG | {"max_tokens": 20}).json()["choices"][0]["text"]
    with failing(served, after=10, times=2):
        said = served.post("/v1/completions", **LONG)
    assert said.status_code == 500
    assert said.json()["error"]["type"] == "server_error"
    assert "broken" not in said.text
    assert running(served) == 0
    assert served.post("/v1/completions", **LONG | {"max_tokens": 20}).json()["choices"][0]["text"] == wanted


def test_a_prompt_that_fails_ends_its_request_alone(served: Served) -> None:
    with failing(served, after=0, times=1):
        assert served.post("/v1/completions", **LONG).status_code == 500
    with failing(served, after=0, times=1):
        assert '{"error":{' in served.post("/v1/completions", **LONG, stream=True).text
    assert served.post("/v1/completions", prompt="Hi").status_code == 200


def test_a_worker_that_cannot_go_on_ends_the_server(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(*loaded) as served:
        monkeypatch.setattr(served.service.worker.scheduler, "cancel", lambda _: 1 / 0)
        with failing(served, after=10, times=2):
            assert served.post("/v1/completions", **LONG).status_code == 500
        until(lambda: served.server.should_exit)
        assert isinstance(served.service.worker.failure, ZeroDivisionError)
        assert not served.service.ready


def test_a_silent_stream_gets_comments(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "KEEP_ALIVE", 0.01)
    text = served.post("/v1/completions", prompt="x" * 1500, max_tokens=2, stream=True).text
    assert text.startswith(": ")
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"prompt": [65] * 150, "echo": True, "logprobs": 2, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [65] * 150, "echo": True, "logprobs": 2, "max_tokens": 1, "stream": True}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 150, "include": ["message.output_text.logprobs"]}),
    ],
)
def test_a_long_answer_is_written_while_others_are_answered(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, more: dict[str, Any]
) -> None:
    text, holds_up = TokenBytes.text, list[bool]()

    def noting(self: TokenBytes, token: int) -> str:
        holds_up.append(asyncio._get_running_loop() is not None)
        return text(self, token)

    monkeypatch.setattr(TokenBytes, "text", noting)
    assert served.post(path, ignore_eos=True, temperature=0, **more).status_code == 200
    assert len(holds_up) >= 150
    assert sum(holds_up) < 20, "the event loop writes a token or two"


def test_connections_send_without_delay() -> None:
    """Else the end of a small answer waits for the client's acknowledgement of its beginning, 40 ms later."""
    with (
        listen("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as connection,
    ):
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


class failing:  # noqa: N801
    """The model fails in its second layer, so many forwards from now, so many times."""

    def __init__(self, served: Served, *, after: int, times: int) -> None:
        self._layer, self._after, self._times = served.model.model.layers[1].mlp, after, times

    def __enter__(self) -> None:
        self._hook = self._layer.register_forward_pre_hook(self._fail)

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _fail(self, *_: object) -> None:
        self._after -= 1
        if self._after < 0 < self._times:
            self._times -= 1
            raise RuntimeError("broken")


def test_a_server_that_ends_lets_requests_finish(loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvthaw.serve.server")
    with serving(*loaded, grace=20) as served:
        stream = iter(long_stream(served))
        next(stream)
        served.server.handle_exit(signal.SIGTERM, None)
        until(lambda: served.http.get("/ready").status_code == 503)
        until(lambda: "waiting up to 20 s" in caplog.text)
        assert served.http.get("/health").status_code == 200
        assert served.post("/v1/completions", prompt="Hi").status_code == 503
        served.server.handle_exit(signal.SIGTERM, None)  # again: at once
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"
        until(lambda: not served.service.worker.scheduler.busy)


def test_metrics_count_what_was_served(served: Served) -> None:
    def read(name: str) -> float:
        lines = served.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(f"kvthaw:{name}")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    counted = ["prompt_tokens_total", "generation_tokens_total", 'request_success_total{finished_reason="length"']
    counted += [f"{name}_seconds_count" for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time")]
    counted += [f"{name}_seconds_count" for name in ("inter_token_latency", "request_time_per_output_token")]
    before = [read(name) for name in counted]
    served.post("/v1/completions", **LONG | {"max_tokens": 20})
    until(lambda: read("e2e_request_latency_seconds_count") > before[4])
    assert [read(name) - was for name, was in zip(counted, before, strict=True)] == [8, 20, 1, 1, 1, 1, 19, 1]
    assert read("num_requests_running") == read("num_requests_waiting") == 0
    assert read("num_preemptions_total") == read("num_resumed_total") == read("num_recomputed_total") == 0
    assert read("attended_tokens") > 0
    assert read("kv_bytes") > 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    bytemodel.save(tmp_path)
    options = ("--port", "0", "--grace", "0", "--budget", "64", "--device", "cpu")
    with forked("serve", str(tmp_path), *options) as command:
        url = command.stderr.readline().split()[-1]
        seen: list[str] = []

        def read() -> None:
            with httpx2.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as said:
                seen.extend(said.iter_lines())

        until(lambda: answers(f"{url}/ready"))
        reader = threading.Thread(target=read)
        reader.start()
        until(
            lambda: (
                "running{model_name" in (text := httpx2.get(f"{url}/metrics").text) and "running{" in text and " 1.0" in text
            )
        )
        command.send(signal.SIGTERM)
        assert command.wait() == 0
        reader.join(10)
        assert '"finish_reason":"abort"' in seen[-4]
        assert "data: [DONE]" in seen


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_the_command_ends_while_it_reads_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as the first process of a container, which has no default action for SIGTERM."""
    bytemodel.save(tmp_path / "model")
    (tmp_path / "doc.txt").write_text("The grass is green.")

    def read(*_: object) -> bool:
        print("reading", file=sys.stderr, flush=True)
        time.sleep(60)
        return True

    monkeypatch.setattr("kvthaw.serve.build._read", read)
    options = ("--port", "0", "--device", "cpu", "--context", str(tmp_path / "doc.txt"))
    with forked("serve", str(tmp_path / "model"), *options) as command:
        until(lambda: "reading" in command.stderr.readline())
        command.send(signal.SIGTERM)
        assert command.wait() == 0


def test_freed_memory_is_released_once_after_work(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[threading.Thread]()  # by the threads of all servers of this process
    monkeypatch.setattr(worker, "release_freed_memory", lambda: released.append(threading.current_thread()))
    monkeypatch.setattr(worker, "_IDLE", 0.1)
    with serving(*loaded) as served:
        served.post("/v1/completions", prompt="Hi", max_tokens=3)
        own = served.service.worker._thread
        until(lambda: released.count(own) == 1)
        time.sleep(0.4)
        assert released.count(own) == 1
        served.post("/v1/completions", prompt="Hi", max_tokens=3)
        until(lambda: released.count(own) == 2)


def answers(url: str) -> bool:
    try:
        return httpx2.get(url).status_code == 200
    except httpx2.TransportError:
        return False


def stand_in(run: Any, signalled: int = signal.SIGTERM, ends: float = float("inf")) -> Any:
    """A server whose worker does not fail."""
    return SimpleNamespace(worker=SimpleNamespace(failure=None), run=run, signal=signalled, ends=ends)


def test_what_was_frozen_is_collected_at_the_end() -> None:
    """Else extension modules print at the end of the process what they take for leaks (triton's, which xgrammar loads)."""
    frozen: list[int] = []
    ran: Any = SimpleNamespace(
        worker=SimpleNamespace(failure=None),
        run=lambda _: frozen.append(gc.get_freeze_count()),
        signal=signal.SIGTERM,
        ends=float("inf"),
    )
    with socket.socket() as listener:
        run(ran, listener)
    assert frozen[0] > gc.get_freeze_count() == 0


def test_threads_let_a_step_go_on_soon_while_a_server_runs() -> None:
    seen, before = list[float](), sys.getswitchinterval()
    ran: Any = SimpleNamespace(
        worker=SimpleNamespace(failure=None),
        run=lambda _: seen.append(sys.getswitchinterval()),
        signal=signal.SIGTERM,
        ends=float("inf"),
    )
    with socket.socket() as listener:
        run(ran, listener)
    assert seen[0] < before / 5
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_process_ends_though_a_thread_of_it_does_not(monkeypatch: pytest.MonkeyPatch, sent: int, code: int) -> None:
    codes, ended = list[int](), threading.Event()

    def end(given: int) -> None:
        codes.append(given)
        ended.set()

    ran: Any = SimpleNamespace(
        worker=SimpleNamespace(failure=None), run=lambda _: ended.wait(10), signal=sent, ends=time.monotonic()
    )
    monkeypatch.setattr("kvthaw.serve.server.LATE", 0.0)
    monkeypatch.setattr("kvthaw.serve.server.os", SimpleNamespace(_exit=end))
    monkeypatch.setattr("kvthaw.serve.server.logging", SimpleNamespace(shutdown=lambda: None))
    with socket.socket() as listener, suppress(KeyboardInterrupt):
        run(ran, listener)
    assert codes[0] == code


def test_what_requests_leave_out_is_the_models_own(loaded: tuple[PreTrainedModel, Any]) -> None:
    """Of all kinds of requests; what they say stands, null says nothing."""
    asked = list[Sampling]()
    with serving(
        *loaded, chat_template=TEMPLATE, defaults={"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.5}
    ) as server:
        plain = server.service.submit

        def submit(body: Any, prompts: Any, sampling: Sampling, *rest: Any) -> Any:
            asked.append(sampling)
            return plain(body, prompts, sampling, *rest)

        server.service.submit = submit  # type: ignore[method-assign]
        message = [{"role": "user", "content": "Hi"}]
        for given in ({}, {"temperature": None}, {"temperature": 1, "top_k": 0, "repetition_penalty": 1.0}):
            server.post("/v1/completions", prompt="a", max_tokens=1, **given)
            server.post("/v1/chat/completions", messages=message, max_tokens=1, **given)
            said = server.post("/v1/responses", input="a", max_output_tokens=1, **given).json()
            assert said["temperature"] == asked[-1].temperature
    assert [(one.temperature, one.top_k, one.repetition_penalty) for one in asked] == [(0.5, 7, 1.5)] * 6 + [(1, None, 1)] * 3
