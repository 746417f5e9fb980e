"""What `/proc` knows of other processes. Standard library only: the launcher imports this."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
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


def kill_by_environment(entry: bytes) -> int:
    """SIGKILL to every process that was started with the environment entry `entry` (`NAME=value`); returns how many."""
    killed = 0
    for pid in _pids():
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/environ", "rb") as file:
                if entry not in file.read().split(b"\0"):
                    continue
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())
