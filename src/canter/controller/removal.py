"""Removes a folder that a hostile program may have filled: of any depth, closed to its owner, with links out of it."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

REMOVE_S = 60.0
"""After this a folder that something keeps filling is left as it is."""

_FOLDER = os.O_DIRECTORY | os.O_CLOEXEC


def remove(root: Path, *parts: str) -> None:
    """Removes `root/parts[0]/…`, following no link below `root`: one in the place of the last part is itself removed.

    The folder that it is in goes with it if that was the last, but for `root/parts[0]`. Raises OSError for what cannot
    be removed; what is not there is no error.
    """
    with contextlib.ExitStack() as open_folders, contextlib.suppress(FileNotFoundError):
        above = [open_folders.enter_context(_opened(os.open(root, _FOLDER | os.O_PATH)))]
        for part in parts[:-1]:
            above.append(open_folders.enter_context(_opened(_path(above[-1], part))))
        if not _unlink(above[-1], parts[-1]):
            with _writable(above[-1], parts[-1]) as folder:
                _empty(folder, time.monotonic() + REMOVE_S)
            os.rmdir(parts[-1], dir_fd=above[-1])
        if len(above) > 2:
            with contextlib.suppress(OSError):
                os.rmdir(parts[-2], dir_fd=above[-2])


def _empty(top: int, deadline: float) -> None:
    """Removes all below the folder `top`. Folders in folders are first moved up to it: no depth costs a descriptor."""
    names, mark = itertools.count(), secrets.token_hex(8)
    while found := os.listdir(top):
        for name in found:
            if time.monotonic() > deadline:
                raise TimeoutError("something keeps filling it")
            if _unlink(top, name):
                continue
            with _writable(top, name) as folder:
                for inner in os.listdir(folder):
                    if not _unlink(folder, inner):
                        with _writable(folder, inner):  # to move a folder takes the right to write to it
                            os.rename(inner, f"{mark}{next(names)}", src_dir_fd=folder, dst_dir_fd=top)
            os.rmdir(name, dir_fd=top)


def _unlink(folder: int, name: str) -> bool:
    """False for a folder."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True


@contextlib.contextmanager
def _writable(folder: int, name: str) -> Iterator[int]:
    """A descriptor of a folder in a folder, whose owner gets all rights to it."""
    with _opened(_path(folder, name)) as path:
        itself = f"/proc/self/fd/{path}"  # not its name: that may have become a link to another place
        os.chmod(itself, stat.S_IRWXU)
        with _opened(os.open(itself, _FOLDER | os.O_RDONLY)) as descriptor:
            yield descriptor


def _path(folder: int, name: str) -> int:
    return os.open(name, _FOLDER | os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)


@contextlib.contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
