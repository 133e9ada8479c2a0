"""Kept prompts that go to a file and come back: `PrefixCache(kv_dir=)`.

`python -m lab.filed --out filed.jsonl` on a GPU: the 8B shape, all layers, a prompt of `--length` tokens whose keys and
values are drawn. One JSON line: block_bytes, what 1,024 tokens take in all layers;

- write_ms: median and most of a block's way to the file, which a step waits for where memory is short. again_ms: once it is in it.
- read_ms: of four blocks back, which a step brings while other requests decode. all_s: of all at once, memory page-locked
  by then.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from kvthaw import Batch, PrefixCache
from kvthaw.evaluate.machine import where
from kvthaw.formatting import read_bytes
from lab.bench.shapes import build
from lab.fill import prompts_drawn
from lab.prefix import timed
from lab.script import Report, options


def main() -> None:
    """Measure, one JSON line."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=int, length=32768, method="pariskv-plus", host_memory=str, folder=Path, commit=str,
        out=Path,
    )  # fmt: skip
    (device, name), report = where(), Report(given.out, given.commit)
    model = build(given.shape, device, layers=given.layers)
    host = None if given.host_memory is None else read_bytes(given.host_memory, "host_memory")
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        prefix = PrefixCache(host_bytes=1 << 50, kv_dir=folder)
        settings: dict[str, Any] = {"budget": 1024, "host_bytes": host, "prefix_cache": prefix}
        batch = Batch(model, given.method, max_seqs=1, capacity=given.length + 64, **settings)
        kv, size = batch.cache.kv, batch.cache.settings.block_size
        ids = torch.randint(0, model.config.vocab_size, (given.length,), generator=torch.Generator().manual_seed(0))
        with prompts_drawn(model):
            request = batch.join(ids, max_new_tokens=1, stop=())
            batch.prefill(request, given.length)
            batch.start(timeout=None)
            batch.read()
        blocks = prefix.stats().kept_tokens // size

        def out() -> list[float]:
            return sorted(1e3 * timed(prefix.drop_oldest)[1] for _ in range(blocks))

        def back(many: int) -> list[float]:
            return [timed(lambda: prefix.fetch(kv, ids, many * size))[1] for _ in range((blocks - 1) // many)]

        written, read, again, whole = out(), sorted(back(4)), out(), back(blocks - 2)
        setting = {"shape": given.shape, "layers": model.config.num_hidden_layers, "length": given.length, "device": name}
        found = {
            "block_bytes": prefix.stats().disk_bytes // blocks,
            "write_ms": [written[len(written) // 2], written[-1]],
            "again_ms": again[len(again) // 2],
            "read_ms": [1e3 * read[len(read) // 2], 1e3 * read[-1]],
            "all_s": whole[0],
        }
        report.record(setting | {"method": given.method}, found)


if __name__ == "__main__":
    main()
