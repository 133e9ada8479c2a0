"""Restoring a saved document in a new process, which has no page-locked memory yet.

`python -m lab.restored --out restored.jsonl` on a GPU: the 8B shape, all layers, drawn keys and values of `--length` tokens,
own ones in every layer. This process saves them in a folder and starts another one, which loads them. One JSON line a method:

- save_s: to the folder, synced; its files are in the system's page cache then.
- restore_s: `Cache.load` as the first thing that a process does with host memory. again_s: once more, the first cache gone.
- question_s: `--question` tokens behind the document, to the first token; asked_again_s: of the second cache, with all kernels
  compiled.

What it consists of: hash_s, the files hashed where they lie in the page cache, by as many threads as the host has cores; lock_s, as
many blocks of 4 MiB page-locked in a fresh pool.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from transformers import PreTrainedModel

from kvthaw import Cache
from kvthaw.cache.page_locked import PageLocked
from kvthaw.evaluate.machine import where
from kvthaw.formatting import read_bytes
from kvthaw.native import Checksum
from lab.bench.shapes import build
from lab.fill import drawn, fill
from lab.prefix import timed
from lab.script import Report, options

BLOCK = 4 << 20
"""Bytes of 1,024 tokens of the 8B shape."""


def save(model: PreTrainedModel, folder: Path, length: int) -> float:
    """Save drawn tokens in a folder; return the seconds."""
    cache = Cache(model, "full")
    fill(cache, lambda layer: drawn(model, layer, length, 0))
    ids = torch.randint(0, model.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length))
    return timed(lambda: cache.save(folder, ids))[1]


def restore(model: PreTrainedModel, folder: Path, method: str, question: int, host: int | None) -> dict[str, float]:
    """Load a folder twice, each time with a question behind it; then read its files, and hash them."""
    ids = torch.randint(0, model.config.vocab_size, (1, question), generator=torch.Generator().manual_seed(1)).to(model.device)
    settings = {} if method == "full" else {"budget": 1024, "host_bytes": host}

    def once() -> tuple[float, float]:
        cache, loaded = timed(lambda: Cache.load(folder, model, method, **settings))
        return loaded, timed(lambda: model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1))[1]

    restore_s, question_s = once()
    gc.collect()
    again_s, asked_again_s = once()
    gc.collect()
    files = sorted(folder.glob("*.safetensors"))

    def digest(path: Path) -> None:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            Checksum(memoryview(data))

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        _, hash_s = timed(lambda: list(threads.map(digest, files)))
    blocks = sum(path.stat().st_size for path in files) // BLOCK if model.device.type == "cuda" else 0
    _, lock_s = timed(lambda: PageLocked(lambda: None).prepare(BLOCK, blocks))
    found = {"restore_s": restore_s, "question_s": question_s, "again_s": again_s, "asked_again_s": asked_again_s}
    return found | {"hash_s": hash_s, "lock_s": lock_s}


def main() -> None:
    """Save, and start the process that restores; or be this process, where --restore names the folder."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, length=131072, question=200, method="pariskv-plus", host_memory=str, folder=Path,
        restore=Path, commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    with torch.no_grad():
        model = build(given.shape, device, layers=given.layers)
        if given.restore is not None:
            host = None if given.host_memory is None else read_bytes(given.host_memory, "host_memory")
            print(json.dumps(restore(model, given.restore, given.method, given.question, host)))
            return
        folder = Path(tempfile.mkdtemp(dir=given.folder))
        report = Report(given.out, given.commit)
        setting = {"shape": given.shape, "layers": model.config.num_hidden_layers, "length": given.length, "device": name}
        setting |= {"question": given.question}
        try:
            saved = {"save_s": save(model, folder / "document", given.length)}
            saved["kv_bytes"] = sum(file.stat().st_size for file in (folder / "document").iterdir())
            for method in given.method.split(","):
                command = [sys.executable, "-m", "lab.restored", *sys.argv[1:], "--method", method]
                command += ["--restore", str(folder / "document")]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                report.record(setting | {"method": method}, saved | json.loads(done.stdout.splitlines()[-1]))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
