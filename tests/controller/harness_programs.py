"""Harnesses that tests launch as Python functions."""
# ruff: noqa: T201 - harnesses print

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def nothing(task: dict[str, Any]) -> None:
    """Ends at once."""


def answer(task: dict[str, Any]) -> None:
    print(task["input"].get("say", "42"))


def sleep(task: dict[str, Any]) -> None:
    time.sleep(60)


def report(task: dict[str, Any]) -> None:
    """What this process is given."""
    own = {
        "environ": dict(os.environ),
        "initial": Path("/proc/self/environ").read_text(),
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "task": task,
        "file": json.loads(Path(os.environ["CANTER_TASK"]).read_text()),
        "descriptors": sorted(_descriptors()),
        "modules": sorted(sys.modules),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }
    Path("report.json").write_text(json.dumps(own))


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if int(number) > 2:
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                yield os.readlink(f"/proc/self/fd/{number}")


def fail(task: dict[str, Any]) -> None:
    raise RuntimeError("the agent tripped")


def leave(task: dict[str, Any]) -> None:
    sys.exit(task["input"]["code"])


async def coroutine(task: dict[str, Any]) -> None:
    await asyncio.sleep(0)
    print("awaited")


def thread(task: dict[str, Any]) -> None:
    """Ends like any program: after its threads, but not after those of an idle pool."""
    pool = ThreadPoolExecutor()
    pool.submit(int).result()
    threading.Thread(target=lambda: (time.sleep(0.2), print("from a thread"))).start()


def breed(task: dict[str, Any]) -> None:
    """Leaves children behind in every way there is, their pids in `pids`, and sleeps."""
    _child("plain")
    _child("session", os.setsid)
    _child("deaf", _deaf)
    if os.fork() == 0:  # a daemon: new session, parent gone
        os.setsid()
        _child("daemon")
        os._exit(0)
    os.wait()
    _note()
    while len(Path("pids").read_text().split()) < 5:
        time.sleep(0.01)
    if not task["input"].get("leave"):
        time.sleep(60)


def _deaf() -> None:
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _child(name: str, prepare: Any = lambda: None) -> None:
    if os.fork() == 0:
        prepare()
        _note()
        time.sleep(60)
        os._exit(0)


def _note() -> None:
    with open("pids", "a", encoding="ascii") as file:
        file.write(f"{os.getpid()}\n")


def deaf(task: dict[str, Any]) -> None:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _note()
    time.sleep(60)


def flood(task: dict[str, Any]) -> None:
    """100 MB on standard output, with a first and a last line."""
    print("first")
    for _ in range(100):
        sys.stdout.write("x" * 10**6)
    print("\n42")


def closed(task: dict[str, Any]) -> None:
    os.close(1)
    os.close(2)


def flaky(task: dict[str, Any]) -> None:
    """Kills its keeper the first time."""
    mark = Path(task["input"]["mark"])
    if not mark.exists():
        mark.touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    print("42")


def wait_for(task: dict[str, Any]) -> None:
    """Ends when a file appears."""
    while not Path(task["input"]["file"]).exists():
        time.sleep(0.02)
    print("42")
