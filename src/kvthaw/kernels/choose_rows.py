"""From coarse scores to rows in one launch: what bucket_topk, rerank and topk do, in a cluster of blocks a KV head.

Only for the largest weight of a group's heads, 16 subspaces (128 rotated coordinates) and compute capability 9.0 and above.
Bytes are those of the three kernels without what they hand over: scores of all keys, codes and weights of the candidates. What it
saves are launches and chains of trips to L2, of which some five are left: totals and scores of keys, counts of chunks, codes, and
three barriers of the cluster.

- Each block takes its share of the chunks. The chunks' counts say where a chunk's candidates stand among all of the head, so that
  a block writes each position to the shared memory of the block that reranks it: tiles of 16 in turns, however the keys crowd.
- A warp estimates 16 candidates at a time as rerank does: four lanes a candidate, four subspaces a lane, one product for the four
  subspaces of the lanes and two heads.
- Blocks exchange each head's maximum and sum of exponentials. Then a block counts its candidates by their distance from the
  best, in levels of 1/32 of an octave, and sends the levels that hold its k best to the first block, which does the same with
  what all sent, and ranks what is left by comparing each with each. Where a level holds too many, bytes of weight and position
  decide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_uint

import torch
from torch import Tensor

from kvthaw.kernels import cuda
from kvthaw.kernels.collide import CHUNK, Scores
from kvthaw.kernels.encode import Quantizer, Summaries
from kvthaw.kernels.gpu import nvidia
from kvthaw.kernels.query import Rotated
from kvthaw.kernels.split import shared_memory
from kvthaw.kernels.topk import Merge

FILES = "cluster.cuh", "choose_rows.cu"
SUBS, TILE, MOST, HEADS = 16, 16, 256, 8
"""Subspaces; candidates that a block takes in turn; most rows and most query heads a KV head."""
BLOCKS = 8
"""Of a cluster; no more is promised on every GPU."""
_FIXED = 12 << 10
"""Bytes of shared memory beside the candidates."""


def constants(scored: int, blocks: int = BLOCKS) -> dict[str, int]:
    """What the source is compiled with for so many query heads a KV head."""
    return {"P": scored, "CLUSTER": blocks, "THREADS": 512 if scored <= 4 and blocks <= 8 else 256, "FIXED": _FIXED}


def _share(width: int, blocks: int) -> int:
    """Candidates of a block."""
    return -(-width // (TILE * blocks)) * TILE


def _shared(scored: int, width: int, blocks: int) -> int:
    """Bytes of shared memory of a block."""
    return constants(scored, blocks)["FIXED"] + _share(width, blocks) * 4 * (scored + 1)


def fits(found: Scores, rotated: Rotated, k: int, width: int, policy: Merge, blocks: int = BLOCKS) -> bool:
    """Whether there is the kernel on this device, for so many query heads a KV head, subspaces, rows and candidates."""
    scored, subs = rotated.factors.shape[2:]
    device = found.scores.device
    if found.counts is None or subs != SUBS or scored > HEADS or k > MOST or (policy == "mean" and scored > 1):
        return False
    return nvidia(device, (9, 0)) and cuda.available() and _shared(scored, width, blocks) <= shared_memory(device)


@functools.cache
def _kernel(device: torch.device, scored: int, blocks: int) -> Callable[..., None]:
    major, minor = torch.cuda.get_device_capability(device)
    code = cuda.compiled(FILES, constants(scored, blocks), f"sm_{major}{minor}", str(torch.version.cuda))
    with torch.cuda.device(device):
        return cuda.loaded(code, "choose_rows", shared_memory(device))


def launch(found: Scores, lengths: Tensor, wanted: Tensor, rotated: Rotated, summaries: Summaries, quantizer: Quantizer, width: int,
           k: int, first: int, scale: float, blocks: int = BLOCKS) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rows that topk returns for what rerank makes of bucket_topk's candidates, and counts, where `fits`."""
    assert found.counts is not None and found.totals is not None
    batch, heads, scored, subs = rotated.factors.shape
    capacity, chunks, device = summaries.capacity, found.counts.shape[3], found.scores.device
    given = [found.scores, found.counts, found.totals, lengths, wanted, rotated.whole, rotated.factors]
    given += [summaries.codes, summaries.weights]
    assert all(x.is_contiguous() for x in given) and found.scores.shape[2] == chunks * CHUNK and subs == SUBS
    share = _share(width, blocks)
    rows = torch.empty((batch, heads, k), dtype=torch.int32, device=device)
    counts = torch.empty((batch, heads), dtype=torch.int32, device=device)
    shared, threads = _shared(scored, width, blocks), constants(scored, blocks)["THREADS"]
    _kernel(device, scored, blocks)(
        (blocks, heads, batch), threads, shared, *given, rows, counts, c_int(heads), c_int(capacity), c_int(chunks),
        c_int(k), c_int(first), c_int(share), c_float(scale), *map(c_uint, quantizer.bytes),
    )  # fmt: skip
    return rows, counts
