"""Several replicas: which requests belong together, and what an ingress makes of many answers; no cluster is needed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from examples.ray_serve import FIRST_BLOCK, Replica, app, merged_metrics, routing_key
from kvthaw import ConfigError

COMPLETIONS, CHAT, CONTEXTS = "/v1/completions", "/v1/chat/completions", "/v1/contexts"
BLOCK = "a" * FIRST_BLOCK


def key(path: str = COMPLETIONS, session: str | None = None, **body: Any) -> str:
    return routing_key(path, {} if session is None else {"x-session-id": session}, json.dumps(body).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


ANSWER = {"role": "assistant", "content": "It is."}
TOGETHER = {
    "a session": [key(session="s", prompt="a"), key(CHAT, session="s", messages=[user("b")]), key(session="s", context="c")],
    "a context": [
        key(CONTEXTS, name="book", text="Once"),
        routing_key(f"{CONTEXTS}/book", {}, b""),
        key(prompt="Who?", context="book"),
        key(prompt="Once", kv_name="book"),
    ],
    "a first block": [key(prompt=BLOCK + "b"), key(prompt=BLOCK + "c", max_tokens=3), key(prompt=[BLOCK])],
    "a first block of tokens": [key(prompt=[7] * FIRST_BLOCK), key(prompt=[*[7] * FIRST_BLOCK, 8])],
    "a conversation": [key(CHAT, messages=[user("Hi")]), key(CHAT, messages=[user("Hi"), ANSWER, user("Then?")])],
    "a conversation about a document": [key(CHAT, messages=[user(BLOCK + "?")]), key(CHAT, messages=[user(BLOCK + "!")])],
    "another session": [key(session="t", prompt="a")],
    "another context": [key(prompt="Who?", context="play")],
    "another text": [key(prompt="b" + BLOCK)],
    "another tenant": [key(prompt=BLOCK, cache_salt="x")],
    "a response": [key("/v1/responses", input="Hi"), key("/v1/responses", input="Hi", stream=True)],
}


def test_requests_that_share_kv_share_a_key() -> None:
    assert {name: len(set(keys)) for name, keys in TOGETHER.items()} == dict.fromkeys(TOGETHER, 1)
    assert len({keys[0] for keys in TOGETHER.values()}) == len(TOGETHER)
    assert all(0 < len(keys[0]) < 40 for keys in TOGETHER.values())


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"\xff", b"{}", b'{"prompt": ""}', b'{"messages": []}', b"[" * 100_000, b'{"input":' * 99_000]
)
def test_any_replica_may_say_what_is_wrong(body: bytes) -> None:
    assert routing_key(COMPLETIONS, {}, body) == ""


@pytest.mark.parametrize(
    "body", [b'{"messages": [1, {}]}', b'{"messages": [{}, 1]}', b'{"prompt": [[]]}', b'{"prompt": 5, "context": [1]}']
)
def test_fields_of_the_wrong_kind_get_some_key(body: bytes) -> None:
    assert routing_key(CHAT, {}, body)


def test_metrics_of_all_replicas_are_one_exposition() -> None:
    one = '# HELP kvthaw:a An a.\n# TYPE kvthaw:a gauge\nkvthaw:a{model_name="m"} %d.0\n'
    two = one + "# HELP kvthaw:b A b.\n# TYPE kvthaw:b counter\n"
    from prometheus_client.parser import text_string_to_metric_families

    families = {each.name: each for each in text_string_to_metric_families(merged_metrics({"x": two % 1, "y": one % 2}))}
    assert [(each.labels["replica"], each.value) for each in families["kvthaw:a"].samples] == [("x", 1), ("y", 2)]
    assert "kvthaw:b" in families


def test_a_replica_that_is_taken_away_waits_for_what_it_writes() -> None:
    class Writing:
        def __init__(self, looks: float) -> None:
            self.looks, self.worker = looks, SimpleNamespace(draining=False, open=0, abort=lambda: None)

        @property
        def busy(self) -> bool:
            self.looks -= 1
            return self.looks > 0

    for looks, grace in ((3.0, 60.0), (float("inf"), 0.2)):
        replica = object.__new__(Replica)
        replica._service = service = Writing(looks)  # type: ignore[assignment]
        asyncio.run(replica.drain(grace))
        assert service.worker.draining
        assert service.looks in (0, float("inf"))


def test_a_setting_that_nothing_takes_is_refused_before_ray_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"mdoel, progress: no such setting; there are .*api_keys, .*budget, .*model, .*replicas"
    ):
        app({"mdoel": "shipped", "progress": "1", "replicas": "2", "budget": "64"})
