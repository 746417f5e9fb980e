"""The controller's end of a launcher: starts it, asks it for keepers, starts it again if it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canter.controller.launcher import MESSAGE_BYTES, SWEEP
from canter.errors import LaunchError

log = logging.getLogger(__name__)

WARM_S = 300.0
"""Deadline for the launcher to import what it is told to."""
SPAWN_S = 30.0
"""Deadline for a keeper to say who it is."""
LAST_WORD_S = 2.0
"""Deadline for what a keeper that has ended has sent to be read."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A launcher. `modules` are imported before the first fork (`module`, or `module:function` to be checked), with
    `path` before Python's own; `env` is its whole environment; its log is `log`."""

    name: str
    modules: tuple[str, ...]
    path: tuple[str, ...]
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True, slots=True)
class Pending:
    """A keeper that waits for the word `go`. If the connection closes without it, nothing is ever started."""

    pid: int
    start: int
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def go(self) -> None:
        try:
            self._writer.write(b"go")
            async with asyncio.timeout(SPAWN_S):
                await self._writer.drain()
        except (OSError, TimeoutError) as error:
            self.abandon()
            raise LaunchError(f"the keeper (process {self.pid}) died before it started anything: {error}") from error

    async def last_word(self) -> object:
        """What a keeper that has ended had to say of the end; None if it was killed before it could.

        No harness can say that in its place: the connection is the keeper's alone.
        """
        try:
            async with asyncio.timeout(LAST_WORD_S):
                line = await self._reader.readline()
            return json.loads(line) if line else None
        except (OSError, ValueError):
            return None
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Closes the connection; before `go` that calls the start off."""
        self._writer.close()


class Spawner:
    """One launcher. `lock` is the descriptor of the run's lock, which the launcher inherits."""

    def __init__(self, setup: Setup, lock: int) -> None:
        self._setup = setup
        self._lock_fd = lock
        self._control: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The launcher's process id, None while there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the launcher and waits until it is warm. Raises LaunchError if an import fails."""
        self._disconnect()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._setup.log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no import from the working folder
                "-m",
                "canter.controller.launcher",
                str(theirs.fileno()),
                str(self._lock_fd),
                pass_fds=(theirs.fileno(), self._lock_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._setup.env),
                start_new_session=True,
            )
        self._control = ours
        ours.setblocking(False)
        answer = await self._warm(ours, {"path": self._setup.path, "modules": self._setup.modules})
        if "error" in answer:
            self._disconnect()
            raise LaunchError(f"the {self._setup.name} launcher cannot start: {answer['error']}")
        if answer["threads"]:
            log.info(
                "importing %s started threads %s; they do not exist in the forked %s, and locks they hold stay held",
                ", ".join(self._setup.modules),
                answer["threads"],
                self._setup.name,
            )

    async def _warm(self, control: socket.socket, setup: Mapping[str, Any]) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WARM_S):
                await loop.sock_sendall(control, json.dumps(setup).encode())
                answer = await loop.sock_recv(control, MESSAGE_BYTES)
        except TimeoutError:
            self._disconnect()
            raise LaunchError(
                f"the {self._setup.name} launcher did not import {', '.join(self._setup.modules)} within {WARM_S:.0f} s"
            ) from None
        except OSError as error:
            answer = json.dumps({"error": str(error)}).encode()
        return json.loads(answer) if answer else {"error": f"it died; its output is in {self._setup.log}"}

    async def spawn(self, spec: Mapping[str, Any]) -> Pending:
        """A new keeper for `spec` (see `keeper`). Raises LaunchError; then nothing was started and nothing will be."""
        # one at a time: at most one message is under way, so that sending never blocks
        async with self._one_at_a_time:
            try:
                return await self._spawn(spec)
            except LaunchError as error:
                if self._alive():
                    raise
                log.warning("%s; starting it again", error)
                return await self._spawn(spec)

    async def sweep(self) -> None:
        """Ends what keepers have left that were killed."""
        async with self._one_at_a_time:
            if self._control is not None:
                with contextlib.suppress(
                    OSError
                ):  # it is dead or busy; what it does not end is only looked for by name
                    self._control.send(SWEEP)

    async def _spawn(self, spec: Mapping[str, Any]) -> Pending:
        if not self._alive():
            await self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"spawn"], [theirs.fileno()])
        except OSError as error:
            ours.close()
            self._disconnect()
            raise LaunchError(f"the {self._setup.name} launcher takes no requests: {error}") from error
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            async with asyncio.timeout(SPAWN_S):
                writer.write(json.dumps(spec).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
        except OSError:  # or TimeoutError, which is one
            line = b""
        except BaseException:
            writer.close()
            raise
        if not line:  # the launcher is dead, hangs, or cannot fork; one that answers later finds its connection closed
            writer.close()
            self._disconnect()
            raise LaunchError(f"the {self._setup.name} launcher forked no keeper; see {self._setup.log}")
        answer = json.loads(line)
        if "error" in answer:
            writer.close()
            raise LaunchError(f"cannot start the {self._setup.name}: {answer['error']}")
        return Pending(answer["pid"], answer["start"], reader, writer)

    def _alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and self._control is not None

    def _disconnect(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    async def close(self) -> None:
        """Ends the launcher; keepers and what they keep go on."""
        self._disconnect()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


def launcher_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """What a launcher gets of this process's environment: what Python needs to find modules, and `extra`."""
    kept = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    return {name: os.environ[name] for name in kept if name in os.environ} | {"PYTHONUTF8": "1"} | dict(extra)
