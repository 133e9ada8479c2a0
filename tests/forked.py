"""A command in a forked child: signals, streams and exit codes as of a process of its own, without the time to import torch."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from said import program


class Forked:
    """A running command."""

    def __init__(self, pid: int, stdout: TextIO, stderr: TextIO) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.code: int | None = None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit code, negative for the signal that ended it."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


def _run(arguments: tuple[str, ...], out: int, err: int) -> int:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ |= {"COLUMNS": "200", "NO_COLOR": "1", "TOKENIZERS_PARALLELISM": "false"}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    sys.argv = ["kvthaw", *arguments]
    try:
        program(arguments)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


@contextmanager
def forked(*arguments: str) -> Iterator[Forked]:
    """Run ``kvthaw`` with arguments; what still runs at the end is killed."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's own of threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _run(arguments, to_out, to_err)
        finally:
            os._exit(code)
    os.close(to_out)
    os.close(to_err)
    with open(out) as stdout, open(err) as stderr:
        command = Forked(pid, stdout, stderr)
        try:
            yield command
        finally:
            if command.code is None:
                command.send(signal.SIGKILL)
                command.wait()
