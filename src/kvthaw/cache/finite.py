"""Check that keys and values are finite, without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.device_lengths import Download
from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.errors import CacheError

EVERY = 8
"""Steps between two copies of the flags from a GPU, which take two small launches for all layers."""


class PromptCheck:
    """Check that keys and values of prompts were finite in each layer, by their extremes. Only wait() makes the host wait."""

    def __init__(self, layers: Sequence[OffloadedLayer]) -> None:
        self._layers = [layer.number for layer in layers for _ in layer.extremes]
        if self._layers:
            self._finite = Download(torch.stack([number for layer in layers for number in layer.extremes]).isfinite())

    def wait(self) -> None:
        """Raise CacheError for the first layer with keys or values that are not finite."""
        if self._layers and not (finite := self._finite()).all():
            layer = self._layers[finite.tolist().index(False)]
            raise CacheError(f"the model gave keys or values that are not finite in layer {layer}")


def check_prompts(layers: Sequence[OffloadedLayer]) -> None:
    """Raise CacheError for the first layer whose prompts have keys or values that are not finite."""
    PromptCheck(layers).wait()
    for layer in layers:
        layer.extremes = []


class FiniteCheck:
    """Check the non-finite flags of all layers' attention kernels, and prompts that come in chunks.

    On a CPU every look reads the flags. On a GPU every EVERYth look starts a copy to pinned memory, and a later look reads
    it. An error is therefore reported at most 2 * EVERY steps after the device has run the step.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._cuda = False
        self._asked: tuple[list[int], Download] | None = None  # layers, and their flags that are on their way
        self._prompts: dict[int, PromptCheck] = {}  # by sequence, of the latest chunk

    def prompt(self, seq: int, layers: Sequence[OffloadedLayer]) -> None:
        """Take the extremes of a chunk of a sequence's prompt from the layers.

        Raises CacheError if the chunk before was not finite. On a CPU it also raises for this chunk; on a GPU the next call
        or end() does.
        """
        check, runs_on = PromptCheck(layers), any(number.is_cuda for layer in layers for number in layer.extremes)
        for layer in layers:
            layer.extremes = []
        self.end(seq)
        self._prompts[seq] = check
        if not runs_on:
            self.end(seq)

    def end(self, seq: int) -> None:
        """Raise CacheError if the latest chunk of a sequence's prompt was not finite. Waits for that chunk."""
        check = self._prompts.pop(seq, None)
        if check is not None:
            check.wait()

    def forget(self, seq: int, layers: Sequence[LayerKV]) -> None:
        """Forget the prompt of a sequence and clear the flags of all layers, which this sequence may have set."""
        self._prompts.pop(seq, None)
        if flags := [flag for layer in layers if (flag := layer.nonfinite()) is not None]:
            torch._foreach_zero_(flags)

    def check(self) -> None:
        """Raise CacheError for the first layer whose flag is known to be set. Does nothing while a step is captured."""
        if self._asked is not None and not torch.cuda.is_current_stream_capturing() and self._asked[1].ready():
            (layers, flags), self._asked = self._asked, None
            self._raise(next((layer for layer, flag in zip(layers, flags().tolist(), strict=True) if flag), None))

    def ask(self, layers: Sequence[LayerKV]) -> dict[int, Tensor]:
        """Start to copy all layers' flags from the GPU, every few steps. A later check() reads the copy.

        Returns the flags that are on a CPU, by layer.
        """
        self._looks += 1
        if self._cuda and (self._asked is not None or self._looks % EVERY):
            return {}
        found = {layer.number: flag for layer in layers if (flag := layer.nonfinite()) is not None}
        self._cuda = any(flag.is_cuda for flag in found.values())
        if not self._cuda:
            return found
        if not torch.cuda.is_current_stream_capturing():
            self._asked = list(found), Download(torch.cat(list(found.values())))
        return {}

    def look(self, layers: Sequence[LayerKV]) -> None:
        """Run check() and ask(). Raises CacheError at once for flags on a CPU."""
        self.check()
        self._raise(next((layer for layer, flag in self.ask(layers).items() if flag), None))

    def __deepcopy__(self, memo: dict[int, object]) -> FiniteCheck:
        return FiniteCheck()

    def _raise(self, layer: int | None) -> None:
        if layer is not None:
            raise CacheError(
                f"the model gave keys or values that are not finite in layer {layer} while decoding; crop or reset() the cache"
            )
