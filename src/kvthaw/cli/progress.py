"""How far a command is, on stderr: bars on a terminal, lines without one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from kvthaw.evaluate.evaluator import Progress as State

EVERY = 30.0
"""Seconds between lines while nothing finishes."""


def stderr() -> Console:
    """Return where everything goes that is not the result. Brackets are printed, as they may be a user's."""
    return Console(stderr=True, markup=False, highlight=False)


def say(text: str, style: str = "dim") -> None:
    """Print a line on stderr that is not broken, whatever its length."""
    stderr().print(text, style=style, soft_wrap=True)


_DESCRIPTION = TextColumn("{task.description}", markup=False)
_LIVE: dict[str, Any] = {"transient": True, "redirect_stdout": False, "redirect_stderr": False, "refresh_per_second": 4}


class Lines(Progress):
    """Progress without a terminal: a line for each finished task, and one every EVERY seconds.

    A task's field `line` asks for more lines: "end", or "step" for every update, with the update's description.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console=console, disable=True)
        self._over, self._said = Event(), time.monotonic()
        self._beat = Thread(target=self._repeat, daemon=True)

    def start(self) -> None:
        """Begin to print."""
        self._beat.start()

    def stop(self) -> None:
        """End."""
        self._over.set()
        super().stop()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        """Move a task."""
        task = self._tasks[task_id]
        before, finished = task.completed, task.finished
        super().update(task_id, **changes)
        due = {"step": task.completed > before, "end": task.finished and not finished}
        if due.get(task.fields.get("line", "")):
            self._say([task])

    def _repeat(self) -> None:
        while not self._over.wait(max(0.01, self._said + EVERY - time.monotonic())):
            if time.monotonic() >= self._said + EVERY:
                self._say([task for task in self.tasks if not task.finished] or self.tasks[-1:])

    def _say(self, tasks: Sequence[Task]) -> None:
        self._said = time.monotonic()
        if not tasks:
            return
        parts = [
            task.description if task.total is None else f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"
            for task in tasks
        ]
        elapsed = timedelta(seconds=round(max((task.elapsed or 0 for task in tasks), default=0)))
        self.console.print(f"{'; '.join(parts)} [{elapsed}]", soft_wrap=True)


def bars() -> Progress:
    """Return a context manager: progress bars on stderr, removed when done, or lines if stderr is no terminal."""
    console = stderr()
    if not console.is_terminal:
        return Lines(console)
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    return Progress(_DESCRIPTION, *columns, console=console, **_LIVE)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time, or a line every EVERY seconds."""
    console = stderr()
    with (
        Progress(SpinnerColumn(), _DESCRIPTION, console=console, **_LIVE) if console.is_terminal else Lines(console) as progress
    ):
        progress.add_task(what, total=None)
        yield


def shown(progress: Progress, what: str, total: int) -> Callable[[State], None]:
    """Two bars for a run over samples: how many are done, and how far the one at hand is. Returns what moves them."""
    whole = progress.add_task(what, total=total, line="end")
    part = progress.add_task("prefill", total=None)

    def show(state: State) -> None:
        progress.update(whole, completed=state.samples, total=state.of)
        progress.update(part, completed=state.tokens, total=state.prompt or None, description=state.doing)
        if state.samples == state.of:
            progress.remove_task(part)

    return show


def watched(progress: Progress, what: str) -> Callable[[str, int, int], None]:
    """Add a bar over runs. Returns a function that moves it: watch(current or finished run, runs done, all runs)."""
    task = progress.add_task(what, total=None, line="step")

    def watch(doing: str, done: int, of: int) -> None:
        progress.update(task, description=doing, completed=done, total=of)

    return watch


class Reading:
    """A bar over the tokens of a prompt, from its first token to its last. Call it with the number of prefilled tokens and
    their total.

    kept: a context manager that always ends the bar.
    """

    def __init__(self, kept: ExitStack) -> None:
        self._kept = kept.enter_context(ExitStack())
        self._bar: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        """Move the bar."""
        if self._bar is None:
            progress = self._kept.enter_context(bars())
            self._bar = progress, progress.add_task("prefill", total=total)
        progress, task = self._bar
        description = "offloading and indexing" if done == total else "prefill"
        progress.update(task, completed=done, total=total, description=description)

    def end(self) -> None:
        """Remove the bar; the next call makes another."""
        self._bar = None
        self._kept.close()
