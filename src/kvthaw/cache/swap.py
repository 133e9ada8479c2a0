"""Swap sequences of a running batch to host memory while others use their slots, and back into any slot."""

from __future__ import annotations

import torch

from kvthaw.cache.kv_cache import KVCache
from kvthaw.cache.swapped import Swapped, SwappedLayer
from kvthaw.errors import CacheError


@torch.inference_mode(False)  # what is made here outlives the caller's mode
@torch.no_grad()
def swap_out(kv: KVCache, seq: int) -> Swapped:
    """Move a decoding sequence to host memory, which empties its slot. Waits for the device.

    Raises HostMemoryError, or CacheError if the method's index cannot be swapped out, with nothing changed.
    """
    kv.rollback_failed_step(ahead=True)
    kv.finish_clear()
    layers: list[SwappedLayer] = []
    try:
        for layer in kv.layers:
            layers.append(layer.swap_out(seq, kv.streams.memory))
    except BaseException:
        for one in layers:
            one.release()
        raise
    found = Swapped(kv.sequences.length(seq), kv.sequences.ring_start[seq], layers)
    for device in {tensor.device for layer in kv.layers for tensor in layer.tensors()[:1]}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    kv.clear(seq)
    return found


@torch.inference_mode(False)
@torch.no_grad()
def swap_in(kv: KVCache, seq: int, swapped: Swapped) -> None:
    """Restore a swapped-out sequence into an empty slot and free its host copy.

    Raises CacheError if the cache was reset or other layers are in force, or torch.OutOfMemoryError. The slot is then
    empty.
    """
    try:
        if any(
            layer.home is None or own.home() is not layer.home for layer, own in zip(kv.layers, swapped.layers, strict=True)
        ):
            raise CacheError("the cache has changed its layers since the sequence left it")
        for layer, own in zip(kv.layers, swapped.layers, strict=True):
            layer.swap_in(seq, own)
        kv.sequences.set_length(seq, swapped.length)
        kv.sequences.ring_start[seq] = swapped.ring_start
    except BaseException:
        kv.clear(seq)
        raise
    finally:
        swapped.release()
