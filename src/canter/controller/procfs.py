"""What `/proc` knows of other processes. Standard library only: the launcher imports this."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stat:
    """A process. `start` (clock ticks since boot) tells it from a later one with the same `pid`."""

    pid: int
    state: str
    parent: int
    group: int
    start: int

    @property
    def dead(self) -> bool:
        """Whether it has ended and only waits to be reaped."""
        return self.state in ("Z", "X")


def stat(pid: int) -> Stat | None:
    """The process `pid`, None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name stands in parentheses and may itself hold spaces and parentheses
    fields = text[text.rindex(")") + 2 :].split()
    return Stat(pid, fields[0], int(fields[1]), int(fields[2]), int(fields[19]))


def boot_id() -> str:
    """Names this boot of the machine; pids and start times mean nothing in another."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def alive(pid: int, start: int) -> bool:
    """Whether the process that had this pid and start time still runs."""
    found = stat(pid)
    return found is not None and found.start == start and not found.dead


def descendants(pid: int) -> list[Stat]:
    """All processes below `pid`, parents before children."""
    children: dict[int, list[Stat]] = {}
    for other in _pids():
        if (found := stat(other)) is not None:
            children.setdefault(found.parent, []).append(found)
    below = list(children.get(pid, ()))
    for child in below:  # grows while it is read
        below += children.get(child.pid, ())
    return below


def sweep(home: str, places: Sequence[str], since: int) -> int:
    """SIGKILL to every process that began at `since` (clock ticks since boot) or later and was started with the
    environment entry `HOME=home`, or has its working folder, root or program below one of `places`.

    Returns how many. It finds processes that have left their parents and sessions; one that has left all of this, too,
    is not found.
    """
    killed = 0
    entry = b"HOME=" + os.fsencode(home)
    for pid in _pids():
        found = None if pid == os.getpid() else stat(pid)
        if found is None or found.dead or found.start < since:
            continue
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if _below(pid, places) or entry in _environment(pid):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def _below(pid: int, places: Sequence[str]) -> bool:
    for link in ("cwd", "root", "exe"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/{link}").removesuffix(" (deleted)")
            if any(path == place or path.startswith(f"{place}/") for place in places):
                return True
    return False


def _environment(pid: int) -> list[bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isascii() and name.isdigit())
