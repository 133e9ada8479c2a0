"""Folders that are replaced atomically and that only their owner may read."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

OWN = 0o700
"""Mode of a folder that only its owner may read."""
_LEFT = re.compile(r"\.(.+)\.[a-z0-9_]{8}")  # the name of a working folder, by tempfile


@contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """Create a temporary folder next to `path`, locked until it is deleted. Folders of dead processes for this path are
    cleaned up first."""
    clean(path.parent, path.name)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        with suppress(FileNotFoundError, BlockingIOError), ExitStack() as locked:
            locked.enter_context(_lock(folder))
            if folder.exists():  # else another process's clean() deleted it before it was locked
                held = locked.pop_all()
                break
    with held:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clean(parent: Path, name: str | None = None) -> None:
    """Delete what processes left in a folder when they were killed during a save.

    If a process was killed between moving the old cache away and the new one in, moves the new one in first.

    name: of one cache; None: all.
    """
    try:
        hidden = [path for path in parent.iterdir() if _LEFT.fullmatch(path.name)]
    except OSError:  # the folder does not exist or cannot be read now
        return
    for left in hidden:
        own = _LEFT.fullmatch(left.name)[1]  # type: ignore[index]  # it matched
        if name in (None, own):
            with suppress(OSError), _lock(left):
                if (left / "old").exists() and (left / "new").exists() and not (parent / own).exists():
                    os.rename(left / "new", parent / own)
                shutil.rmtree(left)


def delete_folder(path: Path) -> None:
    """Delete a saved cache, if there is one, and leftovers of saves of it. Of a link to a folder only the link is deleted.

    Raises OSError if files remain. A cache that could not be deleted is moved back if it is complete.
    """
    if not os.path.lexists(path):
        clean(path.parent, path.name)
        return
    with working_folder(path) as folder:
        os.rename(path, folder / "old")
        try:
            if (folder / "old").is_symlink():
                os.unlink(folder / "old")
            else:
                shutil.rmtree(folder / "old")
        except OSError:
            with suppress(OSError):
                os.rename(folder / "old", path)
            raise
        sync(path.parent)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a folder's lock. Raises BlockingIOError if another process holds it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def put(new: Path, path: Path, old: Path) -> None:
    """Rename a folder to its final path. An existing one is moved aside first, so readers find the old one, none, or the new
    one."""
    try:
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(new, path)
        sync(path.parent)
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        raise


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
