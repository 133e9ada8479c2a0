"""Strides of tables that a kernel reads only the first entries of, in every row."""

from __future__ import annotations

from torch import Tensor


def row_stride(table: Tensor, rows: int = 2) -> int:
    """Return the distance between consecutive rows of a table, in elements.

    rows: how many leading dimensions count the rows.

    The table may be a view of the first entries of every row. Asserts that the leading dimensions are contiguous among
    themselves and that the entries of a row are contiguous.
    """
    shape, stride = table.shape, table.stride()
    assert all(shape[i] == 1 or stride[i] == shape[i + 1] * stride[i + 1] for i in range(rows - 1)), f"rows lie {stride} apart"
    assert table[(0,) * rows].is_contiguous() if table.numel() else True, f"entries lie {stride} apart"
    return stride[rows - 1]
