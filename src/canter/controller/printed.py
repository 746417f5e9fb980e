"""What a harness has printed: files in a folder that it can write, so that anything may stand in their place.

Standard library only: the launcher imports this.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

TAIL_BYTES = 4096


def last_line(file: Path) -> str:
    """The last line with text, "" without one."""
    with contextlib.suppress(OSError):
        descriptor = open_regular(str(file), os.O_RDONLY)
        with open(descriptor, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").strip().splitlines()
            return lines[-1].strip() if lines else ""
    return ""


def cut(file: str, limit: int) -> None:
    """Keeps the first and the last half of `limit` bytes of a log that is longer."""
    with contextlib.suppress(OSError), open(open_regular(file, os.O_RDWR), "r+b") as log:
        size = log.seek(0, os.SEEK_END)
        if size <= limit:
            return
        log.seek(size - limit // 2)
        tail = log.read()
        log.seek(limit // 2)
        log.write(f"\n[... {size - 2 * (limit // 2)} bytes left out ...]\n".encode() + tail)
        log.truncate()


def open_regular(file: str, flags: int) -> int:
    """A descriptor of a regular file. Raises OSError for a link, a pipe (without waiting for its other end), others."""
    descriptor = os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{file} is no regular file")
    return descriptor
