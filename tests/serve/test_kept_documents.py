"""Documents in memory and in their folder: one order a name, whatever the disk does and whoever leaves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import TEMPLATE, Served, serving, until
from transformers import PreTrainedModel

from kvthaw.engine.hf import saving, tensor_file
from kvthaw.errors import CacheError
from kvthaw.serve import app

Loaded = tuple[PreTrainedModel, Any]
DOCUMENT = "Once upon a time a king had three sons. " * 8
OTHER = "Far away there lived a miller and his cat. " * 8


@pytest.fixture
def start(loaded: Loaded, tmp_path: Path) -> Callable[[], Any]:
    return lambda: serving(*loaded, chat_template=TEMPLATE, kv_dir=tmp_path / "kv", method="quest")


class Gate:
    """A disk that waits before each document's files until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.open, plain = threading.Event(), threading.Event(), tensor_file.write

        def write(path: Path, tensors: Any) -> str:
            self.waiting.set()
            assert self.open.wait(20)
            return plain(path, tensors)

        monkeypatch.setattr(tensor_file, "write", write)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


def status(served: Served, name: str, **more: Any) -> int:
    return int(served.http.get(f"/v1/contexts/{name}", **more).status_code)


def later(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    said = list[Any]()
    thread = threading.Thread(target=lambda: said.append(work()))
    thread.start()
    return thread, said


def test_a_document_that_is_deleted_while_it_is_saved_stays_deleted(start: Any, gate: Gate, tmp_path: Path) -> None:
    with start() as served:
        posting = later(lambda: served.post("/v1/contexts", name="doc", text=DOCUMENT).status_code)
        assert gate.waiting.wait(20)
        keeping = later(lambda: served.post("/v1/completions", prompt=OTHER, max_tokens=2, kv_name="doc").status_code)
        until(lambda: served.service.documents.kept()["doc"].ids.tolist() != [*DOCUMENT.encode()])
        deleting = later(lambda: served.http.delete("/v1/contexts/doc").status_code)
        gate.open.set()
        for thread, _ in (posting, keeping, deleting):
            thread.join()
        assert (posting[1], keeping[1], deleting[1]) == ([200], [200], [204])
        there = status(served, "doc")
        assert (there == 200) == (tmp_path / "kv" / "doc").exists()
    with start() as served:
        assert status(served, "doc") == there


def test_the_folder_has_what_memory_has(start: Any, gate: Gate, tmp_path: Path) -> None:
    """Token ids and KV of the document that was kept last, and its messages."""
    talk = [{"role": "user", "content": OTHER}]
    with start() as served:
        first = later(lambda: served.post("/v1/contexts", name="doc", text=DOCUMENT))
        assert gate.waiting.wait(20)
        before = served.service.documents.kept()["doc"]
        second = later(lambda: served.post("/v1/contexts", name="doc", messages=talk))
        until(lambda: served.service.documents.kept()["doc"] is not before)
        gate.open.set()
        first[0].join()
        second[0].join()
        ids = served.service.documents.kept()["doc"].ids.tolist()
        assert first[1][0].json()["tokens"] == len(DOCUMENT)
    header = saving.read_header(tmp_path / "kv" / "doc")
    assert header["token_ids"] == [ids]
    with start() as served:
        card = served.http.get("/v1/contexts/doc").json()
        assert (card["tokens"], card["messages"]) == (len(ids), True)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_loses_nothing_that_it_asked_to_keep(
    start: Any, stream: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It leaves as soon as the prompt is whole."""
    whole, left = threading.Event(), threading.Event()
    body = json.dumps({"prompt": DOCUMENT, "max_tokens": 800, "kv_name": "doc", "stream": stream, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with start() as served:
        batch = served.service.batch
        launch = batch.launch

        def waits() -> None:
            if batch.decoding:
                whole.set()
                assert left.wait(20)
            launch()

        monkeypatch.setattr(batch, "launch", waits)
        with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
            client.sendall(head.encode() + b"\r\n\r\n" + body)
            assert whole.wait(20)
        until(lambda: not served.service.worker.open)
        left.set()
        until(lambda: (tmp_path / "kv" / "doc").exists())
    with start() as served:
        assert status(served, "doc") == 200


def _flip(folder: Path) -> None:
    path = next(folder.glob("layer-*"))
    data = bytearray(path.read_bytes())
    data[data.index(b"queries.0")] ^= 1
    path.write_bytes(data)


def _reseal(folder: Path, **more: Any) -> None:
    header = json.loads((folder / "header.json").read_text()) | more
    del header["sha256"]
    (folder / "header.json").write_text(json.dumps(header | {"sha256": saving._digest(header)}))


def _pipe(folder: Path) -> None:
    (folder / "header.json").unlink()
    os.mkfifo(folder / "header.json")


def _layer_pipe(folder: Path) -> None:
    path = next(folder.glob("layer-*"))
    path.unlink()
    os.mkfifo(path)


def _file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flip": _flip,
    "list": lambda folder: (folder / "header.json").write_text("[]"),
    "deep": lambda folder: (folder / "header.json").write_text("[" * 100_000),
    "pipe": _pipe,
    "layer-pipe": _layer_pipe,
    "token": lambda folder: _reseal(folder, token_ids=[[1 << 70]]),
    "negative": lambda folder: _reseal(folder, token_ids=[[-1] * len(DOCUMENT)]),
    "many": lambda folder: _reseal(folder, token_ids=[[5] * 100_000]),
    "rows": lambda folder: _reseal(folder, token_ids=[[5], [6]], left_pad=[0, 0]),
    "salt": lambda folder: _reseal(folder, salt=["x"]),
    "tenant": lambda folder: _reseal(folder, tenant=["x"]),
    "about": lambda folder: _reseal(folder, about={"x": 1}),
    "scale": lambda folder: _reseal(folder, files={"layer-0000.safetensors": {"scale": 1.0, "xxh64": 5}}),
    "file": _file,
}


def test_nothing_in_the_folder_stops_a_start(start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start() as served:
        served.post("/v1/contexts", name="good", text=DOCUMENT)
    for name, damage in DAMAGE.items():
        shutil.copytree(tmp_path / "kv" / "good", tmp_path / "kv" / name)
        damage(tmp_path / "kv" / name)
    with start() as served:
        assert [card["id"] for card in served.http.get("/v1/contexts").json()["data"]] == ["good"]
        for name in DAMAGE:
            assert str(tmp_path / "kv" / name) in caplog.text
            assert status(served, name) == 404
            assert served.http.delete(f"/v1/contexts/{name}").status_code == (404 if name == "file" else 204)
        assert sorted(os.listdir(tmp_path / "kv")) == ["file", "good"], "a file is no document"


def test_a_folder_with_a_name_that_no_request_can_give_is_left_out(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start() as served:
        served.post("/v1/contexts", name="good", text=DOCUMENT)
    (tmp_path / "kv" / "good").rename(tmp_path / "kv" / "my book")
    with start() as served:
        assert served.http.get("/v1/contexts").json()["data"] == []
        assert "rename" in caplog.text
    (tmp_path / "kv" / "my book").rename(tmp_path / "kv" / "my-book")
    with start() as served:
        assert status(served, "my-book") == 200


def test_a_link_in_the_folder_is_replaced_and_deleted_alone(start: Any, tmp_path: Path) -> None:
    with start() as served:
        for name in ("good", "whole"):
            served.post("/v1/contexts", name=name, text=DOCUMENT)
    kv = tmp_path / "kv"
    (kv / "good").rename(tmp_path / "elsewhere")
    (kv / "good").symlink_to(tmp_path / "elsewhere")
    (kv / "also").symlink_to("whole")
    (kv / "dangling").symlink_to("nowhere")
    with start() as served:
        assert [status(served, name) for name in ("good", "also", "dangling")] == [200, 200, 404]
        assert [served.http.delete(f"/v1/contexts/{name}").status_code for name in ("good", "also")] == [204, 204]
        assert served.post("/v1/contexts", name="dangling", text=OTHER).status_code == 200
        assert status(served, "whole") == 200
    assert (tmp_path / "elsewhere" / "header.json").is_file()
    assert sorted(os.listdir(kv)) == ["dangling", "whole"]
    with start() as served:
        assert status(served, "dangling") == 200


def test_a_folder_that_cannot_be_written_is_said_at_the_start(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with start():
        assert "cannot be written" not in caplog.text
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("")
    with start() as served:
        assert f"{tmp_path / 'kv'} cannot be written: File exists; new documents are in memory alone" in caplog.text
        assert served.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_a_read_that_fails_once_is_tried_again(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as one, start() as other:
        one.post("/v1/contexts", name="doc", text=DOCUMENT)

        def fails(*_: Any) -> Any:
            raise OSError(5, "Input/output error")

        for error in (fails, CacheError):
            with monkeypatch.context() as patch:
                patch.setattr(tensor_file, "TensorFile", error if error is fails else _raises(CacheError("damaged")))
                assert status(other, "doc") == 404
        assert status(other, "doc") == 200


def _raises(error: Exception) -> Callable[..., Any]:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


def test_a_folder_that_vanishes_and_returns_takes_no_document_along(start: Any, tmp_path: Path) -> None:
    with start() as served:
        served.post("/v1/contexts", name="doc", text=DOCUMENT)
        (tmp_path / "kv").rename(tmp_path / "away")
        assert status(served, "doc") == 200
        (tmp_path / "kv").mkdir()  # as where nothing is mounted
        assert status(served, "doc") == 200
        (tmp_path / "kv").rmdir()
        (tmp_path / "away").rename(tmp_path / "kv")
        assert status(served, "doc") == 200
        shutil.rmtree(tmp_path / "kv" / "doc")
        assert status(served, "doc") == 404, "another server deleted it"


@pytest.mark.parametrize("call", ["rename", "unlink"])
def test_a_document_whose_files_stay_is_not_deleted(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with start() as served:
        served.post("/v1/contexts", name="doc", text=DOCUMENT)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, _raises(OSError(30, "Read-only file system")))
            refused = served.http.delete("/v1/contexts/doc")
        assert refused.status_code == 500
        assert "Read-only file system" in refused.json()["error"]["message"]
        assert status(served, "doc") == 200
        assert served.http.delete("/v1/contexts/doc").status_code == 204
        assert os.listdir(tmp_path / "kv") == []


def test_what_a_killed_process_left_is_deleted_at_the_start(start: Any, tmp_path: Path) -> None:
    """And a document that had only been moved aside comes back."""
    with start() as served:
        served.post("/v1/contexts", name="doc", text=DOCUMENT)
    kv = tmp_path / "kv"
    (kv / ".other.abcd1234" / "new").mkdir(parents=True)
    (kv / ".other.abcd1234" / "new" / "layer-0000.safetensors").write_bytes(b"x")
    (kv / ".doc.abcd1234" / "old").mkdir(parents=True)
    (kv / "doc").rename(kv / ".doc.abcd1234" / "new")
    (kv / ".mine").mkdir()
    with start() as served:
        assert status(served, "doc") == 200
    assert sorted(os.listdir(kv)) == [".mine", "doc"]


def test_names_of_other_salts_are_none(start: Any, tmp_path: Path) -> None:
    """Neither listed, described, replaced nor deleted by others; the folder does not tell the salt."""
    mine: dict[str, Any] = {"Cache-Salt": "tenant-é-1".encode("latin-1")}
    yours: dict[str, Any] = {"Cache-Salt": "tenant-2"}
    mine_too = {"Cache-Salt": "tenant-é-1".encode()}
    umask = os.umask(0o022)
    try:
        with start() as served:
            served.post("/v1/contexts", name="doc", text=DOCUMENT, cache_salt="tenant-é-1")
            for headers in (yours, {}):
                assert served.http.get("/v1/contexts", headers=headers).json()["data"] == []
                assert status(served, "doc", headers=headers) == 404
                assert served.http.delete("/v1/contexts/doc", headers=headers).status_code == 404
            served.post("/v1/completions", prompt=OTHER, max_tokens=1, kv_name="doc", cache_salt="tenant-2")
            served.post("/v1/contexts", name="doc", text="short")
            assert served.http.delete("/v1/contexts/doc", headers=yours).status_code == 204
            for headers in (mine, mine_too):
                assert served.http.get("/v1/contexts/doc", headers=headers).json()["tokens"] == len(DOCUMENT)
            asked = served.post("/v1/completions", prompt="x", max_tokens=1, context="doc", cache_salt="tenant-é-1")
            assert asked.json()["usage"]["prompt_tokens"] == len(DOCUMENT) + 1
    finally:
        os.umask(umask)
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0
        assert "tenant-" not in path.name
        assert not path.is_file() or b"tenant-" not in path.read_bytes()
    with start() as served:
        assert served.http.get("/v1/contexts/doc", headers=mine).json()["tokens"] == len(DOCUMENT)
        assert served.http.get("/v1/contexts/doc").json()["tokens"] == len("short")
        assert status(served, "doc", headers=yours) == 404


def test_a_document_may_come_while_nobody_waits(start: Any, gate: Gate) -> None:
    with start() as served:
        answer = served.post("/v1/contexts", name="doc", text=DOCUMENT, wait=False)
        assert answer.status_code == 202
        assert answer.json()["status"] == "in_progress"
        assert gate.waiting.wait(20)
        card = served.http.get("/v1/contexts/doc").json()
        assert (card["status"], card["tokens"], card["prefilled_tokens"]) == ("in_progress", len(DOCUMENT), len(DOCUMENT))
        assert [one["id"] for one in served.http.get("/v1/contexts").json()["data"]] == ["doc"]
        gate.open.set()
        until(lambda: served.http.get("/v1/contexts/doc").json()["status"] == "completed")
        prefix = served.service.batch.prefix_cache
        assert prefix is not None
        prefix.host_bytes = 1
        assert served.post("/v1/contexts", name="large", text=OTHER, wait=False).status_code == 202
        until(lambda: served.http.get("/v1/contexts/large").json()["status"] == "failed")
        assert "cannot be kept" in served.http.get("/v1/contexts/large").json()["error"]["message"]
        assert served.http.delete("/v1/contexts/large").status_code == 204
        assert status(served, "large") == 404


@pytest.mark.parametrize("wait", [False, True])
def test_a_document_replaces_one_of_its_name_that_is_still_coming(
    start: Any, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """Nobody waits for the earlier one, whose longer prompt would be whole after the later one's."""
    with start() as served:
        forward = served.model.forward
        monkeypatch.setattr(served.model, "forward", lambda *given, **how: time.sleep(0.1) or forward(*given, **how))
        assert served.post("/v1/contexts", name="doc", text=DOCUMENT * 6, wait=False).status_code == 202
        assert served.post("/v1/contexts", name="doc", text="short", wait=wait).status_code == (200 if wait else 202)
        until(lambda: not served.service.busy)
        assert served.http.get("/v1/contexts/doc").json()["tokens"] == len("short")
    with start() as served:
        assert served.http.get("/v1/contexts/doc").json()["tokens"] == len("short")


def _full_disk(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_written_is_not_said_to_be_kept(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The document is there until the server ends, and after it what the folder had."""
    said = "'doc' is in memory alone, and not there after a restart: its files cannot be written: No space left on device"
    ask = {"prompt": OTHER, "max_tokens": 2, "kv_name": "doc"}
    with start() as served:
        assert served.post("/v1/contexts", name="doc", text=DOCUMENT).status_code == 200
        assert "warning" not in served.post("/v1/completions", prompt="Hi", max_tokens=2, kv_name="other").json()
        with monkeypatch.context() as patch:
            patch.setattr(tensor_file, "write", _full_disk)
            refused = served.post("/v1/contexts", name="doc", text=OTHER)
            assert refused.status_code == 500
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("name", "context_not_saved")
            assert said in error["message"]
            assert served.http.get("/v1/contexts/doc").json()["tokens"] == len(OTHER)
            assert said in served.post("/v1/completions", **ask).json()["warning"]
            assert said in served.post("/v1/responses", input="Hi", max_output_tokens=2, kv_name="doc").json()["warning"]
            lines = served.post("/v1/completions", **ask, stream=True).text.split("\n\n")
            assert said in json.loads(lines[-3].removeprefix("data: "))["warning"]
            assert served.post("/v1/contexts", name="doc", text=OTHER, wait=False).status_code == 202
            until(lambda: served.http.get("/v1/contexts/doc").json()["status"] == "failed")
            assert said in served.http.get("/v1/contexts/doc").json()["error"]["message"]
    assert "No space left" in caplog.text
    with start() as served:
        assert served.http.get("/v1/contexts/doc").json()["tokens"] == len(DOCUMENT)
        assert served.post("/v1/contexts", name="doc", text=OTHER).status_code == 200
    with start() as served:
        assert served.http.get("/v1/contexts/doc").json()["tokens"] == len(OTHER)


def test_a_prompt_that_has_no_room_under_its_name_is_refused_with_the_field(start: Any) -> None:
    with start() as served:
        prefix = served.service.batch.prefix_cache
        assert prefix is not None
        assert served.post("/v1/completions", prompt="Hi", max_tokens=1).status_code == 200
        prefix.host_bytes = 1
        for path, body, field in (
            ("/v1/completions", {"prompt": OTHER, "max_tokens": 2, "kv_name": "doc"}, "kv_name"),
            ("/v1/contexts", {"text": OTHER, "name": "doc"}, "name"),
        ):
            refused = served.post(path, **body)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == (field, "context_not_kept")
            assert "'doc' cannot be kept" in error["message"]


def test_a_server_that_ends_writes_what_it_keeps_within_its_grace(loaded: Loaded, gate: Gate, tmp_path: Path) -> None:
    with serving(*loaded, kv_dir=tmp_path / "kv", method="quest", grace=30) as served:
        posting = later(lambda: served.post("/v1/contexts", name="doc", text=DOCUMENT).status_code)
        assert gate.waiting.wait(20)
        served.server.handle_exit(signal.SIGTERM, None)
        time.sleep(0.3)  # several looks at whether all has ended
        assert not served.server.should_exit
        gate.open.set()
        until(lambda: served.server.should_exit)
        posting[0].join()
        assert posting[1] == [200]


@pytest.mark.parametrize("how", ["context", "kv_name", "stream"])
def test_a_server_that_ends_while_a_document_is_read_says_so(
    loaded: Loaded, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, though the chunk at hand goes on: nothing is kept, and nothing is said to be."""
    reading, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        reading.set()
        assert go_on.wait(20)

    bodies = {
        "context": ("/v1/contexts", {"name": "doc", "text": DOCUMENT}),
        "kv_name": ("/v1/completions", {"prompt": DOCUMENT, "max_tokens": 2, "kv_name": "doc"}),
        "stream": ("/v1/completions", {"prompt": DOCUMENT, "max_tokens": 2, "kv_name": "doc", "stream": True}),
    }
    path, body = bodies[how]
    with serving(*loaded, kv_dir=tmp_path / "kv", method="quest", grace=0.1) as served:
        hook = loaded[0].register_forward_pre_hook(wait)
        try:
            thread, said = later(lambda: served.post(path, **body))
            assert reading.wait(20)
            served.server.handle_exit(signal.SIGTERM, None)
            thread.join(3)
            assert not thread.is_alive()
        finally:
            go_on.set()
            hook.remove()
        if how == "context":
            assert (said[0].status_code, said[0].json()["error"]["code"]) == (503, "shutting_down")
        else:
            assert said[0].status_code == 200
            assert '"finish_reason":"abort"' in said[0].text
    assert not (tmp_path / "kv" / "doc").exists()
    assert not [record for record in caplog.records if record.exc_info or "has written" in record.message]


def test_a_server_waits_for_a_disk_no_longer_than_its_grace(
    loaded: Loaded, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app, "SAVING", 0.2)
    with serving(*loaded, kv_dir=tmp_path / "kv", method="quest", grace=0) as served:
        served.post("/v1/contexts", name="doc", text=DOCUMENT, wait=False)
        assert gate.waiting.wait(20)
        served.server.handle_exit(signal.SIGTERM, None)
        until(lambda: "the server ends before it has written 'doc'" in caplog.text)
        gate.open.set()  # the process would end without it, see run()
