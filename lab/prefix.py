"""Time to first token of a question about a document: fresh, after an earlier one in the same process, and restored from a file.

`python -m lab.prefix --shape llama-3.1-8b --layers 8 --length 131072 --out prefix.jsonl`: random tokens, random weights. One
JSON line a method, with seconds to a first token, indexing included:

- document_s: the document with an earlier question. fresh_s: with another, in a batch that keeps nothing. reuse_s: with that one
  where the document is kept; the least of `--repeats` questions.
- save_s, restore_s: the document to a folder and back, out of the page cache, with SHA-256. restored_s: a question after that.
  restored_first_s: the first one, for which a saved tree is restored; rebuilt_first_s: for which the index is rebuilt.
- disk_restore_s, disk_read_s: the same where the page cache has nothing of the files, and reading them alone. Both restores take
  memory that was page-locked for the prompts; `lab.restored` has a new process, which has none.

`--folder`: where the document is saved. `--unsaved`: it is not. `--fresh`: questions that are asked fresh, all unless given. Tokens
of what was asked are compared. Times of few layers are no model's; the KV of a layer is.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from kvthaw import Batch, PrefixCache, Request
from kvthaw.engine.hf.model import load
from kvthaw.engine.library import Library
from kvthaw.evaluate.machine import where
from kvthaw.formatting import read_bytes
from lab.bench.shapes import build
from lab.script import Report, options

Result = TypeVar("Result")


class Asked(NamedTuple):
    """A question that was answered. cached: tokens of its prompt that were kept; block_bytes: of device blocks, behind its
    first token."""

    tokens: list[int]
    seconds: float
    cached: int
    block_bytes: int


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """Return what work returns and the seconds until the device has done it."""
    begin = time.perf_counter()
    result = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def save(library: Library) -> float:
    """Save the document that is kept; return the seconds."""
    return timed(lambda: library.save("document"))[1]


def first_token(batch: Batch, request: Request) -> None:
    """Bring the prompt of a request and read its first token."""
    batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()


def forget(folder: Path) -> None:
    """Drop a folder's files, which are synced, from the system's page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(folder: Path) -> None:
    """Read a folder's files, as many at a time as a restore, and do nothing else."""
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda path: len(path.read_bytes()), folder.iterdir()))


def measure(
    model: PreTrainedModel,
    method: str,
    length: int,
    question: int,
    repeats: int,
    settings: dict[str, Any],
    folder: Path | None,
    fresh_questions: int | None = None,
) -> dict[str, Any]:
    """Ask questions about one document, fresh, after another and, where there is a folder, after a restore."""
    draw = torch.Generator().manual_seed(0)
    document = torch.randint(0, model.config.vocab_size, (length,), generator=draw)
    prompts = [
        torch.cat((document, torch.randint(0, model.config.vocab_size, (question,), generator=draw)))
        for _ in range(repeats + 1)
    ]

    def batch_of(prefix: PrefixCache | None, **other: Any) -> Batch:
        made = Batch(model, method, max_seqs=1, capacity=length + question + 64, prefix_cache=prefix, **settings, **other)
        made.join([0] * 300, max_new_tokens=2, stop=())  # allocates and compiles
        while made.requests:
            made.step()
        return made

    def ask(batch: Batch, ids: torch.Tensor, new: int = 4, **given: Any) -> Asked:
        request = batch.request(ids, max_new_tokens=new, stop=(), **given)
        batch.join(request)
        _, seconds = timed(lambda: first_token(batch, request))
        block_bytes = batch.stats().device_block_bytes
        while batch.requests:
            batch.step()
        return Asked(request.tokens, seconds, request.cached_tokens, block_bytes)

    batch = batch_of(None)
    fresh = [ask(batch, ids) for ids in prompts[1:][:fresh_questions]]
    del batch
    gc.collect()
    prefix = PrefixCache(host_bytes=1 << 50)
    batch = batch_of(prefix)
    first = ask(batch, prompts[0])
    reused = [ask(batch, ids) for ids in prompts[1:]]
    found = {
        "document_s": first.seconds,
        "fresh_s": min((one.seconds for one in fresh), default=None),
        "reuse_s": min(one.seconds for one in reused),
        "first_reuse_s": reused[0].seconds,
        "cached_tokens": [one.cached for one in reused],
        "same_tokens": all(one.tokens == other.tokens for one, other in zip(fresh, reused, strict=False)) if fresh else None,
        "kept_bytes": prefix.kept_bytes,
        "device_block_bytes": max(one.block_bytes for one in reused),
    }
    if folder is None:
        return found
    ask(batch, document, 1, name="document")
    save_s = save(Library(batch.cache, prefix, folder))
    kv_bytes = sum(file.stat().st_size for file in (folder / "document").iterdir())
    del batch, prefix
    gc.collect()

    def restore(*, cold: bool = False, **other: Any) -> tuple[float, list[Asked]]:
        prefix = PrefixCache(host_bytes=1 << 50)
        batch = batch_of(prefix, **other)
        if cold:
            forget(folder / "document")
        _, seconds = timed(Library(batch.cache, prefix, folder).restore)
        return seconds, [ask(batch, ids) for ids in prompts[1:]]

    restore_s, restored = restore()
    _, rebuilt = restore(seed=1)  # no tree that was saved is of this seed
    forget(folder / "document")
    _, read_s = timed(lambda: read(folder / "document"))
    disk_s, _ = restore(cold=True)
    return found | {
        "save_s": save_s,
        "restore_s": restore_s,
        "restored_s": min(one.seconds for one in restored),
        "restored_first_s": restored[0].seconds,
        "rebuilt_first_s": rebuilt[0].seconds,
        "disk_restore_s": disk_s,
        "disk_read_s": read_s,
        "kv_bytes": kv_bytes,
        "same_tokens": found["same_tokens"] is not False and [one.tokens for one in reused] == [one.tokens for one in restored],
    }


def main() -> None:
    """Measure, one JSON line a method."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, length=131072, question=200, repeats=3,
        method="full,pariskv,clusterkv-plus,icecache-digest", device_memory=str, host_memory=str, folder=Path, unsaved=False,
        fresh=int, commit=str, out=Path,
    )  # fmt: skip
    (device, name), report = where(), Report(given.out, given.commit)
    model = load("shipped")[0] if given.shape == "shipped" else build(given.shape, device, layers=given.layers)
    for method in given.method.split(","):
        folder = None if given.unsaved else Path(tempfile.mkdtemp(dir=given.folder))
        settings: dict[str, Any] = {} if method == "full" else {"budget": 1024, "device_memory": given.device_memory}
        if given.host_memory is not None and method != "full":
            settings["host_bytes"] = read_bytes(given.host_memory, "host_memory")
        setting = {"shape": given.shape, "layers": model.config.num_hidden_layers, "length": given.length, "device": name}
        setting |= {"question": given.question, "method": method, **settings}
        try:
            found = measure(model, method, given.length, given.question, given.repeats, settings, folder, given.fresh)
        finally:
            if folder is not None:
                shutil.rmtree(folder)
        report.record(setting, found)


if __name__ == "__main__":
    main()
