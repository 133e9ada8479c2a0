"""The page, and what the server records of its answers."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from servers import Served, serving, until

from kvthaw.inspect.recorder import Recorder
from kvthaw.serve import watcher

BODY: dict[str, Any] = {"prompt": "A long tale of a mouse. " * 10, "max_tokens": 6, "ignore_eos": True, "temperature": 0}


def test_the_page_needs_no_key_and_runs_only_its_own_files(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, api_keys=("secret",)) as served:
        for path, kind in (("/", "html"), ("/page.css", "css"), ("/page.js", "javascript"), ("/chat.js", "javascript")):
            said = served.http.get(path)
            assert (said.status_code, kind in said.headers["content-type"]) == (200, True)
            policy = said.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert said.headers["x-content-type-options"] == "nosniff"
        assert served.http.get("/v1/recalls/some").status_code == 401


def test_an_answer_tells_what_it_recalled(served: Served) -> None:
    wanted = served.post("/v1/completions", **BODY).json()
    said = served.post("/v1/completions", **BODY, recall="exact").json()
    assert said["choices"][0]["text"] == wanted["choices"][0]["text"]
    assert served.http.get(f"/v1/recalls/{wanted['id']}").status_code == 404, "nothing is recorded unasked"
    data = served.http.get(f"/v1/recalls/{said['id']}").json()
    prompt = said["usage"]["prompt_tokens"]
    assert (data["document"], data["answer"], data["lengths"]["n"]) == (prompt, prompt, prompt + 6)
    assert data["text"].startswith(BODY["prompt"])
    (run,) = data["runs"]
    assert (run["layers"], run["heads"], run["grain"]) == ([0, 1], 2, 1)
    assert run["selected"]["counts"]["n"] == run["exact"]["counts"]["n"] == run["mass"]["n"] == 6 * 2 * 2
    assert run["selected"]["gaps"]["n"] > 0


def test_an_answer_under_full_attention_says_so(loaded: tuple[Any, Any]) -> None:
    with serving(*loaded, method="auto") as served:
        said = served.post("/v1/completions", **BODY, recall="selected").json()
        (run,) = served.http.get(f"/v1/recalls/{said['id']}").json()["runs"]
        assert run["name"] == "full attention"
        assert "full attention" in run["full"]
        assert "passages" not in run


def test_another_method_or_budget_recalls_for_the_same_tokens(served: Served) -> None:
    said = served.post("/v1/completions", **BODY, recall="exact").json()
    data = served.http.get(f"/v1/recalls/{said['id']}").json()
    assert {"quest", "icecache"} <= set(data["methods"])
    assert "full" not in data["methods"]
    same = served.post(f"/v1/recalls/{said['id']}/runs", budget=64).json()
    assert [same[part] for part in ("selected", "exact", "said")] == [
        data["runs"][0][part] for part in ("selected", "exact", "said")
    ]
    other = served.post(f"/v1/recalls/{said['id']}/runs", method="quest", budget=128).json()
    assert other["name"] == "quest, budget 128"
    assert other["exact"]["counts"]["n"] == same["exact"]["counts"]["n"]
    assert len(other["said"]) == len(other["places"]["host"]) == 6


def events(said: Any) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in said.text.splitlines() if line]


@pytest.mark.parametrize("method", ["full", "icecache", "quest", "streaming"])
def test_another_method_answers_the_same_prompt(loaded: tuple[Any, Any], served: Served, method: str) -> None:
    """As a server of that method does, and from the KV that is kept."""
    said = served.post("/v1/completions", **BODY, recall="selected").json()
    second = served.post(f"/v1/recalls/{said['id']}/answers", method=method, **({} if method == "full" else {"budget": 64}))
    assert second.headers["content-type"].startswith("text/event-stream")
    *pieces, told = events(second)
    with serving(*loaded, method=method, budget=None if method == "full" else 64) as other:
        wanted = other.post("/v1/completions", **BODY).json()["choices"][0]["text"]
    assert "".join(one["text"] for one in pieces) == wanted
    assert (told["finish"], told["tokens"]) == ("length", said["usage"]["prompt_tokens"] + 6)
    assert told["name"] == ("full attention" if method == "full" else f"{method}, budget 64")
    assert ("rows" in told) == (method not in ("full", "streaming"))
    if "rows" in told:
        assert 0 < told["rows"] <= 64


def test_a_second_answer_prefills_only_what_is_not_kept(served: Served) -> None:
    said = served.post("/v1/completions", **BODY | {"prompt": "A long tale of a mouse. " * 30}, recall="selected").json()
    prefix = served.service.batch.prefix_cache
    assert prefix is not None
    before = prefix.stats().hits
    events(served.post(f"/v1/recalls/{said['id']}/answers", method="quest", budget=64))
    assert prefix.stats().hits - before == said["usage"]["prompt_tokens"] - 128


def test_a_second_answer_that_cannot_be_is_refused(served: Served) -> None:
    name = served.post("/v1/completions", **BODY, recall="selected").json()["id"]
    for body, param in (({"method": "nothing"}, "method"), ({"budget": 1}, "budget"), ({"budget": 2049}, "budget")):
        said = served.post(f"/v1/recalls/{name}/answers", **body)
        assert (said.status_code, said.json()["error"]["param"]) == (400, param), said.text
    assert served.post("/v1/recalls/none/answers").status_code == 404


def test_the_model_says_what_the_page_needs(served: Served) -> None:
    (card,) = served.http.get("/v1/models").json()["data"]
    assert card["method"] == "icecache"
    assert {"full", "quest"} <= set(card["methods"])
    assert card["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Make each recorded step take so long; returns a list that grows by one with each."""
    take, taken = Recorder.take, list[int]()

    def slowly(self: Recorder, seq: int) -> Any:
        taken.append(seq)
        time.sleep(seconds)
        return take(self, seq)

    monkeypatch.setattr(Recorder, "take", slowly)
    return taken


@pytest.mark.parametrize("path", ["runs", "answers"])
def test_steps_of_others_come_between_those_of_a_run(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    name = served.post("/v1/completions", **BODY | {"max_tokens": 30}, recall="selected").json()["id"]
    path = f"/v1/recalls/{name}/{path}"
    taken = slow_steps(monkeypatch, 0.05)
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(served.post, path, method="quest", budget=128) for _ in range(2)]
        until(lambda: len(taken) > 0)
        for _ in range(3):
            assert served.post("/v1/completions", prompt="Hi", max_tokens=2).status_code == 200
        assert len(taken) < 29, "the first run has not ended"
        monkeypatch.undo()
        assert runs[0].result().text == runs[1].result().text


@pytest.mark.parametrize("path", ["runs", "answers"])
def test_a_prompt_of_a_run_comes_in_chunks(served: Served, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    body = BODY | {"prompt": [7] * 1200, "cache_salt": f"{path} alone", "kv_name": None}
    name = served.post("/v1/completions", **body, recall="selected").json()["id"]
    assert served.service.batch.prefix_cache is not None
    served.service.batch.prefix_cache.clear()
    forward, sizes = served.model.forward, list[int]()

    def told(*given: Any, **more: Any) -> Any:
        sizes.append(more["input_ids"].shape[1])
        return forward(*given, **more)

    monkeypatch.setattr(served.model, "forward", told)
    assert served.post(f"/v1/recalls/{name}/{path}", method="quest", budget=128).status_code == 200
    assert sum(size for size in sizes if size > 1) == 1200
    assert max(sizes) == served.service.worker.scheduler.step_tokens


def test_a_run_ends_where_its_client_leaves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    name = served.post("/v1/completions", **BODY | {"max_tokens": 30}, recall="selected").json()["id"]
    path = f"/v1/recalls/{name}/runs"
    taken = slow_steps(monkeypatch, 0.1)
    with pytest.raises(httpx2.TimeoutException):
        served.http.post(path, json={"method": "quest", "budget": 128}, timeout=0.7)
    until(lambda: not served.service.busy)
    assert 0 < len(taken) < 30
    monkeypatch.undo()
    assert served.post(path, budget=64).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"method": "nothing"}, "method"),
        ({"method": "full"}, "method"),
        ({"method": "clusterkv:clusters=1000000"}, "method"),
        ({"method": "icecache-digest:"}, "method"),
        ({"method": ""}, "method"),
        ({"method": "os:system"}, "method"),
        ({"budget": 10**400}, "budget"),
        ({"retrieved": 1 << 30}, "retrieved"),
        ({"budget": 2049}, "budget"),
        ({"budget": 1}, "budget"),
        ({"budget": 0}, "budget"),
        ({"x": 1}, "x"),
    ],
)
def test_a_method_that_cannot_recall_is_refused(served: Served, body: dict[str, Any], param: str) -> None:
    name = served.post("/v1/completions", **BODY, recall="selected").json()["id"]
    said = served.post(f"/v1/recalls/{name}/runs", **body)
    assert (said.status_code, said.json()["error"]["param"]) == (400, param), said.text
    assert served.post("/v1/recalls/none/runs", **body).status_code in (400, 404)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"n": 2}, "recall"), ({"prompt": ["a", "b"]}, "recall"), ({"recall": "all"}, "recall")],
)
def test_one_output_is_recorded(served: Served, body: dict[str, Any], param: str) -> None:
    said = served.post("/v1/completions", **BODY | {"recall": "selected"} | body)
    assert (said.status_code, said.json()["error"]["param"]) == (400, param)


def test_some_steps_are_compared_with_exact_attention(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def observed() -> tuple[float, float]:
        text = served.http.get("/metrics").text
        lines = [line.split(" ") for line in text.splitlines() if line.startswith("kvthaw:attention_mass_")]
        found = {line[0].partition("{")[0]: float(line[-1]) for line in lines}
        return found["kvthaw:attention_mass_count"], found["kvthaw:attention_mass_sum"]

    before = observed()
    monkeypatch.setattr(watcher, "EVERY", 4)
    served.post("/v1/completions", **BODY | {"max_tokens": 21})
    count, mass = (now - then for now, then in zip(observed(), before, strict=True))
    assert count == 5
    assert 0 < mass <= count


def test_the_dashboard_asks_for_metrics_that_there_are(served: Served) -> None:
    board = (Path(__file__).parents[2] / "examples" / "grafana.json").read_text()
    asked = set(re.findall(r"kvthaw:\w+", board))
    assert len(asked) > 15
    text = served.http.get("/metrics").text
    assert [name for name in asked if not re.search(rf"^(# TYPE )?{name}\b", text, re.MULTILINE)] == []


def test_passages_are_told_while_the_answer_comes(served: Served) -> None:
    name, found = "", list[dict[str, Any]]()
    body = BODY | {"max_tokens": 60, "recall": "selected", "stream": True}
    with served.http.stream("POST", "/v1/completions", json=body) as said:
        for line in said.iter_lines():
            if line.startswith("data: {") and not found:
                name = json.loads(line.removeprefix("data: "))["id"]
                found.append(served.http.get(f"/v1/recalls/{name}/passages?text=true").json())
    last = served.http.get(f"/v1/recalls/{name}/passages").json()
    data = served.http.get(f"/v1/recalls/{name}").json()
    assert found[0]["text"].startswith(BODY["prompt"])
    assert found[0]["document"] == found[0]["answer"] == found[0]["lengths"]["n"] == data["document"]
    assert found[0]["tokens"] <= last["tokens"] == 60
    assert "text" not in last
    assert last["passages"] == data["runs"][0]["passages"]
    assert served.http.get("/v1/recalls/none/passages").status_code == 404
