"""Tables of which a kernel reads the first entries of every row."""

from __future__ import annotations

from torch import Tensor


def row_stride(table: Tensor, rows: int = 2) -> int:
    """Return the elements between consecutive rows of a table, whose first `rows` dimensions count them; of each row the table may
    be cut to its first entries. Asserts that nothing else lies between."""
    shape, stride = table.shape, table.stride()
    assert all(shape[i] == 1 or stride[i] == shape[i + 1] * stride[i + 1] for i in range(rows - 1)), f"rows lie {stride} apart"
    assert table[(0,) * rows].is_contiguous() if table.numel() else True, f"entries lie {stride} apart"
    return stride[rows - 1]
