"""Check that a model's keys and values are finite: each layer has a flag of each sequence, which is set once they are not.

`kernels/interleave.py` sets it for prompts, and attention for decoded tokens (`kernels/flash_decode.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kvthaw.cache.layer_base import LayerKV
from kvthaw.cache.offloaded_layer import OffloadedLayer
from kvthaw.errors import CacheError
from kvthaw.kernels.gpu import Download, upload

EVERY = 8
"""Steps between two copies of the flags from a GPU, which take two small launches for all layers."""


class _Flags:
    """The flags of some layers, on their way to the host."""

    def __init__(self, layers: Sequence[LayerKV]) -> None:
        found = {layer.number: flag for layer in layers if (flag := layer.nonfinite()) is not None}
        self._layers, self.on_gpu = list(found), any(flag.is_cuda for flag in found.values())
        self.copy = Download(torch.stack(list(found.values())) if found else torch.empty(0, 0))

    def errors(self) -> dict[int, CacheError]:
        """Return an error for each sequence whose flag is set, by its first layer. Waits for the copy."""
        every = self.copy()
        return {
            seq: CacheError(f"the model gave keys or values that are not finite in layer {self._layers[layer]}, sequence {seq}")
            for layer, seq in reversed(every.nonzero().tolist())
        }


def check_prompts(layers: Sequence[OffloadedLayer]) -> None:
    """Raise CacheError if prompts that came since the last call were not finite. Waits for the device if there are any."""
    if any(layer.unchecked for layer in layers):
        raise_first(_Flags(layers).errors())
    for layer in layers:
        layer.unchecked = False


def raise_first(errors: Mapping[int, CacheError]) -> None:
    """Raise the error of the lowest sequence, if there is one, and say what to do."""
    for seq in sorted(errors):
        raise CacheError(f"{errors[seq]}; crop or reset() the cache")


class FiniteCheck:
    """Check the flags of all layers after decode steps, and after each chunk of a prompt.

    On a CPU every look reads the flags. On a GPU every EVERYth look starts a copy to pinned memory, and a later look reads
    it. An error is therefore reported at most 2 * EVERY steps after the device has run the step.
    """

    def __init__(self) -> None:
        self._looks = 0  # since the last copy
        self._cuda = False
        self._asked: _Flags | None = None
        self._prompts: dict[int, _Flags] = {}  # by sequence, after the latest chunk
        self._ended = set[int]()  # sequences whose flags are not cleared yet

    def prompt(self, seqs: Sequence[int], layers: Sequence[OffloadedLayer]) -> None:
        """Start to copy the flags after a chunk of a sequence's prompt, or after the prompts of several sequences.

        Raises CacheError if the chunk before was not finite. On a CPU it also raises for this chunk; on a GPU the next call
        or end() does.
        """
        flags = _Flags(layers)
        for layer in layers:
            layer.unchecked = False
        for seq in seqs if layers else ():
            self.end(seq)
            self._prompts[seq] = flags
        for seq in () if flags.on_gpu else seqs:
            self.end(seq)

    def end(self, seq: int) -> None:
        """Raise CacheError if the latest chunk of a sequence's prompt was not finite. Waits for that chunk."""
        if (flags := self._prompts.pop(seq, None)) is not None:
            raise_first({other: error for other, error in flags.errors().items() if other == seq})

    def forget(self, seq: int) -> None:
        """Ignore the flags of a sequence that has ended, until zero()."""
        self._prompts.pop(seq, None)
        self._ended.add(seq)

    def move(self, slots: Mapping[int, int]) -> None:
        """Note that layers have moved the flags of sequences to other slots."""
        self._ended.update(slots)
        self._ended.difference_update(slots.values())
        self._ask_again()  # it has the flags by former slots

    def _ask_again(self) -> None:
        """Drop a copy under way, and let the next step start one."""
        if self._asked is not None:
            self._asked, self._looks = None, EVERY

    def zero(self, layers: Sequence[LayerKV]) -> None:
        """Clear the flags of all sequences that have ended. Flags of other sequences stay."""
        found = [flag for layer in layers if (flag := layer.nonfinite()) is not None]
        for device in {flag.device for flag in found} if self._ended else ():
            ended = upload([seq for seq in sorted(self._ended) if seq < len(found[0])], torch.int64, device)
            for flag in found:
                if flag.device == device:
                    flag.index_fill_(0, ended, 0)
        self._ended.clear()
        self._ask_again()  # it may have flags of them

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

    def found(self) -> dict[int, CacheError]:
        """Return an error for each sequence whose flag is known to be set; none while a step is captured.

        A flag of a sequence whose prompt is under way is left to end().
        """
        capturing = self._cuda and torch.cuda.is_current_stream_capturing()
        if self._asked is None or capturing or not self._asked.copy.ready():
            return {}
        flags, self._asked = self._asked, None
        return {seq: error for seq, error in flags.errors().items() if seq not in self._prompts and seq not in self._ended}

    def check(self) -> None:
        """Raise the first error of found()."""
        raise_first(self.found())

    def ask(self, layers: Sequence[LayerKV]) -> None:
        """Start to copy all layers' flags to the host, from a GPU every few steps. A later check() reads the copy."""
        self._looks += 1
        if self._cuda and (self._asked is not None or self._looks < EVERY):
            return
        self._looks = 0
        self._cuda = any(flag.is_cuda for layer in layers if (flag := layer.nonfinite()) is not None)
        if not (self._cuda and torch.cuda.is_current_stream_capturing()):
            self._asked = _Flags(layers)

    def look(self, layers: Sequence[LayerKV]) -> None:
        """Run check() and ask(). Raises CacheError at once for flags on a CPU."""
        self.check()
        self.ask(layers)
        if not self._cuda:
            self.check()


def _flags(seq: int, layers: Sequence[LayerKV]) -> dict[int, Tensor]:
    """Return views of a sequence's flags, by number of the layer."""
    return {layer.number: flag[seq] for layer in layers if (flag := layer.nonfinite()) is not None}
