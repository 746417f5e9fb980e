"""Recorded requests of eight harnesses, happy paths and faults, played against the gateway for several model families.

The tables say how many samples a rollout gives, by label, and which calls fork and why. What holds of all of them: no
fork is of an unknown cause, every sampled token is trained exactly once, every sample is what the engine saw, and so
many tokens as `count_tokens` says beforehand.
"""

from __future__ import annotations

from collections import Counter

import pytest
from replay import Outcome, stage
from replay_families import FAMILIES, Unavailable, family
from replay_traffic import HARNESSES, scenarios

Forks = dict[str, int]

ONE_AGENT = {"main": 1}
EXPECTED: dict[str, dict[str, tuple[dict[str, int], Forks]]] = {
    "autogen": {"happy": (ONE_AGENT, {}), "stream": (ONE_AGENT, {})},
    "claude-code": {
        **{
            name: (ONE_AGENT, {})
            for name in (
                "happy",
                "bad-json-args",  # the arguments come back quoted
                "bash-cd-prefix",
                "continue",
                "edit-tool",
                "max-tokens",
                "model-env",
                "quiet-env",
                "sonnet-4-5-name",
                "telemetry-on",
            )
        },
        "context-400": ({"main": 1, "summary": 1}, {"compaction": 1}),
        "cut-mid-stream": ({"main": 2}, {"truncated": 1}),
        "duplicate-ids": ({"main": 4}, {"edited_history": 3}),  # each turn is replaced by "[Tool use interrupted]"
        "empty-reply": ({"main": 2}, {"edited_history": 1}),
        "http-400": ({}, {}),
        "no-event-lines": ({"main": 3}, {}),  # two turns are asked for again
        "subagents": ({"main": 1, "subagent": 2}, {"subagent": 2}),
    },
    "codex": {
        **{name: (ONE_AGENT, {}) for name in ("happy", "bad-json-args", "no-completed-event", "resume")},
        "compaction": ({"main": 2, "summary": 2}, {"compaction": 3}),
        "cut-mid-stream": ({"main": 2}, {"truncated": 1}),  # only the reasoning was kept
        "subagents": ({"main": 1, "subagent": 2}, {"subagent": 2}),
    },
    "langgraph": {name: (ONE_AGENT, {}) for name in ("happy", "responses", "stream-chat")},
    "mini-swe-agent": {
        **{name: (ONE_AGENT, {}) for name in ("happy", "extra-fields", "python-api", "responses", "textbased")},
        "bad-json-args": ({"main": 3}, {"dropped_turn": 2}),
        "truncated-length": ({"main": 2}, {"dropped_turn": 1}),
    },
    "openai-agents": {
        name: (ONE_AGENT, {}) for name in ("happy", "chat", "previous-response-id", "stream-chat", "stream-responses")
    },
    "opencode": {
        "happy": ({"main": 1, "title": 1}, {}),
        "bad-json-args": ({"main": 2, "title": 1}, {"tool_arguments": 1}),  # the tool is renamed "invalid"
        "clean-truncation": ({"main": 2, "title": 1}, {"tool_arguments": 1}),
        "context-400": ({"main": 2, "side": 1, "title": 1}, {"compaction": 1, "side_request": 1}),
        "continue": ({"main": 1, "title": 1}, {}),
        "cut-mid-stream": ({"main": 3, "title": 1}, {"edited_history": 1}),  # asked again, then its text moves
        "duplicate-ids": ({"main": 1, "title": 1}, {}),
        "subagents": ({"main": 1, "subagent": 2, "title": 1}, {"subagent": 2}),
    },
    "openhands": {
        **{name: (ONE_AGENT, {}) for name in ("happy", "anthropic", "kimi-k2-name", "responses")},
        "bad-json-args": ({"main": 2}, {"tool_arguments": 1}),  # the arguments are replaced
    },
}
FORGOTTEN = ({"main": 2}, {"dropped_reasoning": 1})
"""Qwen's templates leave the reasoning out once the user says something new."""
FORGETFUL = {
    ("claude-code", "continue"): FORGOTTEN,
    ("claude-code", "max-tokens"): FORGOTTEN,
    ("codex", "resume"): FORGOTTEN,
    ("opencode", "continue"): ({"main": 2, "title": 1}, {"dropped_reasoning": 1}),
}
THOUGHTLESS = {("codex", "cut-mid-stream"): ({"main": 2}, {})}
"""Without reasoning nothing was kept of the reply that broke off: it is asked for again."""
OTHERWISE: dict[str, dict[tuple[str, str], tuple[dict[str, int], Forks]]] = {
    "qwen3": FORGETFUL,
    # its prompt opens a block for reasoning, which stays empty here and is left out of later prompts
    "qwen3.5": {**FORGETFUL, ("mini-swe-agent", "textbased"): ({"main": 3}, {"template": 2})},
    "chatml": THOUGHTLESS,
    "llama3": THOUGHTLESS,
    "deepseek-v3": THOUGHTLESS,
}
PLAYED = [
    *((name, harness) for name in ("bytes", "qwen3") for harness in HARNESSES),
    *((name, harness) for name in FAMILIES[1:] if name != "qwen3" for harness in ("claude-code", "codex", "opencode")),
    *((name, "mini-swe-agent") for name in ("chatml", "qwen3.5")),
    *((name, "openhands") for name in ("chatml", "deepseek-v3")),
]


def expected(family_name: str, harness: str) -> dict[str, tuple[dict[str, int], Forks]]:
    others = {
        scenario: value for (owner, scenario), value in OTHERWISE.get(family_name, {}).items() if owner == harness
    }
    return {**EXPECTED[harness], **others}


def available(name: str):
    try:
        return family(name)
    except Unavailable as error:
        pytest.skip(f"model family {name}: {error}")


def test_every_recorded_scenario_is_expected_to_give_something():
    assert {harness: set(scenarios(harness)) for harness in HARNESSES} == {
        harness: set(table) for harness, table in EXPECTED.items()
    }


def test_every_harness_has_a_happy_path_of_one_sample_for_each_agent_and_no_fork():
    for table in EXPECTED.values():
        samples, forks = table["happy"]
        assert set(samples.values()) == {1}
        assert not forks


@pytest.mark.parametrize(("name", "harness"), PLAYED)
async def test_recorded_requests_give_the_samples_that_the_table_says(name, harness):
    played: dict[str, Outcome] = {}
    async with stage(available(name), counts=name == "bytes") as gateway:
        for scenario in scenarios(harness):
            played[scenario] = await gateway.play(harness, scenario)
    assert {scenario: outcome.problems for scenario, outcome in played.items() if outcome.problems} == {}
    assert {scenario: outcome.brief() for scenario, outcome in played.items()} == expected(name, harness)
    assert sum((outcome.forks for outcome in played.values()), Counter())["unknown"] == 0
    if (name, harness) == ("bytes", "claude-code"):
        assert sum(outcome.counted for outcome in played.values()) >= 50


def test_some_family_with_the_vocabulary_of_a_real_model_was_played():
    missing = {}
    for name in ("chatml", "qwen3", "llama3", "deepseek-v3"):
        try:
            family(name)
        except Unavailable as error:
            missing[name] = str(error)
    assert len(missing) < 4, missing
