"""One rollout of a harness on this machine, with a model in this process, and an account of what came of it.

Everything between the harness and the model is what a run uses: recipe, process runner, gateway over HTTP, tokens,
SQLite store, samples. Only the trainer is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Collection, MutableMapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from canter.client import Client
from canter.config import Config
from canter.controller.loop import run_controller
from canter.engine import Engine
from canter.engine.scripted import FILES, SUB_FILE, scripted_engine
from canter.errors import BadRequest
from canter.gateway.app import create_app
from canter.gateway.engines import Engines
from canter.gateway.http import Receive, Scope, Send, json_object
from canter.gateway.policy import PolicySource
from canter.gateway.serve import App, serve
from canter.gateway.stream import Timing
from canter.harness import train_labels
from canter.runs import RunFolder
from canter.samples import Batch, audit, build
from canter.store import Store, open_store
from canter.tokens.byte_level import byte_level_tokenizer
from canter.tokens.rendering import Rendering, make_rendering
from canter.tokens.tokenizer import ChatTokenizer
from canter.types import (
    Attempt,
    Call,
    EngineRecord,
    ForkCause,
    KeyKind,
    Outcome,
    Reason,
    Rollout,
    RolloutState,
    Task,
)

ROLLOUT = "trial"
_OURS = (f"Bearer ck-{KeyKind.SERVICE}-".encode(), f"Bearer ck-{KeyKind.GRADER}-".encode())
"""What the controller and the grader send, who use the gateway, too."""
_REFUSAL_BYTES = 1000
_KEPT_BYTES = 4 * 1024 * 1024
"""Of a request's body, to show what a refused one asked for."""
_STOP_S = 60.0
"""For the controller to end what still runs."""
_SPARE_S = 90.0
"""Beyond the harness's own time: for the launchers to start, and for the grader."""


@dataclass(frozen=True, slots=True)
class Model:
    """What answers: an engine, and how conversations become its tokens."""

    tokenizer: ChatTokenizer
    rendering: Rendering
    engine: Engine


def scripted_model(**settings: Any) -> Model:
    """The scripted policy behind a byte-level tokenizer; `settings` are those of `scripted_engine`."""
    tokenizer = byte_level_tokenizer()
    stop_id = tokenizer.stop_token_ids[0]
    engine = scripted_engine(
        tokenizer.encode_list, tokenizer.decode, stop_id=stop_id, vocab=tokenizer.vocab_size, **settings
    )
    return Model(tokenizer, make_rendering(tokenizer, "template"), engine)


@dataclass(slots=True)
class Seen:
    """One HTTP request of the harness. `digest` is of its body, by which its call is found; `status` 0: no answer;
    `refusal` is the beginning of what it was told instead of a reply."""

    method: str
    path: str
    user_agent: str
    at: float
    status: int = 0
    digest: bytes = b""
    refusal: bytes = b""
    call: Call | None = None
    body: dict[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        return self.status >= 400

    @property
    def words(self) -> str:
        """What the refusal says: the message of its error, or all of it where it has none."""
        with contextlib.suppress(BadRequest):
            error = json_object(self.refusal).get("error")
            if isinstance(error, dict) and isinstance(error.get("message"), str):
                return str(error["message"])
        return self.refusal.decode("utf-8", "replace")


class Watched:
    """The gateway, with a look at every request that is not of the controller or the grader."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.requests: list[Seen] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if scope["type"] != "http" or headers.get(b"authorization", b"").startswith(_OURS):
            await self._app(scope, receive, send)
            return
        agent = headers.get(b"user-agent", b"").decode("latin-1")
        query = scope["query_string"].decode("latin-1")
        seen = Seen(scope["method"], scope["path"] + (f"?{query}" if query else ""), agent, time.time())
        self.requests.append(seen)
        digest, body = hashlib.blake2b(digest_size=16), bytearray()

        async def receiving() -> MutableMapping[str, Any]:
            message = await receive()
            digest.update(message.get("body", b""))
            body.extend(message.get("body", b"")[: _KEPT_BYTES - len(body)])
            seen.digest = digest.digest()
            return message

        async def sending(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                if seen.refused:  # no call will tell what was asked for
                    with contextlib.suppress(BadRequest):
                        seen.body = json_object(bytes(body))
            elif seen.refused and len(seen.refusal) < _REFUSAL_BYTES:
                seen.refusal += message.get("body", b"")[:_REFUSAL_BYTES]
            await send(message)

        await self._app(scope, receiving, sending)

    async def close(self) -> None:
        await self._app.close()


@dataclass(frozen=True, slots=True)
class Trial:
    """What one rollout left.

    `batch` is built as the trainer does, beside another rollout of the same group that made no call (a group of one
    has no baseline); `faults` is what the audit of it found wrong. `offered` are the files that the commands in the
    replies make. `errors` is what went wrong outside the rollout.
    """

    run: RunFolder
    rollout: Rollout
    attempts: tuple[Attempt, ...]
    calls: tuple[Call, ...]
    requests: tuple[Seen, ...]
    batch: Batch
    faults: tuple[str, ...]
    labels: tuple[str, ...] | None
    offered: tuple[str, ...]
    wall_s: float
    errors: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The last attempt's."""
        return self.run.attempts / ROLLOUT / str(max(1, self.rollout.attempt))

    @property
    def expected(self) -> tuple[str, ...]:
        """The files that the commands of the scripted policy make."""
        return FILES

    @property
    def made(self) -> tuple[str, ...]:
        """Those that lie in the working folder: which commands were really executed."""
        return tuple(name for name in (*FILES, SUB_FILE) if (self.folder / "work" / name).is_file())

    @property
    def ran(self) -> bool:
        """Whether anything of the harness itself was ever executed."""
        return bool(self.attempts) and self.attempts[-1].outcome is not Outcome.SPAWN_FAILED

    @property
    def answered(self) -> bool:
        return any(len(call.sampled) for call in self.calls)

    @property
    def forks(self) -> list[tuple[Call, ForkCause]]:
        """Calls that do not extend their proposed parent; what the batch found unexplained is among them."""
        return [(call, call.fork) for call in self.calls if call.fork is not None]

    @property
    def untrained(self) -> list[tuple[Call, Reason]]:
        """Calls with sampled tokens that are in no sample, although their label trains."""
        reasons = self.batch.untrained
        return [
            (call, reasons[call.id])
            for call in self.calls
            if call.id in reasons and len(call.sampled) and reasons[call.id] is not Reason.LABEL_EXCLUDED
        ]

    def verdict(self) -> list[str]:
        """What stands against training this harness; empty if nothing does."""
        return [
            *self.errors,
            *self._end(),
            *([] if self.answered or not self.ran else ["it got no reply from the model"]),
            *_unknown(self.batch),
            *(f"call {c.ordinal}: {len(c.sampled)} sampled tokens are not trained: {why}" for c, why in self.untrained),
            *self.faults,
        ]

    def _end(self) -> list[str]:
        last = self.attempts[-1] if self.attempts else None
        if last is None:
            return ["it was never started"]
        if not self.ran:
            return [f"it could not be started: {last.message}"]
        if last.outcome is not Outcome.EXITED:
            return [f"it did not finish: {last.outcome or 'it still ran'} {last.message}".rstrip()]
        if last.exit_code != 0:
            return [self._failure(last)]
        if self.rollout.state is not RolloutState.SCORED:
            return [f"its rollout is {self.rollout.state}, not scored: {self.rollout.message}"]
        return []

    def _failure(self, last: Attempt) -> str:
        """Without its last words, of which the report shows more, unless something else is to blame."""
        failure = f"it ended with exit code {last.exit_code}" + ("" if self.answered else " before any answered call")
        return failure if last.reason in (None, Reason.NO_CALLS) else f"{failure}: {last.message}"


def _unknown(batch: Batch) -> list[str]:
    count = batch.report.forks[ForkCause.UNKNOWN]
    return [f"{count} forks of cause unknown"] if count else []


Between = Callable[[str], AbstractAsyncContextManager[str]]
"""Gateway's URL → while it is open, the URL that the harness is given."""


async def run_trial(
    config: Config,
    run: RunFolder,
    task: Task,
    model: Model,
    *,
    timing: Timing | None = None,
    between: Between = contextlib.nullcontext,
) -> Trial:
    """Runs the harness of `config` once at `task` and waits for its end. Every wait has a deadline.

    The store, the attempt's folder and the record stay in `run`. `between` can put something between harness and
    gateway. Raises ConfigError and LaunchError where the harness cannot be started at all.
    """
    began = time.monotonic()
    store = open_store(run.store)
    try:
        async with _gateway(config, store, model, timing or Timing()) as (url, watched):
            rollout = Rollout(ROLLOUT, "trial", task, max_attempts=1)
            await store.create_rollouts([rollout])
            async with Client(url, await store.issue_key(KeyKind.SERVICE)) as client, between(url) as harness_url:
                errors = await _controlled(config, client, run.path, harness_url, store)
        return await _account(config, run, store, watched.requests, time.monotonic() - began, errors)
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def _gateway(config: Config, store: Store, model: Model, timing: Timing) -> AsyncIterator[tuple[str, Watched]]:
    engines = Engines(lambda url, key: model.engine)
    await engines.register(EngineRecord("local:", "trial", 0), "none")
    source = PolicySource(config, model.rendering, model.tokenizer, engines)
    watched = Watched(create_app(config, store, source, timing=timing))
    try:
        async with serve(watched, config.gateway, grace_s=2.0) as url:
            yield url, watched
    finally:
        await source.close()


async def _controlled(config: Config, client: Client, run: Path, url: str, store: Store) -> tuple[str, ...]:
    """Runs a controller until the rollout has ended; what went wrong with that. Then nothing of the harness runs."""
    controller = asyncio.create_task(run_controller(config, client, run, url, stop_harnesses=True))
    deadline = time.monotonic() + config.harness.timeout_s + config.grader.timeout_s + _SPARE_S
    ended = asyncio.create_task(_until_ended(store, deadline))
    try:
        await asyncio.wait({controller, ended}, return_when=asyncio.FIRST_COMPLETED)
        if controller.done():
            controller.result()  # it never ends by itself but with an error
        return () if ended.done() and ended.result() else ("the rollout did not end in time",)
    finally:
        ended.cancel()
        controller.cancel()
        await asyncio.wait({controller}, timeout=_STOP_S)


async def _until_ended(store: Store, deadline: float) -> bool:
    """True once the rollout is in a final state, False at the deadline."""
    after = 0
    while not (await store.rollout(ROLLOUT)).state.terminal:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if events := await store.events(after, timeout_s=min(left, 5.0)):
            after = events[-1].seq
    return True


async def _account(
    config: Config, run: RunFolder, store: Store, requests: list[Seen], wall_s: float, errors: Sequence[str]
) -> Trial:
    rollout = await store.rollout(ROLLOUT)
    calls = sorted(await store.calls([ROLLOUT]), key=lambda call: call.ordinal)
    offered: set[str] = set()
    for call in calls:
        bodies = await store.bodies(call.id)
        _match(call, bodies.request, requests)
        offered |= {name for name in (*FILES, SUB_FILE) if name.encode() in (bodies.reply or b"")}
    labels = train_labels(config)
    batch = batch_of(rollout, calls, labels)
    faults = audit(batch, calls) if rollout.state is RolloutState.SCORED else []
    attempts = tuple(await store.attempts(ROLLOUT))
    return Trial(
        run,
        rollout,
        attempts,
        tuple(calls),
        tuple(requests),
        batch,
        tuple(faults),
        labels,
        tuple(sorted(offered)),
        wall_s,
        tuple(errors),
    )


def batch_of(rollout: Rollout, calls: Sequence[Call], labels: Collection[str] | None) -> Batch:
    """The samples of one rollout, as beside another of its group that made no call."""
    other = replace(rollout, id=f"{rollout.id}-other", index=1, reward=0.0)
    return build([rollout, other], calls, labels=labels)


def _match(call: Call, raw: bytes, requests: Sequence[Seen]) -> None:
    """Finds the requests that a call answered: those with its body that no earlier call has. A retry that joined it or
    got its reply again is one of them."""
    digest = hashlib.blake2b(raw, digest_size=16).digest()
    body = json_object(raw)
    free = [seen for seen in requests if seen.digest == digest and seen.call is None and seen.at <= call.finished_at]
    for seen in free:
        seen.call, seen.body = call, body


def trial_folder(parent: Path, name: str, config: Config) -> RunFolder:
    """A new run folder with the settings in it, so that `canter rollouts` can read it."""
    from canter.cli.manifest import save_settings

    run = RunFolder.create(parent, name)
    run.update_manifest({"run": run.id, "base": str(config.base)})
    save_settings(run, config)
    return run
