"""Time steps while blocks spill to the host, and while they come back.

`python -m lab.spilling --out spilling.jsonl` on a GPU: eight sequences of some 32k tokens on eight layers of the 8B shape,
with 4 GiB of device memory, which index and pool leave less than half of the blocks. Prompts differ by an eighth of a block, so at
any time some sequence needs its next block and an old one has to spill. Half way the first four sequences end, at once; blocks of
the others come back into their room. A line is one method and device memory:

- spilling, returning: of the steps before and after that, but for the first WARM of each: median_ms, p95_ms, max_ms, over_median
  (the longest step in medians; the goal is 1.3), longest (the longest steps, see `lab.spikes.Events`), moved_blocks,
  host_blocks (more or fewer at the end than at the beginning).
- leaving_ms: the step after which four sequences end.
- moved: whether blocks spilled in the one and came back in the other. It must be true unless device_memory is "auto", where nothing
  has to move: what its longest steps are longer by is not due to blocks. Exits with 1 otherwise.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvthaw import Batch
from kvthaw.evaluate.machine import where
from kvthaw.evaluate.results import noted
from lab.bench.shapes import build
from lab.placement import SIZES, WARM
from lab.script import Report, options
from lab.spikes import Events


def measure(
    model: PreTrainedModel, method: str, seqs: int, length: int, steps: int, memory: int | str, **sizes: Any
) -> dict[str, Any]:
    """Decode half of the steps with all sequences, the others with the last half of them."""
    batch = Batch(model, method, max_seqs=seqs, capacity=length + steps + 1, dense_layers=0, device_memory=memory, **sizes)
    apart, half = max(1, batch.cache.settings.block_size // seqs), steps // 2
    ids = torch.randint(0, model.config.vocab_size, (seqs, length), generator=torch.Generator().manual_seed(1))
    for seq, prompt in enumerate(ids):  # the first end first, so that a step has as many rows as before
        new = half if seq < seqs // 2 else steps + 1
        request = batch.join(prompt[: length - seq * apart], max_new_tokens=new, stop=[])
        batch.prefill(request, request.prompt)
    batch.start(timeout=None)
    batch.read()
    found: dict[str, Any] = {}
    events = Events()
    for name, count in (("spilling", half - 2), ("leaving", 1), ("returning", steps - half)):
        gaps, begin = list[float](), state(batch)
        with events:
            for step in range(count):
                if step == min(WARM, count // 4):
                    gaps, begin = [], state(batch)
                events.next()
                at = time.perf_counter()
                batch.step()
                gaps.append(1e3 * (time.perf_counter() - at))
        moved, host, captures = (now - then for now, then in zip(state(batch), begin, strict=True))
        timed = sorted(gaps)
        found[name] = {
            "median_ms": statistics.median(timed),
            "p95_ms": timed[int(0.95 * len(timed))],
            "max_ms": timed[-1],
            "over_median": timed[-1] / statistics.median(timed),
            "longest": events.longest(gaps),
            "moved_blocks": moved,
            "host_blocks": host,
            "captures": captures,
        }
    found["leaving_ms"] = found.pop("leaving")["max_ms"]
    found["moved"] = found["spilling"]["host_blocks"] > 0 and found["returning"]["host_blocks"] < 0
    return found


def state(batch: Batch) -> tuple[int, int, int]:
    """Return how many blocks were moved so far, how many lie on the host, and how often a step was captured."""
    stats, blocks = batch.stats(), [layer.store for layer in batch.cache.kv.offloaded]
    size = blocks[0].dtype.itemsize * torch.Size(blocks[0].shape).numel()
    return stats.moved_bytes // size, stats.kv_host_bytes // size, stats.captures


def main() -> None:
    """Measure, one JSON line a method and device memory."""
    given = options(
        __doc__, shape="llama-3.1-8b", layers=8, seqs=8, length=32768, steps=800, block_size=int,
        method="clusterkv-plus,pariskv-plus", device_memory="4GiB,auto", commit=str, out=Path,
    )  # fmt: skip
    device, name = where()
    model, report = build(given.shape, device, layers=given.layers), Report(given.out, given.commit)
    still = False
    for method in given.method.split(","):
        for memory in given.device_memory.split(","):
            sizes = {**SIZES[method], "block_size": given.block_size}
            setting = {"shape": given.shape, "layers": model.config.num_hidden_layers, "device": name, "method": method}
            setting |= {"seqs": given.seqs, "length": given.length, "steps": given.steps, "device_memory": memory, **sizes}
            found = measure(model, method, given.seqs, given.length, given.steps, memory, **sizes)
            report.record(setting, found)
            if not found["moved"] and memory != "auto":
                noted(f"{method} with {memory}: no block spilled, or none came back")
                still = True
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    if still:
        sys.exit(1)


if __name__ == "__main__":
    main()
