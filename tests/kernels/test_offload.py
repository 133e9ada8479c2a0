"""The kernel that writes rows to host memory, under the interpreter without a GPU, against its definition."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvthaw.cache.host_memory import host_tensor
from kvthaw.kernels.offload import definition, offload
from kvthaw.kernels.row_format import E4M3
from shapes import DTYPES, HEAD_DIMS, poisoned

pytest.importorskip("triton")


def blocks(heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two that hold the same poison, as a store holds them."""
    found, expected = (host_tensor((heads, tokens, 2, head_dim), dtype, pinned=torch.cuda.is_available()) for _ in range(2))
    for one in (found, expected):
        one.copy_(poisoned(heads, tokens, 2, head_dim, dtype=dtype))
    return found, expected


@pytest.mark.parametrize(("head_dim", "dtype"), list(zip([*HEAD_DIMS, 8, 6], itertools.cycle(DTYPES), strict=False)))
@pytest.mark.parametrize(("count", "offset"), [(1, 0), (17, 23), (40, 0)])
def test_against_the_definition(head_dim: int, dtype: torch.dtype, count: int, offset: int, device: torch.device) -> None:
    found, expected = blocks(3, 40, head_dim, dtype)
    ring = torch.randn(3, 50, 2, head_dim).to(dtype).to(device)
    rows = ring[:, 5 : 5 + count]  # as they stand in a ring
    definition(rows, expected, offset)
    offload(rows, found, offset)
    if device.type == "cuda":
        torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert count == 40 or expected.isnan().any(), "what stands beside them is left as it was"


@pytest.mark.parametrize("count", [1, 17, 40])
def test_rows_of_8_bits(count: int, device: torch.device) -> None:
    format = E4M3(24, torch.bfloat16)
    shape, pinned = (3, 40, *format.tail), torch.cuda.is_available()
    found, expected = (host_tensor(shape, format.stored, pinned=pinned).fill_(7) for _ in range(2))
    rows = format.encode(torch.randn(3, count, 2, 24, device=device).bfloat16())
    definition(rows, expected, 40 - count)
    offload(rows, found, 40 - count)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_layout_is_checked(device: torch.device) -> None:
    block_size, _ = blocks(3, 40, 64, torch.float32)
    rows = torch.zeros(3, 8, 2, 64, device=device)
    for bad in ((rows, block_size, 33), (rows, block_size[:2], 0), (rows.half(), block_size, 0), (rows[:, ::2], block_size, 0)):
        with pytest.raises(AssertionError):
            offload(*bad)


@pytest.mark.gpu
def test_only_pinned_memory_is_written() -> None:
    with pytest.raises(AssertionError, match="pinned"):
        offload(torch.zeros(1, 8, 2, 64, device="cuda"), torch.zeros(1, 8, 2, 64), 0)
