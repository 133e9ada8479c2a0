"""True scores of rows on the host: the definition against plain products, the kernel against the definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvthaw.cache.host import HostStore
from kvthaw.kernels import HAS_TRITON
from kvthaw.kernels.rerank import TILE
from kvthaw_baselines.kernels import stored_scores
from shapes import DTYPES, HEAD_DIMS


def stored(lengths: Sequence[int], heads: int, dim: int, dtype: torch.dtype) -> HostStore:
    made = HostStore(len(lengths), heads, dim, dtype, block_size=16, pinned=torch.cuda.is_available())
    for seq, length in enumerate(lengths):
        made.append(seq, torch.randn(heads, length, 2, dim).to(dtype))
    return made


def some_rows(lengths: Sequence[int], heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows [B, H, width], as many as there are or fit, in no order; and how many."""
    rows = torch.full((len(lengths), heads, width), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for h in range(heads):
            n = min(width, length)
            rows[b, h, :n] = torch.randperm(length)[:n].int()
    return rows, torch.tensor([min(width, length) for length in lengths], dtype=torch.int32)


SHAPES = [  # lengths of the sequences, heads, group, dim, dtype
    *(([90], 1, 4, dim, torch.bfloat16) for dim in HEAD_DIMS),
    *(([90], 1, 1, 64, dtype) for dtype in DTYPES),
    ([150, 40], 2, 8, 64, torch.float16),
]
shapes = pytest.mark.parametrize(("lengths", "heads", "group", "dim", "dtype"), SHAPES)


@shapes
def test_scores_are_products_of_the_stored_keys(
    lengths: list[int], heads: int, group: int, dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    store = stored(lengths, heads, dim, dtype)
    rows, wanted = some_rows(lengths, heads, TILE)
    query = torch.randn(len(lengths), heads * group, dim).to(dtype)
    found = stored_scores.definition(query.to(device), store.table.on_cpu(), 16, rows.to(device)).cpu()
    for b, n in enumerate(wanted.tolist()):
        keys = store.read(b, 0, lengths[b])[:, :, 0].double()
        for h in range(heads):
            own = keys[h, rows[b, h, :n].long()] @ query[b, h * group : (h + 1) * group].double().T
            torch.testing.assert_close(found[b, h, :, :n].double(), own.T, rtol=1e-5, atol=1e-4)
        assert (found[b, :, :, n:] == -torch.inf).all()


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize(("lengths", "heads", "group", "dim", "dtype"), [SHAPES[1], *SHAPES[6:]])
def test_the_kernel_is_the_definition(
    lengths: list[int],
    heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    splits: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a program reads several tiles or none."""
    monkeypatch.setattr(stored_scores, "SPLITS", splits)
    width, run = 2 * TILE, 16
    store = stored(lengths, heads, dim, dtype)
    rows, wanted = (t.to(device) for t in some_rows(lengths, heads, width))
    query = torch.randn(len(lengths), heads * group, dim).to(dtype).to(device)
    expected = stored_scores.definition(query, store.table.on_cpu(), 16, rows)
    made = stored_scores.launch(query, store.table.on_cpu().to(device), 16, rows, wanted, scale=0.3, run=run)
    for b, n in enumerate(wanted.tolist()):
        torch.testing.assert_close(made.scores[b, :, :, :n], expected[b, :, :, :n], rtol=1e-4, atol=1e-4)
        peaks = expected[b].view(heads, group, -1, run).amax(dim=3)[:, :, : -(-n // run)]
        torch.testing.assert_close(made.peaks[b, :, :, : -(-n // run)], peaks, rtol=1e-4, atol=1e-4)
        mass = torch.logsumexp(made.parts[b, :, :, :, 0] + made.parts[b, :, :, :, 1].log(), dim=2)
        torch.testing.assert_close(mass, torch.logsumexp(0.3 * expected[b], dim=2), rtol=1e-4, atol=1e-4)
    assert made.parts.shape[3] == splits


@pytest.mark.skipif(not HAS_TRITON, reason="no Triton")
def test_layout_is_checked(device: torch.device) -> None:
    store = stored([40], 2, 64, torch.float32)
    rows, wanted = (t.to(device) for t in some_rows([40], 2, TILE))
    query, table = torch.randn(1, 4, 64, device=device), store.table.on_cpu().to(device)
    for bad in (
        (query, table.int(), 16, rows, wanted),
        (query, table, 16, rows.long(), wanted),
        (query, table, 16, rows[:, :, :40], wanted),
        (query, table, 16, rows, wanted.long()),
    ):
        with pytest.raises(AssertionError):
            stored_scores.launch(*bad, scale=1.0)
