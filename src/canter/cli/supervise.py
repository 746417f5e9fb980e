"""Starts the processes of a run, gives each its own key, restarts what dies, and stops them in order.

The children talk to this process only at their start: a JSON line on standard input tells them where the gateway is and
which key is theirs, so that no key stands in an argument list or an environment. A child ends when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from canter.config import Config, load
from canter.errors import CanterError, ConfigError
from canter.runs import RunFolder

log = logging.getLogger(__name__)

START_S = 60.0
"""Deadline for the gateway to answer."""
TORCH_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "passive",  # waiting threads that spin take the cores from harnesses
    "MALLOC_MMAP_THRESHOLD_": "1073741824",  # keep freed memory: page faults cost a third of a step on CPU
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MKL_CBWR": "AUTO",  # the same sums whatever the batch, so that a seed gives the same tokens
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
STOP_S = 75.0
"""Deadline of a graceful stop, longer than a controller ever takes to end its harnesses; then the child is killed."""
FINAL = (2, 3)
"""Exit codes that another start would only repeat: settings that cannot work, too many drops."""
RESTARTS = 5
"""Crashes within `RESTART_WINDOW_S` that end the run."""
RESTART_WINDOW_S = 120.0


@dataclass
class Child:
    """One supervised process. `crashes` are the times at which it died by a signal or an unexpected error."""

    name: str
    process: asyncio.subprocess.Process
    crashes: list[float] = field(default_factory=list)


@dataclass
class Supervisor:
    run: RunFolder
    config: Config
    model: Path | None
    listening: socket.socket
    """The gateway's; held here, so that connections wait while the gateway is started again."""
    children: dict[str, Child] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)
    """What the gateway said at its start: `url`, and the keys it was asked for."""

    async def start_gateway(self, keys: Sequence[str] = ()) -> None:
        """Starts it, again and again if it dies at that; `keys` names the processes that need a fresh key."""
        told = {"socket": self.listening.fileno(), "issue": list(keys)}
        while True:
            child = await self._spawn("gateway", told, stdout=asyncio.subprocess.PIPE)
            if line := await first_line(child.process):
                break
            await self._give_up_or_retry(child)
        self.gateway = {**self.gateway, **json.loads(line)}

    async def start(self, name: str) -> None:
        """Starts `controller` or `trainer` with its own key."""
        await self._spawn(name, {"url": self.gateway["url"], "key": self.gateway[name]})

    async def _spawn(self, name: str, told: dict[str, Any], *, stdout: int | None = None) -> Child:
        log_file = self.run.logs / f"{name}.log"
        with log_file.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "canter.cli.processes",
                name,
                str(self.run.path),
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout,
                stderr=None if name == "trainer" else errors,
                env=environment(name),
                pass_fds=[self.listening.fileno()] if name == "gateway" else [],
                start_new_session=True,
            )
        assert process.stdin is not None
        old = self.children.get(name)
        message = {**told, "model": str(self.model) if self.model else None, "parent": os.getpid()}
        message["restarted"] = old is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its exit says more than this write
            process.stdin.write(json.dumps(message).encode() + b"\n")
            await process.stdin.drain()
            process.stdin.close()
        child = Child(name, process, old.crashes if old else [])
        self.children[name] = child
        return child

    async def watch(self, until: str | None) -> int:
        """Waits for child `until` to finish (for ever if None) and returns its exit code; restarts whatever dies."""
        while True:
            waits = {asyncio.create_task(child.process.wait()): child for child in self.children.values()}
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                child, code = waits[task], task.result()
                if child.name == until and code >= 0:
                    return code
                await self._restart(child)

    async def _restart(self, child: Child) -> None:
        await self._give_up_or_retry(child)
        await (self.start_gateway() if child.name == "gateway" else self.start(child.name))

    async def _give_up_or_retry(self, child: Child) -> None:
        """Waits a moment before another start of a child that has ended. Raises where that would be of no use."""
        await self._end(child)
        code = child.process.returncode or 0
        if code in FINAL:
            raise ConfigError(f"the {child.name} cannot run: {self.last_log(child.name)}")
        how = f"died by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        now = time.monotonic()
        child.crashes[:] = [t for t in child.crashes if now - t < RESTART_WINDOW_S] + [now]
        if len(child.crashes) > RESTARTS:
            raise CanterError(
                f"the {child.name} {how}, {len(child.crashes)} times in a row: {self.last_log(child.name)}"
            )
        log.warning("the %s %s; starting it again", child.name, how)
        await asyncio.sleep(min(5.0, 0.2 * 2 ** len(child.crashes)))

    async def stop(self, name: str) -> None:
        if child := self.children.pop(name, None):
            await self._end(child)

    async def _end(self, child: Child) -> None:
        """Tells it to stop, if it still runs; kills it after a deadline."""
        if child.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            child.process.terminate()
        try:
            await asyncio.wait_for(child.process.wait(), STOP_S)
        except TimeoutError:
            log.warning("the %s did not stop within %s s; killing it", child.name, STOP_S)
            child.process.kill()
            await child.process.wait()

    def last_log(self, name: str) -> str:
        file = self.run.logs / f"{name}.log"
        lines = file.read_text(errors="replace").strip().splitlines() if file.exists() else []
        last = lines[-1] if lines else "no output"
        return f"{last.partition(' ERROR canter: ')[2] or last} (all of it in {file})"


async def first_line(process: asyncio.subprocess.Process) -> bytes:
    """What it says first on standard output; nothing if it ends, or says nothing within `START_S`."""
    assert process.stdout is not None
    try:
        return await asyncio.wait_for(process.stdout.readline(), START_S)
    except TimeoutError:
        return b""


@contextlib.asynccontextmanager
async def supervised(run: RunFolder, keys: Sequence[str]) -> AsyncIterator[Supervisor]:
    """A running gateway and controller; stops trainer, controller and gateway, in this order, at the end."""
    config = load_run(run)
    from canter.gateway.serve import bind

    model = await asyncio.to_thread(model_folder, config)
    supervisor = Supervisor(run, config, model, bind(config.gateway))
    try:
        await supervisor.start_gateway(keys)
        await supervisor.start("controller")
        yield supervisor
    finally:
        for name in ("trainer", "controller", "gateway"):
            await supervisor.stop(name)
        supervisor.listening.close()


async def train(run: RunFolder) -> int:
    async with interruptible(), supervised(run, ("controller", "trainer")) as supervisor:
        await supervisor.start("trainer")
        code = await supervisor.watch(until="trainer")
    if code == 0:
        click.echo(f"next: canter rollouts list {run.path}    or open {run.report}")
    elif code in FINAL:
        click.echo("what this run has recorded stays as it is; mend the cause, then start a new run", err=True)
        click.echo(f"next: canter rollouts list {run.path}", err=True)
    else:
        click.echo(f"the trainer stopped with exit code {code}; to go on: canter train --resume {run.path}", err=True)
    return code


async def serve(run: RunFolder) -> int:
    async with interruptible(), supervised(run, ("controller", "admin")) as supervisor:
        click.echo(f"gateway: {supervisor.gateway['url']}")
        if admin := supervisor.gateway.get("admin"):
            click.echo(f"admin key (shown this once): {admin}")
        if supervisor.config.engine.use != "openai":
            click.echo("no engine serves the model yet: register one with PUT /api/engines (docs/serve.md)")
        await supervisor.watch(until=None)
    return 0


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[None]:
    """SIGTERM and SIGINT cancel this task once, so that everything is stopped in order; then `click.Abort`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise click.Abort from None


def environment(name: str) -> dict[str, str]:
    """This process's, with what torch must find before it is loaded; settings of the user's own come first."""
    if name != "trainer":
        return {"OMP_NUM_THREADS": "1", **os.environ}
    return {**TORCH_ENVIRONMENT, **os.environ}


def load_run(run: RunFolder) -> Config:
    """The settings of a run folder, with relative paths starting where its TOML file lay."""
    config = load(run.config).model_copy(update={"base": Path(run.manifest().get("base", run.path))})
    files = {"tls_cert": config.gateway.tls_cert, "tls_key": config.gateway.tls_key}
    found = {name: str(config.path(file)) for name, file in files.items() if file}
    return config.model_copy(update={"gateway": config.gateway.model_copy(update=found)})


def model_folder(config: Config) -> Path | None:
    """The folder of weights and tokenizer (converted from a package at first use); None in pass-through mode."""
    if config.engine.use == "openai":
        return None
    from canter.engine.models import resolve

    return resolve(config.model.path, base=config.base, say=partial(click.echo, err=True))
