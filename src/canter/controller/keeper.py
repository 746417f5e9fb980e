"""The keeper: one small process beside every harness or grader, which outlives controller and launcher.

It is forked by the launcher, reads what to run from its own connection to the controller (so that keys never pass
through the launcher's memory), says who it is, and forks the *worker* only when the controller has said `go`. It
enforces the wall time, and at the end kills whatever is left below it: being a subreaper, it inherits daemons and
double forks; what has left its tree in spite of that is looked for in `/proc`. The last thing it does is to write
`exit.json` and to send the same to the controller. Standard library only.

    spec         {"folder", "record", "places", "cwd", "env", "argv" + "base" + "stdin" | "function" + "argument",
                 "timeout_s", "grace_s", "log_bytes"}: `folder` is the process's own, `record` where the keeper writes,
                 `places` the folders that no process may be left in
    keeper.json  {"pid", "start", "boot"}: who keeps this process
    exit.json    {"outcome", "exit_code", "message", "ended_at", "wall_s", "cpu_s", "keeper_cpu_s", "max_rss_kib"}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from canter.controller import procfs
from canter.controller.printed import cut
from canter.controller.worker import work

KEEPER_FILE = "keeper.json"
EXIT_FILE = "exit.json"

SPEC_S = 30.0
"""Deadline for the controller to say what to run, and then `go`."""
KILL_S = 30.0
"""After this the keeper gives up on processes that even SIGKILL does not end (stuck in the kernel)."""
LONGEST_WAIT_S = 86_400.0
"""One wait; more than the system takes at once is waited for in several."""

_PR_SET_CHILD_SUBREAPER = 36
_STOP = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_WATCHED = _STOP | {signal.SIGCHLD}


def keep(connection: socket.socket, lock: int) -> NoReturn:
    """The whole life of a keeper, in the child of a fork. `lock` is held until `keeper.json` stands."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
        connection.settimeout(SPEC_S)
        spec = json.loads(_line(connection))
        if introduce(connection, spec["record"], lock):
            report(connection, spec["record"], run(spec, connection))
    except (OSError, ValueError) as error:  # no spec, no folder, disk full: nothing runs, and the controller is told
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps({"error": str(error)}).encode() + b"\n")
    except BaseException:  # a fault of ours; standard error is the launcher's log
        traceback.print_exc()
    finally:
        os._exit(0)


def introduce(connection: socket.socket, record: str, lock: int) -> bool:
    """Writes `keeper.json`, tells the controller, and waits for its word; False if it no longer wants this."""
    me = procfs.stat(os.getpid())
    assert me is not None
    file = os.path.join(record, KEEPER_FILE)
    write_json(file, {"pid": me.pid, "start": me.start, "boot": procfs.boot_id()})
    os.close(lock)
    connection.sendall(json.dumps({"pid": me.pid, "start": me.start}).encode() + b"\n")
    if connection.recv(2) == b"go":
        return True
    os.unlink(file)
    return False


def report(connection: socket.socket, record: str, end: Mapping[str, Any]) -> None:
    """Tells of the end: in `exit.json`, which a later controller finds, and to this one if it still lives."""
    try:
        write_json(os.path.join(record, EXIT_FILE), end)
    except OSError as error:  # disk full; standard error is the launcher's log
        sys.stderr.write(f"cannot write {record}/{EXIT_FILE}: {error}\n")
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(end).encode() + b"\n")


def run(spec: Mapping[str, Any], connection: socket.socket) -> dict[str, Any]:
    """Forks the worker, which does not get `connection`, waits for its end or that of its time, kills all that is left.
    Returns what `exit.json` holds."""
    adopt_orphans()
    began = time.monotonic()
    fault_read, fault_write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(fault_read)
        connection.close()
        work(spec, fault_write)
    os.close(fault_write)
    outcome, status = _watch(worker, began + spec["timeout_s"])
    if outcome != "exited":
        status = _ask_to_end(worker, spec["grace_s"])
    status = _kill_tree(worker, status)
    _sweep(spec)
    fault = _read_all(fault_read)
    for name in ("stdout.txt", "stderr.txt"):
        cut(os.path.join(spec["folder"], name), spec["log_bytes"])
    usage, own = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "outcome": "spawn_failed" if fault else outcome,
        "exit_code": None if status is None else os.waitstatus_to_exitcode(status),
        "message": fault,
        "ended_at": time.time(),
        "wall_s": round(time.monotonic() - began, 3),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 3),
        "keeper_cpu_s": round(own.ru_utime + own.ru_stime, 3),
        "max_rss_kib": usage.ru_maxrss,
    }


def adopt_orphans() -> None:
    """Makes this process the parent of all below it whose own parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become a child subreaper")


def _watch(worker: int, deadline: float) -> tuple[str, int | None]:
    """Waits until the worker ends, its time is over, or a signal asks for the end."""
    while (left := deadline - time.monotonic()) > 0:
        got = signal.sigtimedwait(_WATCHED, min(left, LONGEST_WAIT_S))
        if got is None:
            continue
        if got.si_signo in _STOP:
            return "killed", None
        _, status = _reap(worker)
        if status is not None:
            return "exited", status
    return "timed_out", None


def _ask_to_end(worker: int, grace_s: float) -> int | None:
    """SIGTERM to the worker's group and up to `grace_s` for it to end by itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    status = None
    while status is None and (left := deadline - time.monotonic()) > 0:
        signal.sigtimedwait({signal.SIGCHLD}, min(left, LONGEST_WAIT_S))
        _, status = _reap(worker)
    return status


def _kill_tree(worker: int, status: int | None) -> int | None:
    """SIGKILL, again and again, until no process is left below this one. Returns the worker's wait status."""
    deadline = time.monotonic() + KILL_S
    while True:
        left, reaped = _reap(worker)
        status = reaped if status is None else status
        if not left or time.monotonic() > deadline:
            return status
        mine = os.getpgrp()
        for process in procfs.descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # a whole group at once leaves a fork bomb no time to fork
                if process.group != mine:
                    os.killpg(process.group, signal.SIGKILL)
                os.kill(process.pid, signal.SIGKILL)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05)


def _sweep(spec: Mapping[str, Any]) -> None:
    """SIGKILL, again and again, to what was started here and is not below this process any more."""
    me = procfs.stat(os.getpid())
    assert me is not None
    deadline = time.monotonic() + KILL_S
    home = os.path.join(spec["folder"], "home")
    while procfs.sweep(home, spec["places"], me.start) and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)


def _reap(worker: int) -> tuple[bool, int | None]:
    """Reaps every child that has ended. Says whether any is left, and the worker's wait status if it was among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, found
        if pid == 0:
            return True, found
        if pid == worker:
            found = status


def write_json(file: str, value: Mapping[str, Any]) -> None:
    """Writes a file that is either absent or whole."""
    with open(f"{file}.part", "w", encoding="utf-8") as part:
        json.dump(value, part)
    os.replace(f"{file}.part", file)


def _line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        return stream.readline()


def _read_all(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read().decode(errors="replace")
