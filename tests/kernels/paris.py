"""What the tests of ParisKV's kernels share: shapes, poison, summaries of random keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvthaw.index.ratios import Ratios
from kvthaw.kernels.collide import CHUNK
from kvthaw.kernels.encode import Summaries, count, encode, make_quantizer
from kvthaw.kernels.query import Rotated, in_bytes
from kvthaw.kernels.srht import Rotation, make_rotation

SHAPES = [  # head_dim, query heads a KV head, lengths of the sequences, dtype
    (64, 2, (1, 0, 63), torch.float32),
    (80, 1, (100,), torch.bfloat16),
    (128, 4, (2100,), torch.float16),
    (256, 2, (65,), torch.bfloat16),
    (8, 3, (40,), torch.float32),
]
SEED = 3


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever torch allocates empty meanwhile holds NaN or nonsense."""
    patch, empty = pytest.MonkeyPatch(), torch.empty

    def poison(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        if made.is_floating_point():
            return made.fill_(torch.nan)
        made.view(torch.uint8).fill_(99)  # every byte
        return made

    with patch.context() as inner:
        inner.setattr(torch, "empty", poison)
        yield


def blank(seqs: int, heads: int, rotation: Rotation, longest: int, device: torch.device, bits: int = 4) -> Summaries:
    """Summaries with room for `longest` keys that hold nonsense and count nothing."""
    subs, room = rotation.padded // 8, max(1, -(-longest // CHUNK)) * CHUNK
    return Summaries(
        torch.full((seqs, heads, subs, room), 77, dtype=torch.uint8, device=device),
        torch.full((seqs, heads, room, subs), 77, dtype=torch.int32, device=device),
        None if bits == 3 else torch.full((seqs, heads, room, subs), torch.nan, dtype=torch.bfloat16, device=device),
        torch.zeros((seqs, heads, subs, 256), dtype=torch.int32, device=device),
    )


class Case:
    """Sequences of random keys of one KV head or two, summarised by the definition."""

    def __init__(
        self,
        dim: int,
        group: int,
        lengths: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        k: int = 10,
        bits: int = 4,
    ) -> None:
        self.dim, self.group, self.heads = dim, group, 2 if dim in (16, 64) else 1
        self.rotation, self.quantizer = make_rotation(dim, SEED, device=device), make_quantizer(device, bits)
        self.keys = [(torch.randn(self.heads, n, dim) * 2).to(dtype).to(device) for n in lengths]
        made = blank(len(lengths), self.heads, self.rotation, max(lengths), torch.device("cpu"), bits)
        on_cpu = make_rotation(dim, SEED), make_quantizer(bits=bits)
        for seq, keys in enumerate(self.keys):
            encode(keys[None].cpu(), *on_cpu, [made], [seq], [0])
        count(made, range(len(lengths)), [0] * len(lengths), lengths)
        ids, codes, sizes = (table.to(device) for table in (made.ids, made.codes, made.sizes))
        self.summaries = Summaries(ids, codes, None if made.weights is None else made.weights.to(device), sizes)
        ratios = Ratios()
        self.k, self.width = k, -(-ratios.most(made.capacity, k) // 64) * 64
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.wanted = torch.tensor([ratios.wanted(n, k) for n in lengths], dtype=torch.int32, device=device)
        self.limits = torch.tensor([ratios.limits(n) for n in lengths], dtype=torch.int32, device=device)
        self.query = torch.randn(len(lengths), self.heads * group, dim).to(dtype).to(device)


def check_bytes(rotated: Rotated) -> None:
    """That a kernel rounded its rotated queries as it should."""
    want = in_bytes(rotated.values)
    assert torch.equal(rotated.factors, want.factors)
    assert int((rotated.whole.int() - want.whole.int()).abs().max()) <= 1
    assert float((rotated.whole != want.whole).float().mean()) < 1e-3  # just about half of a unit
