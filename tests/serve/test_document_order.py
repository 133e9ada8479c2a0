"""Whatever clients and the disk do, a document is the last one of its name, in memory, in its folder and after a restart."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
from servers import Served, serving, until
from transformers import PreTrainedModel

import bytemodel
from forked import forked
from kvthaw.engine.hf import saving, tensor_file

NAMES, WAYS = ("one", "one", "two"), ("delete", "context", "context", "answer", "leaves")
TEXTS = [letter * (70 + 10 * number) for number, letter in enumerate("abcd")]  # each of another length


class Disk:
    """A disk that takes what is written at once; or once it is let go on, what came last first; or not at all."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.slow = self.full = False
        self.refused = set[str]()  # names that it did not take something of
        self._waiting, self._seen = list[threading.Event](), set[str]()
        self._write, self._rename = tensor_file.write, os.rename
        patch.setattr(tensor_file, "write", self.write)
        patch.setattr(os, "rename", self.rename)

    def write(self, path: Path, tensors: Any) -> str:
        self._take(path)
        return self._write(path, tensors)

    def rename(self, old: Path, new: Path) -> None:
        self._take(old / new.relative_to(new.anchor))
        self._rename(old, new)

    def go_on(self) -> None:
        time.sleep(0.1)  # until what can come has come
        self.slow = False
        while self._waiting:
            self._waiting.pop().set()
            time.sleep(0.01)

    def _take(self, path: Path) -> None:
        folder = next(part for part in path.parts if part.startswith("."))  # of one save or deletion
        if self.slow and folder not in self._seen:
            self._seen.add(folder)
            self._waiting.append(turn := threading.Event())
            assert turn.wait(20)
        if self.full:
            self.refused.add(folder.split(".")[1])
            raise OSError(28, "No space left on device")


@dataclass(eq=False)
class Asked:
    """What a client asks for a name. gives: how long the document is afterwards, None for none."""

    name: str
    gives: int | None
    begun: int
    status: Future[int]
    ended: int = 1 << 60


class Documents:
    """Clients keep, replace and delete documents at once, and leave; the disk is slow or full; the server starts again."""

    def __init__(self, loaded: tuple[PreTrainedModel, Any], folder: Path, disk: Disk) -> None:
        self.loaded, self.folder, self.disk = loaded, folder, disk
        self.clock, self.known, self.asked = itertools.count(), dict[str, int | None](one=None, two=None), list[Asked]()
        self.clients, self.running = ThreadPoolExecutor(16), ExitStack()
        self.disk.slow = True
        self.start()

    def start(self) -> None:
        self.served: Served = self.running.enter_context(serving(*self.loaded, kv_dir=self.folder, method="quest"))

    def crowd(self, random: Random) -> None:
        """Let clients come one after the other, most of them before the disk has what the earlier ones keep."""
        for _ in range(random.randint(3, 6)):
            name, way, text = random.choice(NAMES), random.choice(WAYS), random.choice(TEXTS)
            self.asked.append(asked := Asked(name, None if way == "delete" else len(text), next(self.clock), Future()))
            self.clients.submit(self.ask, asked, way, text)
            time.sleep(random.choice([0.0, 0.04]))

    def look(self, starts: bool) -> None:
        """Compare memory and folder once all is done, and once it has started again."""
        self.end()
        for name in self.known:
            mine = [each for each in self.asked if each.name == name and (each.gives or each.status.result() != 500)]
            last = {each.gives for each in mine if not any(other.begun > each.ended for other in mine)}
            found = self.held(name)
            assert found in (last or {self.known[name]})
            assert self.written(name) == found or name in self.disk.refused
            self.known[name] = found
        for each in self.asked:
            assert each.status.result() in (200, 204, 404) or (each.status.result(), each.name in self.disk.refused) == (
                500,
                True,
            )
        if starts:
            self.running.close()
            self.start()
            self.known = {name: self.written(name) for name in self.known}
            assert self.known == {name: self.held(name) for name in self.known}
            self.disk.refused.clear()
        self.asked.clear()
        self.disk.slow = True

    def close(self) -> None:
        self.disk.go_on()
        self.running.close()
        self.clients.shutdown()

    def ask(self, asked: Asked, way: str, text: str) -> None:
        http, name = self.served.http, asked.name
        ask: dict[str, Any] = {"prompt": text, "max_tokens": 2, "kv_name": name}
        long = ask | {"max_tokens": 500, "stream": True, "ignore_eos": True}
        try:
            if way == "context":
                status = http.post("/v1/contexts", json={"name": name, "text": text}).status_code
            elif way == "answer":
                status = http.post("/v1/completions", json=ask).status_code
            elif way == "delete":
                status = http.delete(f"/v1/contexts/{name}").status_code
            else:
                with http.stream("POST", "/v1/completions", json=long) as answer:
                    next(answer.iter_lines())
                    status = answer.status_code
        except BaseException as error:
            asked.status.set_exception(error)
            return
        asked.ended = next(self.clock)
        asked.status.set_result(status)

    def end(self) -> None:
        """Have the disk go on, and all that was asked for be done."""
        self.disk.go_on()
        for each in self.asked:
            each.status.result(20)
        until(lambda: not self.served.service.busy)

    def held(self, name: str) -> int | None:
        found = self.served.http.get(f"/v1/contexts/{name}")
        return found.json()["tokens"] if found.status_code == 200 else None

    def written(self, name: str) -> int | None:
        path = self.folder / name
        return len(saving.read_header(path)["token_ids"][0]) if path.exists() else None


@pytest.mark.parametrize("seed", range(3))
def test_a_document_is_the_last_one_of_its_name(
    loaded: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(seed)
    documents = Documents(loaded, tmp_path / "kv", Disk(monkeypatch))
    try:
        for full in (False, random.random() < 0.5, False):
            documents.disk.full = full
            documents.crowd(random)
            documents.look(starts=random.random() < 0.3)
        documents.look(starts=True)
    finally:
        documents.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a system that forks")
def test_what_was_kept_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    """Clients keep, replace and delete documents until the server is killed in mid-save. What the last answer before said is so
    after it, unless a request that nobody answered took effect; and no document is damaged."""
    model, folder, random = str(bytemodel.save(tmp_path / "model")), tmp_path / "kv", Random(0)
    said: dict[str, list[int | None]] = {name: [None] for name in ("one", "two", "three")}  # what may be there
    for _ in range(4):
        with forked("serve", model, "--port", "0", "--budget", "64", "--device", "cpu", "--kv-dir", str(folder)) as command:
            url = next(line.split()[-1] for line in command.stderr if "http://" in line)
            with httpx2.Client(base_url=url, timeout=30) as http:
                until(lambda http=http: _answers(http))  # type: ignore[misc]
                for name, may_be in said.items():
                    found = http.get(f"/v1/contexts/{name}")
                    length = found.json()["tokens"] if found.status_code == 200 else None
                    assert length in may_be
                    may_be[:] = [length]

                def ask(name: str, http: httpx2.Client = http) -> None:
                    with suppress(httpx2.TransportError):
                        while True:
                            text = random.choice([None, *TEXTS])
                            said[name].append(None if text is None else len(text))
                            if text is None:
                                answer = http.delete(f"/v1/contexts/{name}")
                            else:
                                answer = http.post("/v1/contexts", json={"name": name, "text": text})
                            assert answer.status_code in (200, 204, 404)
                            said[name][:] = said[name][-1:]

                clients = [threading.Thread(target=ask, args=(name,)) for name in said]
                for client in clients:
                    client.start()
                time.sleep(random.uniform(0.1, 0.6))
                command.send(signal.SIGKILL)
                command.wait()
                for client in clients:
                    client.join(30)
    left = [path.name for path in folder.iterdir() if path.name not in said]
    assert all(name.startswith(".") for name in left)


def _answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False
