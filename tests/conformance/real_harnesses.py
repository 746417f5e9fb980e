"""The real harness programs, as they are installed from PyPI and npm, each run once against a model in this process.

`run_all` runs cases side by side, each with its own gateway, store and controller, through the recipe and the process
runner as a training run does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fence import NEEDED_ABI, abi

from canter.cli.check import TASK
from canter.cli.trial import Model, Trial, run_trial, scripted_model, trial_folder
from canter.config import Config, resolve
from canter.engine.scripted import BULKY, DELEGATE
from canter.errors import ConfigError
from canter.harness.catalogue import entry
from canter.harness.install import install
from canter.harness.installed import installations, version_here
from canter.types import Task

AT_ONCE = 3
"""Harnesses that run side by side: most of them wait half of the time."""
TIMEOUT_S = 300.0
FENCE = Path(__file__).with_name("fence.py")


@dataclass(frozen=True)
class Case:
    """One way to run a harness.

    `path` is the route that it asks, `stream` whether it streams. `agents` counts the conversations that train, by
    label, and `aside` the calls that do not. `context_tokens` is a small context of the model that the recipe knows of,
    `engine_tokens` one that only the engine has; `overflows` is whether a prompt is then too long for it, and
    `exit_code` what the program ends with.
    """

    name: str
    harness: str
    args: Mapping[str, object] = field(default_factory=dict)
    path: str = "/v1/chat/completions"
    stream: bool = False
    agents: Mapping[str, int] = field(default_factory=lambda: {"main": 1})
    aside: Mapping[str, int] = field(default_factory=dict)
    prompt: str = TASK.prompt
    context_tokens: int | None = None
    engine_tokens: int | None = None
    overflows: bool = False
    exit_code: int = 0

    @property
    def compacts(self) -> bool:
        """Whether it goes on from a summary of what it did."""
        return SUMMARY in self.aside

    @property
    def fenced(self) -> bool:
        """Whether it is a program of its own; mini-SWE-agent runs in a fork of the launcher."""
        return self.harness != "mini-swe-agent"

    @property
    def task(self) -> Task:
        return Task("check", self.prompt)


_DELEGATED = f"{TASK.prompt} {DELEGATE}"
_CHAT, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_BULKY = f"{TASK.prompt} {BULKY}"
SUMMARY = "summary"
_TITLE = {"title": 1}
_BOTH = {"main": 1, "subagent": 1}

CASES = {
    case.name: case
    for case in (
        Case("mini", "mini-swe-agent"),
        Case("mini-tools", "mini-swe-agent", {"model_class": "litellm", "config": "mini"}),
        Case("mini-responses", "mini-swe-agent", {"model_class": "litellm_response", "config": "mini"}, _RESPONSES),
        Case("codex", "codex", {}, _RESPONSES, True),
        Case("claude-code", "claude-code", {}, _MESSAGES, True),
        Case("claude-code-loud", "claude-code", {"quiet": False}, _MESSAGES, True),
        Case("opencode", "opencode", {}, _CHAT, True, aside=_TITLE),
        Case("openhands", "openhands"),
        Case("openhands-responses", "openhands", {"api": "responses"}, _RESPONSES),
        Case("openhands-messages", "openhands", {"api": "messages"}, _MESSAGES),
        Case("agents-sdk", "openai-agents", {}, _RESPONSES),
        Case("agents-sdk-stream", "openai-agents", {"stream": True}, _RESPONSES, True),
        Case("agents-sdk-previous", "openai-agents", {"previous_response": True}, _RESPONSES),
        Case("agents-sdk-chat", "openai-agents", {"api": "chat", "stream": True}, _CHAT, True),
        Case("codex-sub-agent", "codex", {}, _RESPONSES, True, _BOTH, prompt=_DELEGATED),
        Case("claude-code-sub-agent", "claude-code", {}, _MESSAGES, True, _BOTH, prompt=_DELEGATED),
        Case("opencode-sub-agent", "opencode", {}, _CHAT, True, _BOTH, _TITLE, _DELEGATED),
        # nothing in its requests says that they are a sub-agent's
        Case("openhands-sub-agent", "openhands", {"sub_agents": True}, agents={"main": 2}, prompt=_DELEGATED),
        # they know the context, and compact before it is full
        Case("codex-compacts", "codex", {}, _RESPONSES, True, {"main": 2}, {SUMMARY: 1}, _BULKY, 64_000),
        Case("claude-code-compacts", "claude-code", {}, _MESSAGES, True, {"main": 3}, {SUMMARY: 2}, _BULKY, 110_000),
        # a refusal tells it how long a prompt may be
        Case(
            "claude-code-overflow",
            "claude-code",
            path=_MESSAGES,
            stream=True,
            agents={"main": 2},
            aside={SUMMARY: 1},
            prompt=_BULKY,
            engine_tokens=110_000,
            overflows=True,
        ),
        # it knows the context and overflows all the same; it goes on behind the summary and finishes, but reports the
        # overflow with its exit code
        Case(
            "opencode-overflow",
            "opencode",
            stream=True,
            agents={"main": 2},
            aside={SUMMARY: 1, **_TITLE},
            prompt=_BULKY,
            context_tokens=64_000,
            overflows=True,
            exit_code=1,
        ),
    )
}
HARNESSES = tuple(dict.fromkeys(case.harness for case in CASES.values()))


@dataclass(frozen=True)
class Ran:
    """A case that ran; `missing` says why it could not."""

    case: Case
    trial: Trial | None = None
    missing: str = ""


def missing_harnesses() -> dict[str, str]:
    """Installs what is not on this machine; harness → why that is impossible."""
    reasons: dict[str, str] = {}
    for name in HARNESSES:
        one = entry(name)
        if installations(one) or version_here(one) is not None:
            continue
        try:
            install(one, lambda line: sys.stderr.write(f"{line}\n"))
        except ConfigError as error:
            reasons[name] = str(error)
    return reasons


def settings(case: Case, folder: Path, **sections: Mapping[str, object]) -> Config:
    """As a run of this harness has them; its program is fenced in where it is a program of its own."""
    tree: dict[str, Mapping[str, object]] = {
        "model": {"path": "scripted", **({"context_tokens": context} if (context := case.context_tokens) else {})},
        "tasks": {"train": "none.jsonl"},
        "harness": {"use": case.harness, "args": {**case.args, **_fenced(case, folder)}, "timeout_s": TIMEOUT_S},
        "grader": {"command": ["sh", "-c", "echo 1"]},
        "runner": {"keep_dirs": "all", "max_attempts": 1},
        "sampling": {"max_tokens": 4096},
    }
    return resolve({name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}})


def can_fence() -> bool:
    return abi() >= NEEDED_ABI


def _fenced(case: Case, folder: Path) -> dict[str, str]:
    if not case.fenced:
        return {}
    found = installations(entry(case.harness))
    script = folder / "fenced"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I "{FENCE}" "{found[0].program}" "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return {"path": str(script)}


async def run_case(case: Case, policy: Model, **sections: Mapping[str, object]) -> Trial:
    """One rollout; its folder is short, as some harnesses put sockets into it, and stays until the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="ct-"))
    config = settings(case, folder, **sections)
    return await run_trial(config, trial_folder(folder, "c", config), case.task, policy)


def scripted_for(case: Case) -> Model:
    """The scripted policy, with the context that the case has for its engine."""
    return scripted_model() if case.engine_tokens is None else scripted_model(context_tokens=case.engine_tokens)


async def run_all(
    cases: Sequence[Case],
    missing: Mapping[str, str],
    policy: Callable[[Case], Model] = scripted_for,
    **sections: Mapping[str, object],
) -> dict[str, Ran]:
    """Every case, `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(case: Case) -> Ran:
        if case.harness in missing:
            return Ran(case, missing=missing[case.harness])
        async with gate:
            began = time.monotonic()
            trial = await run_case(case, policy(case), **sections)
            sys.stderr.write(f"{case.name}: {len(trial.calls)} calls, {time.monotonic() - began:.1f} s\n")
            return Ran(case, trial)

    return {ran.case.name: ran for ran in await asyncio.gather(*map(one, cases))}


def labels_of(trial: Trial) -> Counter[str]:
    """Conversations that train, by label."""
    return Counter(sample.label for sample in trial.batch.samples)


def keys_in(folder: Path) -> list[Path]:
    """Files below a folder that hold a key of the gateway."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and b"ck-agent-" in path.read_bytes():
            found.append(path)
    return found


def written_text(folder: Path) -> str:
    """What an attempt printed, for the message of a failed test."""
    parts = []
    for name in ("stderr.txt", "stdout.txt"):
        file = folder / name
        if file.is_file():
            parts.append(f"== {file}\n{file.read_text(encoding='utf-8', errors='replace')[-3000:]}")
    return "\n".join(parts) or f"nothing in {os.fspath(folder)}"
