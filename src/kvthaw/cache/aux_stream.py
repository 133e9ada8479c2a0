"""A stream for what indexes do beside the model: clustering beside a prefill, PRKV's refresh beside decode steps."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class AuxStream:
    """One stream on a device for all layers of a cache, made when it is first asked for: what they do there stands in line, and the
    memory that it takes is one layer's at a time."""

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def run(self, device: torch.device, job: Callable[[], None], *used: Tensor) -> torch.cuda.Event | None:
        """Run a job behind what the current stream has been given so far; the event that ends it. Where the device is no GPU, now,
        and None. used: tensors that it reads and others may let go."""
        if device.type != "cuda":
            job()
            return None
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
            self._made.append(stream)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            job()
            for tensor in used:
                tensor.record_stream(stream)
            done = torch.cuda.Event()
            done.record(stream)
        return done

    def __deepcopy__(self, memo: dict[int, object]) -> AuxStream:
        return AuxStream()
