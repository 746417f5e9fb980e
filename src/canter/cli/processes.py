"""The children of a supervised run: `python -m canter.cli.processes gateway|controller|trainer RUN`.

Each reads one JSON line from standard input (who its parent is, where the gateway is, its key) and ends when its parent dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from canter.config import Config
from canter.errors import CanterError
from canter.runs import RunFolder

log = logging.getLogger("canter")

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    name, run = argv[0], RunFolder(Path(argv[1]))
    told: dict[str, Any] = json.loads(sys.stdin.readline())
    end_with_parent(told["parent"])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from canter.cli import exit_code
    from canter.cli.supervise import load_run

    config = load_run(run)
    entries = {"gateway": gateway, "controller": controller, "trainer": trainer}
    try:
        return run_until_told(entries[name](run, config, told))
    except CanterError as error:
        log.error("%s", error)
        return exit_code(error)


def end_with_parent(parent: int) -> None:
    """Asks the kernel for SIGTERM when the parent dies, and ends now if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("the supervising process is gone")


def run_until_told(work: Coroutine[Any, Any, None]) -> int:
    """Runs to the end, or until SIGTERM or SIGINT cancels it. Returns the exit code."""
    if sys.platform == "linux":
        import uvloop

        return uvloop.run(_cancelled_by_signals(work))
    return asyncio.run(_cancelled_by_signals(work))


async def _cancelled_by_signals(work: Coroutine[Any, Any, None]) -> int:
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    return 0
