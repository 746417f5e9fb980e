"""The launcher: a small parent that has imported a run's Python modules once and forks a keeper per attempt.

`python -m canter.controller.launcher CONTROL LOCK` gets two inherited descriptors: a socket to the controller, and the
run's lock, which it holds as long as it may still fork. The first message is `{"path", "modules"}`, answered by
`{"threads"}` or `{"error"}` once they are imported; each later one carries the connection of one new keeper, or is
`sweep`: as a subreaper it is the parent of what killed keepers have left, and then ends that.
It ends when the controller does; the keepers go on. Standard library only, but for what it is told to import.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time

from canter.controller import procfs
from canter.controller.keeper import adopt_orphans, keep
from canter.controller.worker import load

MESSAGE_BYTES = 64 * 1024
SWEEP = b"sweep"
SWEEP_S = 2.0
"""Deadline for orphans to be gone."""


def main(argv: list[str]) -> int:
    control, lock = socket.socket(fileno=int(argv[0])), int(argv[1])
    setup = json.loads(control.recv(MESSAGE_BYTES))
    sys.path[:0] = setup["path"]
    try:
        for name in setup["modules"]:
            load(name) if ":" in name else __import__(name)
    except Exception as error:  # whatever a module's top level raises; the controller reports it
        control.send(json.dumps({"error": f"{type(error).__name__}: {error}"[:4096]}).encode())
        return 1
    threads = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    control.send(json.dumps({"threads": threads}).encode())
    serve(control, lock)
    return 0


def serve(control: socket.socket, lock: int) -> None:
    """Forks one keeper per message until the controller is gone."""
    adopt_orphans()
    known = {child.pid for child in _children()}  # what an import has started
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the keepers
    gc.collect()
    gc.freeze()  # collections in the children do not touch, and so do not copy, what was imported
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        if message == SWEEP:
            sweep(known)
            continue
        try:
            child = os.fork()
        except OSError as error:  # no memory or no pids: the controller sees its connection close
            sys.stderr.write(f"cannot fork: {error}\n")
        else:
            if child == 0:
                control.close()
                keep(socket.socket(fileno=descriptors[0]), lock)
            known.add(child)
        os.close(descriptors[0])


def sweep(known: set[int]) -> None:
    """SIGKILL, again and again, to all children but the `known` ones, and to all below them."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        children = _children()
        known &= {child.pid for child in children}
        orphans = [child.pid for child in children if child.pid not in known]
        if not orphans:
            return
        for orphan in orphans:
            for pid in (orphan, *(below.pid for below in procfs.descendants(orphan))):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _children() -> list[procfs.Stat]:
    me = os.getpid()
    return [child for child in procfs.descendants(me) if child.parent == me and not child.dead]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
