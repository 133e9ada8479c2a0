"""Documents that are kept under names, and prompts that begin like earlier ones."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from openai import NotFoundError
from servers import TEMPLATE, Served, serving
from transformers import PreTrainedModel

from kvthaw.cache.prefix_kept import PrefixStats
from kvthaw.serve.metrics import Metrics

METHOD = "quest"
"""One whose answers after reuse are those of a fresh prefill."""
DOCUMENT = "Once upon a time a king had three sons. " * 16
QUESTION = (
    "The eldest of them went out into the world to seek his fortune, and he came to a great dark forest where nobody lived, "
)


@pytest.fixture(scope="module")
def served(loaded: tuple[PreTrainedModel, Any]) -> Iterator[Served]:
    with serving(*loaded, chat_template=TEMPLATE, method=METHOD) as one:
        yield one


def complete(served: Served, prompt: str, **more: Any) -> Any:
    return served.openai.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0, seed=1, extra_body=more)


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


def test_the_code_of_the_docs_runs(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    blocks = re.findall(
        r"```python\n(.*?)```", text.replace("http://127.0.0.1:8000", served.url).replace("shipped", "tiny"), re.S
    )
    (tmp_path / "book.txt").write_text("Once upon a time. " * 20)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in blocks:
        if "tools=tools" not in block:  # which test_tools.py runs, with a template that takes tools
            exec(block, names)  # as a reader would
    names["client"].close()
    assert capsys.readouterr().out
    assert served.http.delete("/v1/contexts/book").is_success
    for shown in re.findall(r"^curl .*?(?<!\\)$", text.replace("shipped", "tiny"), re.S | re.M):
        _, url, _, header, _, body = shlex.split(shown.replace("\\\n", " "))
        path = url.removeprefix("http://127.0.0.1:8000")
        said = served.http.post(path, content=body, headers=dict([header.split(": ")]))
        assert said.is_success, said.text


def test_a_prompt_that_begins_like_an_earlier_one_is_cached_in_part(served: Served) -> None:
    text = "A first text. " + DOCUMENT
    first, again, tenant = (
        complete(served, text + QUESTION + end, cache_salt=salt) for end, salt in (("a", ""), ("b", ""), ("b", "x"))
    )
    assert cached(first) == cached(tenant) == 0
    assert cached(again) > 500
    assert again.choices[0].text == tenant.choices[0].text
    several = served.openai.completions.create(model="tiny", prompt=text + QUESTION, max_tokens=2, n=3)
    assert 500 < cached(several) < several.usage.prompt_tokens, "a prompt counts once"
    stream = served.openai.completions.create(
        model="tiny", prompt=text + QUESTION, max_tokens=2, stream=True, stream_options={"include_usage": True}
    )
    assert cached(list(stream)[-1]) > 500
    metrics = {
        line.split("{")[0]: line for line in served.http.get("/metrics").text.splitlines() if line.startswith("kvthaw:prefix")
    }
    assert set(metrics) >= {"kvthaw:prefix_cache_queries_total", "kvthaw:prefix_cache_hits_total"}


def test_a_document_is_kept_until_it_is_deleted(served: Served) -> None:
    card = served.post("/v1/contexts", name="sons", text=DOCUMENT).json()
    assert (card["id"], card["tokens"]) == ("sons", len(DOCUMENT))
    assert card["id"] in [one["id"] for one in served.http.get("/v1/contexts").json()["data"]]
    answer, plain = complete(served, QUESTION, context="sons"), complete(served, DOCUMENT + QUESTION, cache_salt="plain")
    assert cached(answer) > len(DOCUMENT) - 64
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.choices[0].text == plain.choices[0].text
    with pytest.raises(NotFoundError, match="sons"):
        complete(served, QUESTION, context="sons", cache_salt="another tenant")
    assert served.http.delete("/v1/contexts/sons").status_code == 204
    complete(served, "x")
    for response in (served.http.delete("/v1/contexts/sons"), served.http.get("/v1/contexts/sons")):
        assert response.status_code == 404
    with pytest.raises(NotFoundError):
        complete(served, QUESTION, context="sons")


def test_a_conversation_follows_one_that_is_kept(served: Served) -> None:
    kept, asked = {"role": "user", "content": DOCUMENT}, {"role": "user", "content": QUESTION}
    assert served.post("/v1/contexts", name="talk", messages=[kept]).json()["messages"]
    ask = served.openai.chat.completions.create
    answer = ask(model="tiny", messages=[asked], max_tokens=6, temperature=0, extra_body={"context": "talk"})  # type: ignore[list-item]
    plain = ask(model="tiny", messages=[kept, asked], max_tokens=6, temperature=0, extra_body={"cache_salt": "p"})  # type: ignore[list-item]
    assert cached(answer) > len(DOCUMENT) - 64
    assert answer.choices[0].message.content == plain.choices[0].message.content


def test_a_prompt_may_be_kept_by_the_request_itself(served: Served) -> None:
    complete(served, DOCUMENT + "It is kept. ", kv_name="mine")
    assert cached(complete(served, QUESTION, context="mine")) > 500
    refused = served.post("/v1/completions", prompt=["a", "b"], kv_name="mine")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kv_name")
    for body in (
        {"name": "../x", "text": "a"},
        {"name": "x"},
        {"name": "x", "text": "a" * 5000},
        {"name": "x", "text": "a", "y": 1},
    ):
        assert served.post("/v1/contexts", **body).status_code == 400


def test_documents_are_there_after_a_restart(
    loaded: tuple[PreTrainedModel, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless their files were damaged, which is said."""
    talk = [{"role": "user", "content": DOCUMENT}]
    how: dict[str, Any] = {"chat_template": TEMPLATE, "kv_dir": tmp_path, "method": METHOD}
    with serving(*loaded, **how) as served:
        served.post("/v1/contexts", name="sons", text=DOCUMENT)
        served.post("/v1/contexts", name="talk", messages=talk)
        served.post("/v1/contexts", name="gone", text="short")
        served.http.delete("/v1/contexts/gone")
        complete(served, "It is kept. " + DOCUMENT, kv_name="mine")
        before = complete(served, QUESTION, context="sons").choices[0].text
    broken = next((tmp_path / "mine").glob("layer-*"))
    broken.write_bytes(broken.read_bytes()[:-1] + b"!")
    with serving(*loaded, **how) as served:
        cards = {card["id"]: card["messages"] for card in served.http.get("/v1/contexts").json()["data"]}
        assert cards == {"sons": False, "talk": True}
        answer = complete(served, QUESTION, context="sons")
        assert answer.choices[0].text == before
        assert cached(answer) > len(DOCUMENT) - 64
        asked = served.post("/v1/chat/completions", messages=talk, max_tokens=1, context="talk")
        assert asked.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > len(DOCUMENT) - 64
    assert "mine is damaged" in caplog.text


def test_servers_that_share_a_folder_take_over_each_others_documents(
    loaded: tuple[PreTrainedModel, Any], tmp_path: Path
) -> None:
    """Also those that were replaced or deleted meanwhile."""
    how: dict[str, Any] = {"chat_template": TEMPLATE, "kv_dir": tmp_path, "method": METHOD}
    talk = [{"role": "user", "content": DOCUMENT}]
    with serving(*loaded, **how) as one, serving(*loaded, **how) as other:
        for messages in (None, talk):
            one.post("/v1/contexts", name="sons", **({"text": DOCUMENT} if messages is None else {"messages": messages}))
            assert other.http.get("/v1/contexts/sons").json()["messages"] == (messages is not None)
            answers = [complete(each, QUESTION, context="sons") for each in (one, other)]
            assert answers[0].choices[0].text == answers[1].choices[0].text
            assert cached(answers[1]) > len(DOCUMENT) - 64
        assert other.http.delete("/v1/contexts/sons").status_code == 204
        assert one.post("/v1/contexts", name="later", text=DOCUMENT).status_code == 200
        assert other.http.delete("/v1/contexts/later").status_code == 204, "which it has never been asked for"
        with pytest.raises(NotFoundError, match="sons"):
            complete(one, QUESTION, context="sons")
        assert one.http.get("/v1/contexts/.sons").status_code == 400  # no name


def test_counters_follow_what_the_prefix_cache_and_the_scheduler_count() -> None:
    counts = dict.fromkeys(("preemptions", "resumed", "recomputed"), 0)
    scheduler: Any = SimpleNamespace(batch=SimpleNamespace(requests=[]), waiting=[], **counts)
    shares, sizes = ("attended_mean", "hit_rate", "device_rate", "fetched_bytes"), ("kv_device_bytes", "kv_dense_bytes")
    stats: Any = SimpleNamespace(**dict.fromkeys((*shares, *sizes, "kv_host_bytes"), 0))
    metrics = Metrics(scheduler, "tiny")
    for queries, hits in ((10, 4), (15, 4), (30, 12)):
        metrics.cache(stats, PrefixStats(queries=queries, hits=hits))
        scheduler.preemptions += 2
        metrics.text()
    scheduler.resumed = 5
    text = metrics.text().decode()
    assert 'kvthaw:prefix_cache_queries_total{model_name="tiny"} 30.0' in text
    assert 'kvthaw:prefix_cache_hits_total{model_name="tiny"} 12.0' in text
    assert "# TYPE kvthaw:num_preemptions_total counter" in text
    assert 'kvthaw:num_preemptions_total{model_name="tiny"} 6.0' in text
    assert 'kvthaw:num_resumed_total{model_name="tiny"} 5.0' in text
    assert 'kvthaw:num_recomputed_total{model_name="tiny"} 0.0' in text
