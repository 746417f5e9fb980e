"""Real Codex, Claude Code, OpenCode, OpenHands, mini-SWE-agent and Agents SDK complete a task through the gateway.

Installed from npm and PyPI where they are not on this machine; they speak to a scripted policy in this process.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fence import FENCED
from real_harnesses import CASES, HARNESSES, SUMMARY, Case, Ran, can_fence, keys_in, labels_of, written_text

from canter.cli.trial import Trial
from canter.engine.scripted import DELEGATE, FILES, SUB_FILE
from canter.types import CallStatus, ForkCause, Reason

pytestmark = pytest.mark.timeout(1500)  # the first test installs what is missing and runs all

ASIDE = {ForkCause.SIDE_REQUEST, ForkCause.SUBAGENT}
"""Causes of forks that a good rollout may have: a conversation of its own begins."""
MOST_MISSING = 3


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture
def trial(case: Case, ran: dict[str, Ran]) -> Trial:
    one = ran[case.name]
    if one.trial is None:
        pytest.skip(f"{case.harness} cannot be installed here: {one.missing}")
    return one.trial


def test_it_completes_the_task(case: Case, trial: Trial) -> None:
    [attempt] = trial.attempts
    ends_badly = [f"it ended with exit code {case.exit_code}"] if case.exit_code else []
    problems = [problem.partition(":")[0] for problem in trial.verdict()]
    assert (problems, attempt.exit_code) == (ends_badly, case.exit_code), written_text(trial.folder)


def test_its_commands_were_executed(case: Case, trial: Trial) -> None:
    expected = (FILES[0], *FILES[2:], SUB_FILE) if DELEGATE in case.prompt else FILES
    assert trial.made == expected, written_text(trial.folder)
    for name in expected:
        assert (trial.folder / "work" / name).read_text(encoding="utf-8") == "café /1\n"


def test_each_agent_is_one_conversation(case: Case, trial: Trial) -> None:
    assert labels_of(trial) == case.agents
    aside = Counter(call.label for call in trial.calls if call.label not in case.agents)
    assert aside == case.aside


def test_no_fork_is_unexplained(case: Case, trial: Trial) -> None:
    assert {cause for _, cause in trial.forks} <= ASIDE | ({ForkCause.COMPACTION} if case.compacts else set())
    assert trial.batch.report.forks[ForkCause.UNKNOWN] == 0


def test_every_sampled_token_is_trained_once(trial: Trial) -> None:
    tokens = trial.batch.report.tokens
    assert trial.faults == ()
    assert set(tokens.untrained) <= {Reason.LABEL_EXCLUDED}
    assert tokens.trained == sum(len(c.sampled) for c in trial.calls if c.id not in trial.batch.untrained)
    assert tokens.trained == sum(int(np.count_nonzero(sample.mask)) for sample in trial.batch.samples)
    assert tokens.trained > 0


def test_it_speaks_the_protocol_it_is_known_for(case: Case, trial: Trial) -> None:
    assert {request.path.partition("?")[0] for request in trial.requests if request.call} == {case.path}
    assert {bool(request.body.get("stream")) for request in trial.requests if request.call} == {case.stream}
    expected = {200, 400} if case.overflows else {200}
    assert {r.status for r in trial.requests if r.method == "POST"} == expected
    assert {call.status for call in trial.calls} == {CallStatus.OK}


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.overflows], ids=lambda case: case.name)
def test_it_compacts_when_its_prompt_is_too_long(case: Case, trial: Trial) -> None:
    """The refusal is one that it understands: the next that it asks for is a summary, and then it goes on."""
    statuses = [request.status for request in trial.requests]
    first = statuses.index(400)
    assert b"too long" in trial.requests[first].refusal or b"context_length_exceeded" in trial.requests[first].refusal
    after = [request.call.label for request in trial.requests[first:] if request.call]
    assert after[:2] == [SUMMARY, "main"]


def test_no_request_was_sent_twice(trial: Trial) -> None:
    """A retry would say that a reply was not understood."""
    assert Counter(r.call.id for r in trial.requests if r.call).most_common(1)[0][1] == 1
    assert len(trial.calls) == len([r for r in trial.requests if r.status == 200 and r.method == "POST"])


@pytest.mark.parametrize("case", [c for c in CASES.values() if c.fenced], ids=lambda case: case.name)
def test_it_stays_in_its_folder(case: Case, trial: Trial) -> None:
    """It was started so that it could write nowhere else, and did its work all the same."""
    if not can_fence():
        pytest.skip("this kernel has no Landlock to fence a program in with")
    assert (trial.folder / "home" / FENCED).is_file()
    assert trial.made


def test_its_key_is_in_no_file(trial: Trial) -> None:
    assert keys_in(trial.folder) == []


def test_most_harnesses_were_run(missing: dict[str, str]) -> None:
    """Those that cannot be installed are skipped, but not most, and never all."""
    assert len(missing) <= MOST_MISSING, missing
    assert len(missing) < len(HARNESSES)
