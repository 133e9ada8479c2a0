"""Index work that is queued for one kernel, or runs on a side stream.

Thirty layers in one kernel take little longer than one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvthaw.kernels.gpu import uncached_casts, upload

_Made = TypeVar("_Made")
_KEPT = 8


class DeferredBatch:
    """Work that layers queue until one of them needs its result, and small tables that all of them need.

    An owner calls flush() before it reads or writes the targets of its queued work.

    owners: the owners of queued work, with the kind that each queued last.
    lost: sequences whose work was dropped, because it or earlier work failed.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Callable[[Sequence[Any]], None], list[Any], set[int]]] = {}
        self.owners: dict[object, Hashable] = {}
        self._made: dict[Hashable, Any] = {}
        self.lost: set[int] = set()

    def defer(
        self, owner: object, kind: Hashable, work: Callable[[Sequence[Any]], None], item: Any, seqs: Iterable[int] = ()
    ) -> None:
        """Queue an item that belongs to `seqs`. work(items) later runs once for all items of a kind, after the owner's earlier
        work."""
        kinds = list(self._waiting)
        if kind in kinds and owner in self.owners and kinds.index(self.owners[owner]) > kinds.index(kind):
            self.flush()
        _, items, of = self._waiting.setdefault(kind, (work, [], set()))
        items.append(item)
        of.update(seqs)
        self.owners[owner] = kind

    def flush(self) -> None:
        """Run all queued work, kinds in their order of arrival. If one fails, the rest is dropped."""
        waiting, self._waiting = list(self._waiting.values()), {}
        self.owners.clear()
        for i, (work, items, _) in enumerate(waiting):
            try:
                work(items)
            except BaseException:
                self.lost.update(*(seqs for _, _, seqs in waiting[i:]))
                raise

    def clear(self) -> None:
        """Drop all queued work, whose owners are gone. Else it would hold them, and the blocks that they read."""
        self._waiting.clear()
        self.owners.clear()
        self.lost.clear()

    def once(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """Return make(), cached per key. The eight latest keys are kept. The result is read-only and used on the current
        stream."""
        if key not in self._made:
            if len(self._made) == _KEPT:
                del self._made[next(iter(self._made))]
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    def numbers(self, rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
        """Return rows of numbers on the device, [R, C] int32, copied once for all layers without a host sync."""
        kept = tuple(rows)
        return self.once((kept, device), lambda: upload(kept, torch.int32, device))


class SpreadWork:
    """Jobs that run in order, a few with each step.

    due: the number of advance() calls by which all jobs must have begun.
    done: event that passes when all jobs are complete; None if the device is no GPU.
    """

    def __init__(self, device: torch.device, jobs: Iterable[Callable[[], None]] = (), due: int = 0) -> None:
        self.device, self.jobs, self.due = device, deque(jobs), due
        self.start: torch.cuda.Event | None = None
        self.done: torch.cuda.Event | None = None


class AuxStream:
    """One side stream per device for all layers of a cache, created on first use.

    Work on it runs in order, so it takes the memory of one layer at a time.
    """

    def __init__(self, made: list[torch.cuda.Stream] | None = None) -> None:
        self._made = [] if made is None else made  # streams of the cache, this one's included
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._waiting: deque[SpreadWork] = deque()
        self._advanced = 0

    @uncached_casts()
    def run(self, device: torch.device, job: Callable[[], object], *used: Tensor) -> torch.cuda.Event | None:
        """Run a job on the side stream, after the work that the current stream has been given so far.

        Returns the event that ends the job. Off a GPU, runs the job at once and returns None.

        used: tensors that the job reads and that their owners may free meanwhile.
        """
        if device.type != "cuda":
            job()
            return None
        stream = self._stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                job()
                for tensor in used:
                    tensor.record_stream(stream)
                done: torch.cuda.Event = stream.record_event()
        except BaseException:  # what the job began may still read what its caller frees
            self.join(device)
            raise
        return done

    def join(self, device: torch.device) -> None:
        """Make the current stream wait for all work on the side stream."""
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])

    def spread(self, device: torch.device, jobs: Iterable[Callable[[], None]], steps: int, *used: Tensor) -> SpreadWork:
        """Queue jobs after the work that the current stream has been given so far. advance() runs a few of them with each
        step.

        steps: the number of steps within which all jobs begin.
        used: as in run().
        """
        work = SpreadWork(device, jobs, self._advanced + steps)
        if device.type == "cuda":
            work.start = torch.cuda.current_stream(device).record_event()
            for tensor in used:
                tensor.record_stream(self._stream(device))
        self._waiting.append(work)
        return work

    def advance(self) -> None:
        """Run this step's jobs in order: the number that keeps all queued work on time if every step runs that many.

        The host does not wait. A job that runs out of memory is left to finish().
        """
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
        """Run the remaining jobs of `work`. The host does not wait for them."""
        while work.jobs:
            self._next(work)

    def cancel(self, work: SpreadWork) -> None:
        """Cancel the remaining jobs of `work`. The host waits for jobs that have begun."""
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
