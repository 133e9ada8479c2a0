"""Break saving, loading and memory on purpose, and count what came of it.

`python -m lab.faults --kills 200 --flips 1000`: a tiny model on a CPU under IceCache, whose trees are saved too. One JSON
line a kind of fault, with how often what happened; "wrong" must be 0:

- kill: a process that saves one cache over another, in turn, is killed (SIGKILL) at a random moment. The folder has the old
  tokens, the new ones or is not there, each with their own KV, and the next save leaves nothing else beside it.
- flip, truncate, header: a bit, a file's end, a field of the header is changed. A prompt that the folder began with is prefilled
  again, with a warning that names the folder, or has the KV that was saved. forged: the same with the header's checksum made again.
- refused: the disk is full after some bytes (RLIMIT_FSIZE), or the folder read-only. What was there stays; the error names it.
- memory: the host has no memory, at random, for blocks that requests of a running batch need, some of which spill from the device.
  Every request ends with the tokens that it has alone, or, where no other could give way, with an error and the first of them.

Exits with 1 where something was wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvthaw import Batch, Cache, CacheError, HostMemoryError, Request, Scheduler
from kvthaw.cache.host_memory import HostMemory
from kvthaw.engine.hf.kept import fill
from kvthaw.engine.prefill import prefill
from lab.requests import tiny
from lab.script import options

METHOD = "icecache-digest"
SETTINGS: dict[str, Any] = {"budget": 48, "dense_layers": 0, "block_size": 32}
TOKENS = 400
_OTHERS: tuple[Any, ...] = (None, 7, -1, "x", [], {}, [[1, 2]], 1e300)
MEMORY = "640KiB"  # of a device that holds a part of what the requests need


class Folder:
    """A saved cache of one prompt, and the caches of two, whose KV are known."""

    def __init__(self, model: PreTrainedModel, path: Path) -> None:
        self.model, self.path = model, path
        draw = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(0, model.config.vocab_size, (TOKENS,), generator=draw) for _ in range(2)]
        self.caches = [self.read(ids) for ids in self.ids]
        self.rows = [rows(cache) for cache in self.caches]
        self.save(0)
        self.whole = {file: file.read_bytes() for file in sorted(path.iterdir())}

    def read(self, ids: Tensor) -> Cache:
        """Return a cache of a prompt."""
        cache = Cache(self.model, METHOD, **SETTINGS)
        prefill(self.model, cache, ids.tolist())
        cache.wait()
        return cache

    def save(self, which: int) -> None:
        """Save one of the two."""
        self.caches[which].save(self.path, self.ids[which])

    def outcome(self) -> str:
        """Say what a prompt gets of the folder: nothing, with a warning or without, or the rows of one of the two."""
        warnings: list[str] = []
        for which, (ids, own) in enumerate(zip(self.ids, self.rows, strict=True)):
            cache = Cache(self.model, METHOD, **SETTINGS)
            taken = fill(cache, self.path, ids.tolist(), warnings.append)
            if taken:
                cache.wait()
                same = all(torch.equal(mine, its[:, :taken]) for mine, its in zip(rows(cache), own, strict=True))
                prefill(self.model, cache, ids[taken:].tolist())
                return ("old", "new")[which] if same and taken == TOKENS - 1 and not warnings else "wrong"
        if not warnings:
            return "wrong" if self.path.exists() else "none"
        return "warned" if all(str(self.path) in warning for warning in warnings) else "wrong"

    @contextmanager
    def changed(self, file: Path, content: bytes) -> Iterator[None]:
        """Have a file of the folder hold something else."""
        file.write_bytes(content)
        yield
        file.write_bytes(self.whole[file])


def rows(cache: Cache) -> list[Tensor]:
    """Return the rows of the first sequence in each layer."""
    return [layer.read(0, 0, cache.kv.sequences.length(0)).clone() for layer in cache.kv.layers]


def child(work: Callable[[], object], after: float | None = None) -> int:
    """Do some work in a process of its own, killed after so many seconds. Returns its exit status, 1 where the work raises."""
    pid = os.fork()
    if not pid:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kills(folder: Folder, count: int, rng: random.Random) -> Counter[str]:
    """Kill a save at random moments; see the head of this file."""
    found: Counter[str] = Counter()
    begin = time.perf_counter()
    folder.save(0)
    whole = time.perf_counter() - begin

    def save_on() -> None:
        while True:
            folder.save(1)
            folder.save(0)

    for _ in range(count):
        found["killed"] += child(save_on, rng.uniform(0, 4 * whole)) == -signal.SIGKILL
        found[folder.outcome()] += 1
    folder.save(0)
    found["left over"] = len(list(folder.path.parent.iterdir())) - 1
    found["wrong"] += found["warned"] + found["left over"]
    return found


def damage(folder: Folder, flips: int, every: int, rng: random.Random) -> Iterator[tuple[str, Counter[str]]]:
    """Change bits, lengths and the header's fields."""
    files = list(folder.whole)
    found: Counter[str] = Counter(wrong=0)
    for i in range(flips):
        file = files[i % len(files)]
        content = bytearray(folder.whole[file])
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        with folder.changed(file, bytes(content)):
            found[folder.outcome()] += 1
    yield "flip", found
    found = Counter(wrong=0)
    for i in range(flips // 20):
        file = files[i % len(files)]
        with folder.changed(file, folder.whole[file][: rng.randrange(len(folder.whole[file]))]):
            found[folder.outcome()] += 1
    yield "truncate", found
    file = folder.path / "header.json"
    for kind in ("header", "forged"):
        found = Counter(wrong=0)
        for header in islice(_headers(json.loads(folder.whole[file])), rng.randrange(every), None, every):
            if kind == "forged" and header.pop("sha256", None) is not None:
                header["sha256"] = hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()
            with folder.changed(file, json.dumps(header).encode()):
                found[folder.outcome() if kind == "header" else _forged(folder)] += 1
        yield kind, found


def _headers(header: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a header with each of its fields gone, and with another value of each kind."""

    def paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        if path:
            yield path
        items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
        for key, each in items:
            yield from paths(each, (*path, key))

    for *front, last in paths(header, ()):
        for other in _OTHERS:
            twin = json.loads(json.dumps(header))
            inner = twin
            for key in front:
                inner = inner[key]
            if other is None:
                del inner[last]
            elif inner[last] == other:
                continue
            else:
                inner[last] = other
            yield twin


def _forged(folder: Folder) -> str:
    """As Folder.outcome(): whatever the header says, loading raises CacheError or gives a cache, and never crashes."""
    try:
        Cache.load(folder.path, folder.model, METHOD, **SETTINGS).wait()
    except (CacheError, HostMemoryError):
        return "refused"
    except Exception as error:
        return f"wrong: {error!r}"
    return "loaded"


def refusals(folder: Folder, count: int, rng: random.Random) -> Counter[str]:
    """Save where the disk is full after some bytes, or the folder is read-only."""
    found: Counter[str] = Counter(wrong=0)
    largest = max(map(len, folder.whole.values()))

    def full(limit: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        _says(folder)

    def read_only() -> None:
        folder.path.parent.chmod(0o555)
        if not os.getuid():
            os.setuid(65534)  # whom a folder's mode binds
        _says(folder)

    for i in range(count):
        work = read_only if i % 10 == 0 else lambda: full(rng.randrange(largest))
        clear = child(work) == 0
        folder.path.parent.chmod(0o755)
        beside = len(list(folder.path.parent.iterdir())) - 1
        found["old" if clear and folder.outcome() == "old" and not beside else "wrong"] += 1
    return found


def _says(folder: Folder) -> None:
    """Save, which must fail with an error that names the folder."""
    try:
        folder.save(1)
    except OSError as error:
        if str(folder.path) in str(error):
            return
    raise SystemExit(1)


def memory(model: PreTrainedModel, requests: int, rng: random.Random) -> Counter[str]:
    """Serve requests while the host has no memory, now and then; see the head of this file."""
    found: Counter[str] = Counter(wrong=0)
    plain = HostMemory.allocate_free
    prompts = [torch.randint(0, model.config.vocab_size, (rng.randrange(40, 160),)) for _ in range(requests)]

    def serve(asked: list[Tensor], rate: float) -> list[Request]:
        def allocate(self: HostMemory, *given: Any, **named: Any) -> Tensor:
            if rng.random() < rate:
                found["refused"] += 1
                raise HostMemoryError("no memory, on purpose")
            return plain(self, *given, **named)

        batch = Batch(model, "quest", max_seqs=3, capacity=320, budget=48, dense_layers=0, block_size=16, device_memory=MEMORY)
        HostMemory.allocate_free = allocate  # type: ignore[method-assign]
        try:
            scheduler = Scheduler(batch, step_tokens=64)
            waiting = [scheduler.submit(ids, max_new_tokens=36, stop=()) for ids in asked]
            while scheduler.busy:
                scheduler.step()
        finally:
            HostMemory.allocate_free = plain  # type: ignore[method-assign]
        found["spilled"] += batch.stats().moved_bytes
        found["gave way"] += scheduler.preemptions
        return waiting

    alone = [serve([ids], 0.0)[0].tokens for ids in prompts]
    for request, own in zip(serve(prompts, 0.05), alone, strict=True):
        whole = "same tokens" if request.tokens == own else "error" if request.finished == "error" else "wrong"
        found[whole if request.tokens == own[: len(request.tokens)] else "wrong"] += 1
    return found


def campaign(kill: int, flips: int, refused: int, requests: int, seed: int = 0, every: int = 1) -> Iterator[dict[str, Any]]:
    """Yield what came of each kind of fault. every: try one of so many changes of the header."""
    model, rng = tiny("llama"), random.Random(seed)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as place, torch.no_grad():
        Path(place).chmod(0o755)  # a child that is not root looks into it
        folder = Folder(model, Path(place) / "caches" / "kv")
        assert folder.outcome() == "old"
        yield {"fault": "kill", **kills(folder, kill, rng)}
        for kind, found in damage(folder, flips, every, rng):
            yield {"fault": kind, **found}
        yield {"fault": "refused", **refusals(folder, refused, rng)}
        yield {"fault": "memory", **memory(model, requests, rng)}


def main() -> None:
    """Run all, one JSON line a kind of fault."""
    given = options(__doc__, kills=200, flips=1000, refused=100, requests=60, seed=0)
    torch.set_num_threads(1)
    wrong = False
    for line in campaign(given.kills, given.flips, given.refused, given.requests, given.seed):
        print(json.dumps(line), flush=True)
        wrong |= any(count for name, count in line.items() if name.startswith("wrong"))
    sys.exit(wrong)


if __name__ == "__main__":
    main()
