"""Tables on the device that grow."""

from __future__ import annotations

from torch import Tensor


def grown(table: Tensor, *least: int) -> Tensor:
    """A table at least so long in its first dimensions, with zeros behind what it had; itself where it is long enough."""
    shape = [max(size, known) for size, known in zip(least, table.shape, strict=False)] + list(table.shape[len(least) :])
    if shape == list(table.shape):
        return table
    larger = table.new_zeros(shape)
    larger[tuple(slice(0, n) for n in table.shape)] = table
    return larger
