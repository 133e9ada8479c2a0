"""Several processes at the same work: each has a model of its own and takes units from one list until it is empty.

The parent alone keeps what comes back. A worker that dies loses the variant it was at; another takes over what is left of its unit.
A worker whose parent dies ends with its next line.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from kvthaw.errors import HostMemoryError, KvthawError, at_least
from kvthaw.evaluate import perplexity
from kvthaw.evaluate.job import Unit
from kvthaw.evaluate.perplexity import Reader, Stretch
from kvthaw.evaluate.results import Line
from kvthaw.evaluate.runner import Runner
from kvthaw.evaluate.variant import Variant

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

TRIES = 2
"""How many workers may die of a unit."""
LEAST = 24
"""Variants of a unit for which its prompts are worth a prefill of their own, so that no worker is left alone with the last unit."""


Piece = Unit | Stretch
"""What a worker takes at once."""
Some = list[Line] | list[perplexity.Line]


@dataclass(frozen=True, slots=True)
class Bench:
    """Who works on which kind of piece."""

    runner: Runner
    reader: Reader

    def compute(self, piece: Piece, tell: Callable[[int, int, str], None] = lambda *_: None) -> Iterator[Some]:
        """The lines of a piece, those of one variant at once."""
        return self.runner.compute(piece, tell) if isinstance(piece, Unit) else self.reader.compute(piece, tell)


@dataclass(frozen=True, slots=True)
class Source:
    """Where workers take their model from: as for `kvthaw.evaluate.model.load`. batch: as for Runner."""

    model: str
    device: str | None
    dtype: str
    batch: int | None = None

    def bench(self) -> Bench:
        """A model of one's own, and what works with it."""
        import transformers
        from transformers.utils import logging

        from kvthaw.evaluate.model import load

        logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
        model, tokenizer = load(self.model, device=self.device, dtype=self.dtype)  # type: ignore[arg-type]
        how: dict[str, Any] = {"name": self.model, "batch": self.batch}
        return Bench(Runner(model, tokenizer, **how), Reader(model, tokenizer, **how))


@dataclass(frozen=True, slots=True)
class Failure:
    """A unit, or what was left of it, that gave no lines, and why."""

    unit: Piece
    why: str


@dataclass(slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection
    unit: Piece | None = None
    done: set[Variant] = field(default_factory=set)


def work(source: Source, units: Sequence[Piece], jobs: int, seconds: float | None = None) -> Iterator[Some | Failure]:
    """The lines of units, those of one variant of a unit at once, in the order in which they come.

    jobs: how many processes share the cores. seconds: after so many, whatever is unfinished is given up. A unit that does not fit
    the memory is cut in two; so is one of many variants when fewer are left than there are processes. Raises ConfigError for jobs
    below 1, and KvthawError where a worker cannot even begin.
    """
    at_least(1, jobs=jobs)
    end = None if seconds is None else time.monotonic() + seconds
    waiting, deaths = deque(units), dict[Piece, int]()
    with ExitStack() as stack:
        pieces = sum(1 + (len(piece.variants) >= 2 * LEAST) for piece in waiting)
        crew = {number: _start(source, number, jobs, stack) for number in range(min(jobs, pieces))}
        while crew and (end is None or time.monotonic() < end):
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = set(wait([worker.connection for worker in crew.values()], left))
            for number, worker in [each for each in crew.items() if each[1].connection in ready]:
                try:
                    what, given = worker.connection.recv()
                except (EOFError, ConnectionError):
                    yield from _died(worker, waiting, deaths)
                    del crew[number]
                    if waiting:
                        crew[number] = _start(source, number, jobs, stack)
                    continue
                if what == "lines":
                    assert worker.unit is not None
                    worker.done.add(worker.unit.variants[len(worker.done)])
                    yield given
                    continue
                if what == "broken":  # its device may be, too: a fresh process goes on
                    yield Failure(_rest(worker), given)
                    del crew[number]
                    if waiting:
                        crew[number] = _start(source, number, jobs, stack)
                    continue
                halves = _rest(worker).halves() if what == "memory" else []
                if halves:
                    waiting.extendleft(halves)
                elif what != "ready":
                    if worker.unit is None:
                        raise KvthawError(given)
                    if given:
                        yield Failure(_rest(worker), given)
                worker.unit, worker.done = _take(waiting, jobs), set()
                if worker.unit is None:
                    del crew[number]
                with suppress(ConnectionError):  # a worker that has just died is met at the next turn
                    worker.connection.send(worker.unit)


def _start(source: Source, number: int, jobs: int, stack: ExitStack) -> _Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kvthaw.evaluate.workers", "kvthaw.methods"])
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(source, number, jobs, theirs), daemon=True)
    process.start()
    theirs.close()
    stack.callback(process.join)
    stack.callback(process.terminate)
    stack.callback(mine.close)
    return _Worker(process, mine)


def _died(worker: _Worker, waiting: deque[Piece], deaths: dict[Piece, int]) -> Iterator[Failure]:
    worker.process.join()
    why = f"a worker process died (exit code {worker.process.exitcode})"
    if worker.unit is None:
        raise KvthawError(f"{why} before it began")
    rest = _rest(worker)
    which = replace(rest, variants=())
    deaths[which] = deaths.get(which, 0) + 1
    if deaths[which] < TRIES:
        waiting.appendleft(rest)
    else:
        yield Failure(rest, f"{why}, for the second time at this")


def _take(waiting: deque[Piece], jobs: int) -> Piece | None:
    """The next piece; when fewer are left than there are workers, half of its variants, and the others come later."""
    if not waiting:
        return None
    piece = waiting.popleft()
    half = len(piece.variants) // 2
    if len(waiting) >= jobs - 1 or half < LEAST:
        return piece
    waiting.append(replace(piece, variants=piece.variants[half:]))
    return replace(piece, variants=piece.variants[:half])


def _rest(worker: _Worker) -> Piece:
    """What a worker has not done of its unit."""
    assert worker.unit is not None
    return replace(worker.unit, variants=worker.unit.variants[len(worker.done) :])


def _serve(source: Source, number: int, jobs: int, connection: Connection) -> None:
    """A worker: take units until there is none."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's, who ends the workers
    _settle_on_cores(number, jobs)
    try:
        try:
            bench = source.bench()
        except KvthawError as error:
            connection.send(("refused", str(error)))
            return
        gc.freeze()  # what has been loaded stays; no collection need look at it again
        connection.send(("ready", ""))
        while (unit := connection.recv()) is not None:
            answer = ("done", "")
            try:
                for lines in bench.compute(unit):
                    connection.send(("lines", lines))
                    _leave_room()
            except (torch.OutOfMemoryError, HostMemoryError) as error:
                answer = ("memory", str(error))
            except KvthawError as error:
                answer = ("failed", str(error))
            except (RuntimeError, ValueError) as error:
                answer = ("broken", f"{type(error).__name__}: {error}")
            if answer[0] != "done":  # the error held on to what it met
                gc.collect()
                torch.cuda.empty_cache()
            connection.send(answer)
            if answer[0] == "broken":
                return
    except (EOFError, ConnectionError):  # the parent is gone
        return


def _leave_room() -> None:
    """Give memory that is not in use back to the other processes where a GPU has little left."""
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        if 4 * free < total:
            torch.cuda.empty_cache()


def _settle_on_cores(number: int, jobs: int) -> None:
    """Share the cores evenly, so that no worker's threads wait for another's."""
    import torch

    if not hasattr(os, "sched_setaffinity"):
        torch.set_num_threads(1)
        return
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[number % len(cores) :: jobs] if jobs < len(cores) else [cores[number % len(cores)]]
    os.sched_setaffinity(0, mine)
    torch.set_num_threads(len(mine))
