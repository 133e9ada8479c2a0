"""Tables on the device, a row for each sequence, that grow."""

from __future__ import annotations

from torch import Tensor


def grown(table: Tensor, *least: int) -> Tensor:
    """Return a table with at least these first dimensions, padded with zeros; the table itself if it is large enough."""
    shape = [max(size, known) for size, known in zip(least, table.shape, strict=False)] + list(table.shape[len(least) :])
    if shape == list(table.shape):
        return table
    larger = table.new_zeros(shape)
    if table.numel():
        larger[tuple(slice(0, n) for n in table.shape)] = table
    return larger


def row_to_host(table: Tensor, seq: int) -> Tensor:
    """A sequence's row of a table, in host memory."""
    return table[seq].to("cpu", copy=True)


def row_from_host(table: Tensor, seq: int, row: Tensor) -> None:
    """Copy such a row, or the beginning of one, to a sequence's."""
    table[seq][tuple(slice(0, n) for n in row.shape)].copy_(row)
