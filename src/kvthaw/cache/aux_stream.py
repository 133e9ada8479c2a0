"""A stream for what indexes do beside the model: clustering beside a prefill, PRKV's refresh beside decode steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from torch import Tensor


class SpreadWork:
    """Jobs that run in order, some with each step. due: how many advance() have been when all have begun. done: passes when all of
    them are complete; None where the device is no GPU."""

    def __init__(self, device: torch.device, jobs: Iterable[Callable[[], None]] = (), due: int = 0) -> None:
        self.device, self.jobs, self.due = device, deque(jobs), due
        self.start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None


class AuxStream:
    """One stream on a device for all layers of a cache, made when it is first asked for: what they do there stands in line, and the
    memory that it takes is one layer's at a time."""

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: deque[SpreadWork] = deque()
        self._advanced = 0

    def run(self, device: torch.device, job: Callable[[], object], *used: Tensor) -> torch.cuda.Event | None:
        """Run a job behind what the current stream has been given so far; the event that ends it. Where the device is no GPU, now,
        and None. used: tensors that it reads and others may let go."""
        if device.type != "cuda":
            job()
            return None
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            job()
            for tensor in used:
                tensor.record_stream(stream)
            done: torch.cuda.Event = stream.record_event()
        return done

    def spread(self, device: torch.device, jobs: Iterable[Callable[[], None]], steps: int, *used: Tensor) -> SpreadWork:
        """Queue jobs, of which advance() runs some with each of the next steps, behind what the current stream has been given so
        far. used: as for run()."""
        work = SpreadWork(device, jobs, self._advanced + steps)
        if device.type == "cuda":
            work.start = torch.cuda.current_stream(device).record_event()
            for tensor in used:
                tensor.record_stream(self._stream(device))
        self._waiting.append(work)
        return work

    def advance(self) -> None:
        """Run the jobs of a step: as many, in order, as with each step are all when they are due. The host does not wait. A job
        that finds too little memory is left to finish()."""
        count = most = 0
        for work in self._waiting:
            count += len(work.jobs)
            most = max(most, -(-count // max(1, work.due - self._advanced)))
        self._advanced += 1
        if not most:
            return
        # What the jobs make outlives the caller's mode.
        with torch.inference_mode(False), torch.no_grad(), suppress(torch.OutOfMemoryError):
            for _ in range(most):
                self._next(self._waiting[0])

    def finish(self, work: SpreadWork) -> None:
        """Run the remaining jobs of some work. The host does not wait for them."""
        while work.jobs:
            self._next(work)

    def cancel(self, work: SpreadWork) -> None:
        """Cancel the remaining jobs of some work. The host waits for jobs that have begun."""
        if work in self._waiting:
            self._waiting.remove(work)
        work.jobs.clear()
        if work.device in self._streams:
            self._streams[work.device].synchronize()

    def _next(self, work: SpreadWork) -> None:
        if work.device.type != "cuda":
            work.jobs[0]()
        else:
            stream = self._stream(work.device)
            if work.start is not None:
                stream.wait_event(work.start)
                work.start = None
            with torch.cuda.stream(stream):
                work.jobs[0]()
            if len(work.jobs) == 1:
                work.done = stream.record_event()
        work.jobs.popleft()
        if not work.jobs:
            self._waiting.remove(work)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
            self._made.append(self._streams[device])
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, object]) -> AuxStream:
        return AuxStream()
