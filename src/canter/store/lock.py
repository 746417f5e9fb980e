"""One writer per store: a lock on a side file that the kernel releases with the process, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from canter.errors import StoreError


class WriterLock:
    """Holds `PATH.lock`; the file says which process does. Raises `StoreError` where another one has it."""

    def __init__(self, store: Path) -> None:
        self.path = store.with_name(store.name + ".lock")
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"cannot open {self.path}: {error.strerror}; is its folder there and writable?") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise StoreError(
                f"{store} is open for writing in process {holder}; stop it, or reach the store through its gateway"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets the next writer in. The file stays: removing it could part two writers that each hold a lock."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)
