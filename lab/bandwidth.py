"""What a GPU's memory and its bus move, of which `kvthaw plan` reckons the time of a step.

`python -m lab.bandwidth --out bandwidth.jsonl`, one line each: device (read and written by a copy within the GPU's memory),
to_device and from_device (copies of page-locked memory), rows (a kernel reads rows of 512 bytes at random places of page-locked
memory, as where selected rows are fetched). gbps: 1e9 bytes a second, the median of some runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvthaw.kernels import HAS_TRITON
from lab.kernels import eager_time
from lab.script import run_kernels

ROW = 512
_NBYTES, _QUICK = 2 << 30, 256 << 20

if HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _read_rows(host, rows, out, WORDS: tl.constexpr, EACH: tl.constexpr):
        # A program reads some rows of 4-byte words and adds them up, so that the loads are not left out.
        at = tl.load(rows + tl.program_id(0) * EACH + tl.arange(0, EACH))
        words = tl.load(host + at[:, None] * WORDS + tl.arange(0, WORDS)[None, :])
        tl.store(out + tl.program_id(0), tl.sum(tl.sum(words, 1), 0))


def lines(*, quick: bool) -> Iterator[dict[str, Any]]:
    """Measure each way."""
    nbytes, each = _QUICK if quick else _NBYTES, 16
    words = nbytes // 4
    here, there = (torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(2))
    host = torch.ones(words, dtype=torch.int32, pin_memory=True)
    rows = torch.randperm(nbytes // ROW, device="cuda")
    out = torch.empty(len(rows) // each, dtype=torch.int32, device="cuda")
    ways = {
        "device": (lambda: there.copy_(here), 2),
        "to_device": (lambda: here.copy_(host, non_blocking=True), 1),
        "from_device": (lambda: host.copy_(here, non_blocking=True), 1),
        "rows": (lambda: _read_rows[(len(out),)](host, rows, out, WORDS=ROW // 4, EACH=each), 1),
    }
    for what, (call, times) in ways.items():
        seconds = eager_time(call, 5)
        yield {"what": what, "bytes": nbytes, "gbps": round(times * nbytes / seconds / 1e9, 1)}
    assert int(out.sum()) == words


if __name__ == "__main__":
    run_kernels(__doc__, lines, {"bench": "bandwidth"})
