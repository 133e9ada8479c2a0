"""Check that a model's keys and values are finite: of prompts by their extremes, of decoded tokens by flags of the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.errors import CacheError
from kvthaw.kernels.gpu import Download

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

    def prompt(self, seqs: Sequence[int], layers: Sequence[OffloadedLayer]) -> None:
        """Take the extremes of a chunk of a sequence's prompt from the layers, or of the prompts of several sequences.

        Raises CacheError if the chunk before was not finite. On a CPU it also raises for this chunk; on a GPU the next call
        or end() does.
        """
        check, runs_on = PromptCheck(layers), any(number.is_cuda for layer in layers for number in layer.extremes)
        for layer in layers:
            layer.extremes = []
        for seq in seqs:
            self.end(seq)
            self._prompts[seq] = check
        for seq in () if runs_on else seqs:
            self.end(seq)

    def end(self, seq: int) -> None:
        """Raise CacheError if the latest chunk of a sequence's prompt was not finite. Waits for that chunk."""
        check = self._prompts.pop(seq, None)
        if check is not None:
            check.wait()

    def forget(self, seq: int, layers: Sequence[LayerKV]) -> None:
        """Forget the prompt of a sequence and clear its flags in all layers. Flags of other sequences stay."""
        self._prompts.pop(seq, None)
        self._asked = None  # it may have a flag of this sequence
        if flags := _flags(seq, layers):
            torch._foreach_zero_(list(flags.values()))

    def export(self, seq: int, layers: Sequence[LayerKV]) -> list[int]:
        """Return the numbers of the layers that have the flag of a sequence set. Waits for the device."""
        flags = _flags(seq, layers)
        found = torch.stack(list(flags.values())).tolist() if flags else []
        return [number for number, flag in zip(flags, found, strict=True) if flag]

    def load(self, seq: int, layers: Sequence[LayerKV], nonfinite: Sequence[int]) -> None:
        """Set the flags of a sequence in the layers of these numbers."""
        for number, flag in _flags(seq, layers).items() if nonfinite else ():
            if number in nonfinite:
                flag.fill_(1)

    def check(self) -> None:
        """Raise CacheError for the first layer whose flag is known to be set. Does nothing while a step is captured."""
        capturing = self._cuda and torch.cuda.is_current_stream_capturing()
        if self._asked is None or capturing or not self._asked[1].ready():
            return
        (layers, flags), self._asked = self._asked, None
        for layer, flag in zip(layers, flags().tolist(), strict=True):
            if any(flag):
                raise CacheError(
                    f"the model gave keys or values that are not finite in layer {layer} while decoding sequence {flag.index(1)}; "
                    "crop or reset() the cache"
                )

    def ask(self, layers: Sequence[LayerKV]) -> None:
        """Start to copy all layers' flags to the host, from a GPU every few steps. A later check() reads the copy."""
        self._looks += 1
        if self._cuda and (self._asked is not None or self._looks % EVERY):
            return
        found = {layer.number: flag for layer in layers if (flag := layer.nonfinite()) is not None}
        self._cuda = any(flag.is_cuda for flag in found.values())
        if found and not (self._cuda and torch.cuda.is_current_stream_capturing()):
            self._asked = list(found), Download(torch.stack(list(found.values())))

    def look(self, layers: Sequence[LayerKV]) -> None:
        """Run check() and ask(). Raises CacheError at once for flags on a CPU."""
        self.check()
        self.ask(layers)
        if not self._cuda:
            self.check()


def _flags(seq: int, layers: Sequence[LayerKV]) -> dict[int, Tensor]:
    """Return views of a sequence's flags, by number of the layer."""
    return {layer.number: flag[seq] for layer in layers if (flag := layer.nonfinite()) is not None}
