"""The thread that owns the model and its scheduler, and its messages to the event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvthaw.cache.host_memory import release_freed_memory
from kvthaw.engine.lockstep import Cancel, Change, Lockstep
from kvthaw.engine.request import Request
from kvthaw.engine.scheduler import Scheduler
from kvthaw.engine.warm import plan_attention
from kvthaw.formatting import counted
from kvthaw.serve.jobs import Delta, Job
from kvthaw.serve.metrics import Metrics
from kvthaw.serve.watcher import Watcher

Result = TypeVar("Result")
_log = logging.getLogger(__name__)
_HEARTBEAT = 60.0  # seconds after which other processes get an empty inbox
_IDLE = 5.0  # seconds without work after which freed memory is released to the system


@dataclass(eq=False, slots=True)
class _Output:
    """A request in the scheduler. Times as of time.perf_counter(); 0 before they are known."""

    job: Job
    index: int
    request: Request
    placed: float = 0.0
    first: float = 0.0
    latest: float = 0.0


_Task = tuple[Callable[[], None], Sequence[Change]]
"""Work to run between two steps, and the changes that other processes of a split model make at the same time."""


@dataclass(eq=False)
class Worker:
    """Run a scheduler in its own thread. The event loop calls its methods; none of them waits for a step.

    room: most requests at a time, running and waiting, and most outputs beyond the first of each request. Outputs of a
        request beyond half of the slots are queued behind other requests, so that no request waits for all of them.
    draining: callers must submit no more requests.
    failure: the exception that ended the thread. The worker serves nothing afterwards.
    lockstep: keeps the other processes of a split model in step.
    """

    scheduler: Scheduler
    metrics: Metrics
    watcher: Watcher
    room: int
    lockstep: Lockstep = field(default_factory=Lockstep)
    draining: bool = False
    failure: Exception | None = None
    _jobs: set[Job] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _inbox: queue.SimpleQueue[_Task] = field(default_factory=queue.SimpleQueue)
    _outputs: dict[Request, _Output] = field(default_factory=dict)
    _unsent: list[Request] = field(default_factory=list)  # requests with an unsent token of the latest step
    _stepped: float = 0.0  # when that step ended
    _failed: bool = False  # whether the latest step did
    _ended: bool = False
    _worked: bool = False  # whether there was a step since freed memory was released
    _told: float = 0.0  # when the metrics of the cache were set
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._share = max(1, self.scheduler.batch.max_seqs // 2)  # places of one request where others wait
        self._ahead = self.scheduler.ahead

    def start(self) -> None:
        """Start the thread. Call this in the event loop that it serves."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.batch.launched = self._flush
        self._inbox.put((partial(plan_attention, self.scheduler.batch), ()))  # plans are the thread's
        self._thread = threading.Thread(target=self._run, name="kvthaw-worker", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End all requests and, after the step at hand, the thread."""
        self.abort()
        self._inbox.put((self._finish, ()))
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def open(self) -> int:
        """Outputs that have not ended."""
        return sum(len(job.open) for job in self._jobs)

    def full(self, count: int) -> str | None:
        """Return why there is no room for a request of `count` outputs; None if there is."""
        jobs = len(self._jobs)
        if jobs >= self.room:
            return f"{counted(jobs, 'request')} served or waiting; {self.room} may be"
        if (more := self.open - jobs) + count - 1 > self.room:
            return f"requests have {counted(more, 'output')} beyond the first, and {count - 1} would come; {self.room} may"
        return None

    def submit(self, requests: Sequence[Request]) -> Job:
        """Queue requests made by `Batch.request`, for which there is room."""
        job = Job(requests, [next(self._numbers) for _ in requests])
        priorities = [index // self._share for index in range(len(requests))]
        changes = self.lockstep.submits(job.numbers, requests, priorities)
        self._jobs.add(job)
        self._inbox.put((partial(self._submit, job, priorities), changes))
        return job

    async def call(self, work: Callable[[], Result], changes: Sequence[Change] = ()) -> Result:
        """Run work in the thread between two steps and return its result.

        changes: changes that other processes make at the same time.
        """
        told: Future[Result] = Future()
        told.set_running_or_notify_cancel()  # the work is done though its caller is cancelled

        def run() -> None:
            try:
                told.set_result(work())
            except Exception as error:
                told.set_exception(error)

        self._inbox.put((run, changes))
        return await asyncio.wrap_future(told)

    def tell(self, change: Change) -> None:
        """Send a change to the other processes of a split model, from any thread."""
        if self.lockstep.size > 1:
            self._inbox.put((lambda: None, [change]))

    def cancel(self, job: Job) -> None:
        """Remove a job's unfinished outputs from the batch."""
        self._jobs.discard(job)
        if job.open:
            job.close()
            self._put_cancel(job)

    def abort(self) -> None:
        """End all outputs with "abort"."""
        for job in list(self._jobs):
            for index in list(job.open):
                job.push(Delta(index, finished="abort"))
            self._jobs.discard(job)
            self._put_cancel(job)

    # In the event loop, for the thread

    def _deliver(self, pairs: Sequence[tuple[Job, Delta]]) -> None:
        for job, delta in pairs:
            job.push(delta)
            if not job.open:
                self._jobs.discard(job)

    def _put_cancel(self, job: Job) -> None:
        self._inbox.put((partial(self._cancel, job), [Cancel(number) for number in job.numbers]))

    def _end(self, error: Exception) -> None:
        self.failure = error
        self._deliver([(job, Delta(i, finished="error", error=error)) for job in list(self._jobs) for i in list(job.open)])

    # In the thread

    def _run(self) -> None:
        try:
            while not self._ended:
                tasks = self._tasks()
                self.lockstep.send([change for _, changes in tasks for change in changes])
                if tasks:
                    self._flush()
                for run, _ in tasks:
                    run()
                if self.scheduler.busy:
                    self._step()
            self._flush()
            self.lockstep.send(None)
        except Exception as error:
            self._unsent = []
            _log.exception("the worker ends; no request can be served any more")
            self._loop.call_soon_threadsafe(self._end, error)

    def _tasks(self) -> list[_Task]:
        """Return the tasks to run before the next step. Waits for one if there is no step to take."""
        tasks: list[_Task] = []
        idle = not self.scheduler.busy
        with suppress(queue.Empty):
            while True:
                wait = not tasks and idle
                tasks.append(self._inbox.get(wait, _IDLE if self._worked else _HEARTBEAT))
        if idle and not tasks and self._worked:
            self._worked = False
            release_freed_memory()
        return tasks

    def _finish(self) -> None:
        self._ended = True

    def _submit(self, job: Job, priorities: Sequence[int]) -> None:
        for index, (request, priority) in enumerate(zip(job.requests, priorities, strict=True)):
            output = _Output(job, index, request)
            try:
                self.scheduler.submit(request, priority=priority)
                self._outputs[request] = output
            except Exception as error:
                self._send([self._failure(output, error)])

    def _cancel(self, job: Job) -> None:
        for request in job.requests:
            if self._outputs.pop(request, None) is not None:
                self.scheduler.cancel(request)
                self.metrics.finished("abort")

    def _step(self) -> None:
        began, self._worked = time.perf_counter(), True
        self.scheduler.ahead = self._ahead and not self.watcher.recording
        try:
            with self.watcher.watching():
                told = self.scheduler.step()
        except Exception as error:
            self._flush()
            self._recover(error)
            return
        self._flush()
        self._failed = False
        self.lockstep.note(told)
        self.watcher.take(told)
        now = self._stepped = time.perf_counter()
        for output in self._outputs.values():
            if not output.placed and output.request.seq >= 0:
                output.placed = began
                self.metrics.queued.observe(max(0.0, began - output.job.arrived))
        self._unsent = told
        if self.scheduler.ahead or not self.scheduler.decoding:  # else the next step is launched first
            self._flush()
        if now - self._told > 1 or not self.scheduler.busy:
            self._told = now
            batch = self.scheduler.batch
            self.metrics.cache(batch.stats(), None if batch.prefix_cache is None else batch.prefix_cache.stats())

    def _recover(self, error: Exception) -> None:
        """Retry a failed step once; if it fails again, end its requests. Raises the error for a split model, whose other processes
        may be in mid-step."""
        if self.scheduler.split:
            raise error
        _log.error("a step failed", exc_info=error)
        again, self._failed = not self._failed, not self._failed
        if again:
            return
        scheduler = self.scheduler
        for request in scheduler.decoding or scheduler.prefilling or scheduler.waiting:
            scheduler.cancel(request)
            self._send([self._failure(self._outputs.pop(request), error)])

    def _take(self, output: _Output, now: float) -> tuple[Job, Delta]:
        """Return the delta that a step added to an output, and record its metrics."""
        request, metrics, arrived = output.request, self.metrics, output.job.arrived
        if request.finished is not None:
            del self._outputs[request]
        if request.error is not None and request.finished is not None:  # earlier ones are of its name
            return self._failure(output, request.error)
        first = not output.first
        if first:
            output.first = now
            metrics.first_token.observe(now - arrived)
            metrics.prompt_tokens.inc(request.prompt)
        else:
            metrics.between_tokens.observe(now - output.latest)
        output.latest = now
        if request.finished is not None:
            metrics.whole.observe(now - arrived)
            metrics.finished(request.finished)
            if len(request.tokens) > 1:
                metrics.per_token.observe((now - output.first) / (len(request.tokens) - 1))
        scores, before = request.logprobs[-1:], request.prompt_logprobs if first else ()
        new, cached = request.tokens[-1:], request.cached_tokens if first else 0
        return output.job, Delta(output.index, new, request.decode(), scores, before, request.finished, cached_tokens=cached)

    def _failure(self, output: _Output, error: Exception) -> tuple[Job, Delta]:
        self.metrics.finished("error")
        return output.job, Delta(output.index, finished="error", error=error)

    def _flush(self) -> None:
        """Count and send the latest step's tokens, unless already sent. While requests decode, the batch calls it after
        launching the next step. Text decoding and the event loop then overlap with the device."""
        unsent, self._unsent = self._unsent, []
        if unsent:  # a job whose next step failed has its error already
            told = [self._take(self._outputs[request], self._stepped) for request in unsent if request in self._outputs]
            self._send(told)
            self.metrics.generation_tokens.inc(sum(len(delta.tokens) for _, delta in told))

    def _send(self, pairs: Sequence[tuple[Job, Delta]]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, pairs)
