"""A controller as a process of its own, for tests that kill it: `controller_process.py URL KEY RUN_DIR SETTINGS`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from canter.client import Client
from canter.config import resolve
from canter.controller.loop import run_controller


async def main(url: str, key: str, run_dir: str, settings: str) -> None:
    config = resolve(json.loads(settings), base=Path(__file__).parent)
    async with Client(url, key) as client:
        await run_controller(config, client, Path(run_dir), url)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
