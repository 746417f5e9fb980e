"""The children of a supervised run: `python -m canter.cli.processes gateway|controller|trainer RUN`.

Each reads one JSON line from standard input: who its parent is, where the gateway is, its key. It ends when its parent
dies, and in order when it is told to (SIGTERM).
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from canter.config import Config
from canter.errors import CanterError, StoreError
from canter.runs import RunFolder
from canter.store import Store
from canter.types import KeyKind

log = logging.getLogger("canter")

PR_SET_PDEATHSIG = 1

LOCK_S = 15.0
"""How long a new gateway waits for the store of one that is just ending."""

Work = Coroutine[Any, Any, None]


def main(argv: list[str]) -> int:
    name, run = argv[0], RunFolder(Path(argv[1]))
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    end_with_parent(told["parent"])
    start_logging(run, name)
    from canter.cli import exit_code
    from canter.cli.supervise import load_run

    entries: dict[str, Callable[[RunFolder, Config, dict[str, Any]], Work]] = {
        "gateway": gateway,
        "controller": controller,
        "trainer": trainer,
    }
    try:
        return run_until_told(entries[name](run, load_run(run), told))
    except CanterError as error:
        log.error("%s", error)
        return exit_code(error)


def end_with_parent(parent: int) -> None:
    """Asks the kernel for SIGTERM when the parent dies, and ends now if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the supervising process is gone")


def start_logging(run: RunFolder, name: str) -> None:
    """Everything into `logs/NAME.log`; the trainer, which owns the terminal, shows warnings there, too."""
    to_file = logging.FileHandler(run.logs / f"{name}.log", encoding="utf-8")
    handlers: list[logging.Handler] = [to_file]
    if name == "trainer":
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers)


def run_until_told(work: Work) -> int:
    """Runs to the end, or until SIGTERM or SIGINT cancels it. Returns the exit code."""
    import uvloop

    code: int = uvloop.run(cancelled_by_signals(work))
    return code


async def cancelled_by_signals(work: Work) -> int:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if not task.cancelling():  # a second signal must not cut an orderly end short
            task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        log.info("told to stop")
    return 0


async def gateway(run: RunFolder, config: Config, told: dict[str, Any]) -> None:
    """Owns the store; says on standard output where it listens and, if asked, with which keys."""
    from canter.gateway import open_source
    from canter.gateway.app import create_app
    from canter.gateway.serve import serve

    store = await opened(run)
    source = open_source(config, Path(told["model"]) if told["model"] else None)
    try:
        app = create_app(config, store, source)
        async with serve(app, config.gateway, sock=socket.socket(fileno=told["socket"])) as url:
            answer = {"url": url, **await issue_keys(store, told["issue"])}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            await asyncio.Event().wait()
    finally:
        await source.close()
        await store.close()


async def issue_keys(store: Store, names: list[str]) -> dict[str, str]:
    """A fresh key for each process named; one for `admin` only if this store has never had one."""
    keys = {name: await store.issue_key(KeyKind.SERVICE) for name in names if name != "admin"}
    if "admin" in names and await store.fact("admin_key_issued") is None:
        keys["admin"] = await store.issue_key(KeyKind.ADMIN)
        await store.set_fact("admin_key_issued", True)
    return keys


async def opened(run: RunFolder) -> Store:
    """The run's store, waiting a moment for a gateway that has been killed just now to let go of it."""
    from canter.store import open_store

    deadline = asyncio.get_running_loop().time() + LOCK_S
    while True:
        try:
            return open_store(run.store)
        except StoreError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.5)


async def controller(run: RunFolder, config: Config, told: dict[str, Any]) -> None:
    from canter.client import Client
    from canter.controller.loop import run_controller

    async with Client(told["url"], told["key"]) as client:
        # when the supervisor ends the gateway ends, too: harnesses that went on could only fail
        adopt = told["restarted"]
        await run_controller(config, client, run.path, told["url"], adopt=adopt, stop_harnesses=True)


async def trainer(run: RunFolder, config: Config, told: dict[str, Any]) -> None:
    from canter.cli.training import run_training

    await run_training(run, config, told["url"], told["key"], Path(told["model"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
