"""Rollouts from queued to their end: a real gateway, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from controller_rig import NoEngine, Rig, add_call, alive, environment_of, eventually, pids_in, rig, settings

from canter.client import Client
from canter.config import Config
from canter.controller.runner import process_runner
from canter.errors import ConfigError, LaunchError, Unauthorized
from canter.gateway.app import create_app
from canter.gateway.serve import serve
from canter.store import open_store
from canter.store.memory import MemoryStore
from canter.types import Attempt, KeyKind, Outcome, Reason, Reward, Rollout, RolloutState

FAST = {"runner": {"retry_delay_s": 0.0, "keep_dirs": "all"}}
EXACT = {"use": "exact", "answer": "stdout"}
QUEUED = RolloutState.QUEUED


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"function": f"harness_programs:{name}", **more}


def grader(name: str, **more: Any) -> dict[str, Any]:
    return {"function": f"grader_programs:{name}", **more}


async def test_a_right_and_a_wrong_answer(tmp_path: Path) -> None:
    async with rig(settings(function("answer"), EXACT, **FAST), tmp_path) as run:
        run.start()
        await run.add("right")
        await run.add("wrong", input={"say": "41"})
        assert (await run.done("right")).reward == 1.0
        assert (await run.done("wrong")).reward == 0.0
        (attempt,) = await run.store.attempts("right")
        assert (attempt.outcome, attempt.exit_code, attempt.sealed) == (Outcome.EXITED, 0, True)
        assert attempt.process["dir"] == str(run.folder("right"))
        reward = await run.store.reward("right")
        assert reward == Reward("right", 1, 1.0, "grader")


async def test_the_harness_gets_its_environment_and_never_the_hidden_part(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CANTER_SECRET", "controller")
    monkeypatch.setenv("WANTED", "passes")
    monkeypatch.setenv("LANG", "C.UTF-8")
    harness = function(
        "report", env={"EXTRA": "1"}, pass_env=["WANTED", "ABSENT"], files={"bin/tool": "harness_programs.py"}
    )
    async with rig(settings(harness, grader("full"), **FAST), tmp_path) as run:
        run.start()
        hidden = {"answer": "the-hidden-answer"}
        await run.add("r", hidden=hidden, input={"files": {"deep/f.py": "x = 1\n"}, "n": 3})
        await run.done("r")
        folder = run.folder("r")
        report = json.loads((folder / "work" / "report.json").read_text())
        given = report["environ"]
        key = given.pop("OPENAI_API_KEY")
        assert given.pop("ANTHROPIC_API_KEY") == key
        assert given == {
            "OPENAI_BASE_URL": f"{run.url}/v1",
            "OPENAI_API_BASE": f"{run.url}/v1",
            "ANTHROPIC_BASE_URL": run.url,
            "CANTER_TASK": str(folder / "task.json"),
            "CANTER_ROLLOUT_ID": "r",
            "CANTER_MODEL": "policy",
            "PATH": f"{folder / 'work' / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            "EXTRA": "1",
            "WANTED": "passes",
        }
        assert (
            report["file"]
            == report["task"]
            == {"id": "t", "prompt": "do", "input": {"files": {"deep/f.py": "x = 1\n"}, "n": 3}}
        )
        assert (folder / "work" / "deep" / "f.py").read_text() == "x = 1\n"
        assert (folder / "work" / "bin" / "tool").is_file()
        assert "controller" not in report["initial"]
        # neither the grader's code nor its data is in the memory of a harness
        assert not {"grader_programs", "canter.graders.run"} & set(report["modules"])
        for file in (path for path in folder.rglob("*") if path.is_file()):
            assert "the-hidden-answer" not in file.read_text()


async def test_the_grader_runs_apart_with_a_clean_environment(tmp_path: Path) -> None:
    async with rig(settings(function("nothing"), grader("surroundings"), **FAST), tmp_path) as run:
        run.start()
        await run.add("r")
        await run.done("r")
        reward = await run.store.reward("r")
        assert reward is not None
        assert set(reward.details["environ"]) == {"PATH", "HOME", "TMPDIR", "LANG"}
        assert reward.details["environ"]["PATH"] == os.environ["PATH"]
        assert reward.details["cwd"] == str(run.folder("r") / "work")


async def test_a_harness_that_fails_after_calls_is_graded_with_its_exit_code(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.02; done; exit 3"
    config = settings({"command": ["sh", "-c", script]}, grader("by_exit_code"), **FAST)
    async with rig(config, tmp_path / "run") as run:
        run.start()
        await run.add("r")
        await run.running("r")
        await add_call(run.store, "r")
        go.touch()
        assert (await run.done("r")).reward == 0.25
        reward = await run.store.reward("r")
        assert reward is not None
        assert reward.details == {"outcome": "exited", "calls": 1}


async def test_a_harness_that_fails_before_any_call_is_invalid(tmp_path: Path) -> None:
    async with rig(settings(function("fail"), grader("full"), **FAST), tmp_path) as run:
        run.start()
        await run.add("r", max_attempts=3)
        rollout = await run.done("r")
        assert (rollout.state, rollout.reason, rollout.attempt) == (RolloutState.INVALID, Reason.NO_CALLS, 1)
        assert "exit code 1 before any answered call" in rollout.message
        (attempt,) = await run.store.attempts("r")
        assert attempt.message == rollout.message or "the agent tripped" in attempt.message


async def test_a_time_out_gets_the_reward_of_the_rule_and_no_grader(tmp_path: Path) -> None:
    config = settings(function("breed", timeout_s=1.0, timeout_reward=-0.5), grader("full"), **FAST)
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("r")
        assert (await run.done("r")).reward == -0.5
        assert await run.store.reward("r") == Reward("r", 1, -0.5, "timeout")
        (attempt,) = await run.store.attempts("r")
        assert attempt.outcome is Outcome.TIMED_OUT
        assert not (run.record("r") / "grading").exists()
        assert not [pid for pid in pids_in(run.folder("r") / "work" / "pids") if alive(pid)]


async def test_a_time_out_is_graded_where_there_is_no_rule(tmp_path: Path) -> None:
    config = settings(function("sleep", timeout_s=0.3, timeout_reward=None), grader("by_exit_code"), **FAST)
    config = config.model_copy(update={"harness": config.harness.model_copy(update={"timeout_reward": None})})
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("r")
        await run.done("r")
        reward = await run.store.reward("r")
        assert reward is not None
        assert reward.details["outcome"] == "timed_out"


@pytest.mark.parametrize("after", ["queued", "running", "grading"])
async def test_cancel(tmp_path: Path, after: str) -> None:
    config = settings(
        function("sleep" if after != "grading" else "nothing"),
        grader("slow"),
        runner={"concurrency": 1, "keep_dirs": "none"},
    )
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("r")
        if after == "queued":
            await run.running("r")
            await run.add("waits")
            await run.store.cancel("waits")
            await run.store.cancel("r")
            assert (await run.store.attempts("waits")) == []
        elif after == "running":
            await run.running("r")
            keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
            await run.store.cancel("r")
            await eventually(lambda: not alive(keeper))
        else:
            file = run.record("r") / "grading" / "1" / "keeper.json"
            await eventually(file.exists)
            keeper = json.loads(file.read_text())["pid"]
            await run.store.cancel("r")
            await eventually(lambda: not alive(keeper))
        await eventually(lambda: not run.folder("r").exists())
        assert (await run.store.rollout("r")).state is RolloutState.CANCELLED
        await run.add("next")
        await run.running("next") if after != "grading" else await run.until(lambda r: r.attempt == 1, "next")


async def test_no_more_than_the_limit_at_once(tmp_path: Path) -> None:
    config = settings(
        {"command": ["sh", "-c", "sleep 0.3"]}, grader("full"), runner={"concurrency": 2, "keep_dirs": "all"}
    )
    async with rig(config, tmp_path) as run:
        ids = [f"r{i}" for i in range(5)]
        await run.add(*ids)
        run.start()
        for id in ids:
            await run.done(id)
        attempts = [(await run.store.attempts(id))[0] for id in ids]
        changes = sorted([(a.started_at, 1) for a in attempts] + [(a.ended_at or 0, -1) for a in attempts])
        running = [sum(change for _, change in changes[: i + 1]) for i in range(len(changes))]
        assert max(running) == 2


async def test_what_cannot_start_is_tried_again_and_then_invalid(tmp_path: Path) -> None:
    async with rig(settings({"command": ["no-such-agent"]}, grader("full"), **FAST), tmp_path) as run:
        run.start()
        await run.add("r", max_attempts=2)
        rollout = await run.done("r")
        assert (rollout.state, rollout.reason, rollout.attempt) == (RolloutState.INVALID, Reason.SPAWN_ERROR, 2)
        assert "cannot start 'no-such-agent'" in rollout.message


async def test_a_task_file_outside_the_working_folder_is_refused(tmp_path: Path) -> None:
    async with rig(settings(function("nothing"), grader("full"), **FAST), tmp_path) as run:
        run.start()
        await run.add("r", input={"files": {"../evil": "x"}})
        rollout = await run.done("r")
        assert rollout.reason is Reason.SPAWN_ERROR
        assert "'../evil' is no path inside the working folder" in rollout.message


async def test_a_lost_attempt_is_followed_by_another_after_its_delay(tmp_path: Path) -> None:
    config = settings(function("flaky"), EXACT, runner={"retry_delay_s": 0.4})
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("r", max_attempts=2, input={"mark": str(tmp_path / "mark")})
        rollout = await run.done("r")
        assert (rollout.reward, rollout.attempt) == (1.0, 2)
        first, second = await run.store.attempts("r")
        assert (first.outcome, first.reason) == (Outcome.LOST, Reason.NODE_LOST)
        assert second.started_at - (first.ended_at or 0) >= 0.4


@pytest.mark.parametrize(
    ("name", "reason", "message"),
    [
        ("not_a_number", Reason.GRADER_ERROR, "grader_programs:not_a_number must give a finite number, got nan"),
        ("nothing", Reason.GRADER_ERROR, "must give a finite number, got None"),
        ("crash", Reason.GRADER_ERROR, "grader_programs:crash raised KeyError: 'no such case'"),
        ("disappear", Reason.GRADER_ERROR, "the grader ended without posting a reward"),
        ("slow", Reason.GRADER_TIMEOUT, "the grader took longer than grader.timeout_s"),
    ],
)
async def test_a_grader_that_fails_gives_no_reward(tmp_path: Path, name: str, reason: Reason, message: str) -> None:
    async with rig(settings(function("nothing"), grader(name, timeout_s=1.0), **FAST), tmp_path) as run:
        run.start()
        await run.add("r", max_attempts=3)
        rollout = await run.done("r")
        assert (rollout.state, rollout.reason, rollout.reward) == (RolloutState.INVALID, reason, None)
        assert rollout.attempt == 1, "the harness is not at fault"
        assert message in rollout.message
        assert sorted(os.listdir(run.record("r") / "grading")) == ["1", "2"]


async def test_a_failed_grading_is_repeated_without_the_harness(tmp_path: Path) -> None:
    async with rig(settings(function("nothing"), grader("second_time"), **FAST), tmp_path) as run:
        run.start()
        await run.add("r", max_attempts=3, input={"mark": str(tmp_path / "mark")})
        rollout = await run.done("r")
        assert (rollout.reward, rollout.attempt) == (0.5, 1)


@pytest.mark.parametrize(("keep", "left"), [("all", {"good", "bad"}), ("failed", {"bad"}), ("none", {"bad"})])
async def test_which_folders_stay(tmp_path: Path, keep: str, left: set[str]) -> None:
    """`bad` is invalid before any call: its message names a file in its folder, which stays in any case."""
    command = ["sh", "-c", "chmod 0 $HOME; exit $(cat code)"]
    config = settings({"command": command, "timeout_s": 5}, grader("by_exit_code"), runner={"keep_dirs": keep})
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("good", input={"files": {"code": "0"}})
        await run.add("bad", input={"files": {"code": "1"}})
        await run.done("good")
        await run.done("bad")
        attempts = tmp_path / "attempts"
        await eventually(lambda: {path.name for path in attempts.iterdir()} == left)


async def through_an_outage(config: Config, tmp_path: Path, *, calls: bool) -> tuple[Rollout, list[Attempt]]:
    """One rollout whose harness ends, once the file `go` is there, while there is no gateway."""
    go = tmp_path / "go"
    store = MemoryStore()
    key = await store.issue_key(KeyKind.SERVICE)
    async with contextlib.AsyncExitStack() as stack:
        async with serve(create_app(config, store, NoEngine()), config.gateway, grace_s=0.2) as url:
            client = await stack.enter_async_context(Client(url, key, retry_s=0.2))
            run = Rig(store, client, url, tmp_path / "run", config)
            run.start()
            await run.add("r", max_attempts=3, input={"file": str(go)})
            await run.running("r")
            if calls:
                await add_call(store, "r")
        go.touch()
        await eventually((run.record("r") / "exit.json").exists)
        await asyncio.sleep(0.5)
        assert (await store.rollout("r")).state is RolloutState.RUNNING
        port = int(url.rsplit(":", 1)[1])
        async with serve(create_app(config, store, NoEngine()), config.gateway, port=port, grace_s=0.2):
            rollout = await run.done("r")
            await run.stop()
    return rollout, await store.attempts("r")


async def test_a_gateway_that_is_away_for_a_while_costs_no_rollout(tmp_path: Path) -> None:
    """The harness runs on, its end is told later, and the grader waits."""
    config = settings(function("wait_for"), EXACT, **FAST)
    rollout, _ = await through_an_outage(config, tmp_path, calls=True)
    assert (rollout.reward, rollout.attempt) == (1.0, 1)


@pytest.mark.parametrize("calls", [False, True])
async def test_a_harness_that_gives_up_because_the_gateway_is_away_is_run_again(tmp_path: Path, calls: bool) -> None:
    """Neither `no_calls` nor graded: its failure says nothing about the agent."""
    go = tmp_path / "go"
    script = f"while [ ! -e {go} ]; do sleep 0.02; done; case $PWD in */1/work) echo 'no route' >&2; exit 1; esac"
    config = settings({"command": ["sh", "-c", script]}, grader("full"), **FAST)
    rollout, attempts = await through_an_outage(config, tmp_path, calls=calls)
    assert (rollout.reward, rollout.attempt) == (1.0, 2)
    assert [attempt.reason for attempt in attempts] == [Reason.GATEWAY_UNAVAILABLE, None]
    assert attempts[0].exit_code == 1
    assert attempts[0].message.endswith("its last words: no route")


async def test_a_stop_leaves_harnesses_to_the_next_controller(tmp_path: Path) -> None:
    go = tmp_path / "go"
    async with rig(settings(function("wait_for"), EXACT, **FAST), tmp_path / "run") as run:
        run.start(stop_harnesses=False)
        await run.add("r", input={"file": str(go)})
        await run.running("r")
        await run.stop()
        keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
        assert alive(keeper)
        run.start()
        await run.add("probe", input={"file": str(go)})
        await run.running("probe")  # the new controller has looked at everything
        go.touch()
        await run.done("probe")
        rollout = await run.done("r")
        assert (rollout.reward, rollout.attempt) == (1.0, 1)


async def test_a_stop_that_ends_the_harnesses_leaves_no_process(tmp_path: Path) -> None:
    async with rig(settings(function("breed"), EXACT, **FAST), tmp_path) as run:
        run.start(stop_harnesses=True)
        await run.add("r")
        folder = await run.running("r")
        await eventually(lambda: len(pids_in(folder / "work" / "pids")) == 5)
        await run.stop()
        assert not [pid for pid in pids_in(folder / "work" / "pids") if alive(pid)]


async def test_what_a_stop_has_interrupted_is_done_again_and_does_not_count(tmp_path: Path) -> None:
    """One attempt is allowed; two of a harness are interrupted, and three runs of the grader, of which two may fail."""
    go, grade = tmp_path / "go", tmp_path / "grade"
    script = f"while [ ! -e {grade} ]; do sleep 0.02; done; echo 0.75"
    config = settings(function("wait_for"), {"command": ["sh", "-c", script]}, **FAST)
    async with rig(config, tmp_path / "run") as run:
        await run.add("r", input={"file": str(go)})
        for number in (1, 2):
            run.start(stop_harnesses=True)
            await eventually((run.folder("r", number) / "stdout.txt").exists)
            await run.stop()
            rollout = await run.store.rollout("r")
            assert (rollout.state, rollout.attempt, rollout.message) == (QUEUED, number, "the run was stopped")
        go.touch()
        for _ in range(3):
            run.start(stop_harnesses=True)
            await eventually((run.record("r", 3) / "grading" / "1" / "command.txt").exists)
            await run.stop()
            assert (await run.store.rollout("r")).state is RolloutState.GRADING
        grade.touch()
        run.start()
        assert (await run.done("r")).reward == 0.75
        attempts = await run.store.attempts("r")
        assert [(a.outcome, a.reason) for a in attempts] == [
            (Outcome.KILLED, Reason.INTERRUPTED),
            (Outcome.KILLED, Reason.INTERRUPTED),
            (Outcome.EXITED, None),
        ]


async def test_without_adoption_what_was_left_is_done_again_and_does_not_count(tmp_path: Path) -> None:
    """As when all processes of a run were killed: what went on had no gateway, whatever came of it."""
    go, grade = tmp_path / "go", tmp_path / "grade"
    script = f"while [ ! -e {grade} ]; do sleep 0.02; done; echo 0.75"
    config = settings(function("wait_for"), {"command": ["sh", "-c", script]}, **FAST)
    async with rig(config, tmp_path / "run") as run:
        for id in ("graded", "ended", "runs"):
            await run.add(id, input={"file": str(go.with_suffix(f".{id}"))})
        run.start(stop_harnesses=False)
        for id in ("graded", "ended", "runs"):
            await run.running(id)
        go.with_suffix(".graded").touch()
        await eventually((run.record("graded") / "grading" / "1" / "command.txt").exists)
        keepers = [
            json.loads((run.record(id) / "keeper.json").read_text())["pid"] for id in ("graded", "ended", "runs")
        ]
        keepers += [json.loads((run.record("graded") / "grading" / "1" / "keeper.json").read_text())["pid"]]
        await run.stop()
        go.with_suffix(".ended").touch()
        await eventually((run.record("ended") / "exit.json").exists)
        run.start(adopt=False)
        for id in ("ended", "runs"):
            await run.until(lambda rollout: rollout.attempt == 2, id)
        assert not [pid for pid in keepers if alive(pid)]
        go.with_suffix(".runs").touch()
        grade.touch()
        for id, reasons in (
            ("graded", [None]),
            ("ended", [Reason.INTERRUPTED, None]),
            ("runs", [Reason.INTERRUPTED, None]),
        ):
            assert (await run.done(id)).reward == 0.75
            assert [a.reason for a in await run.store.attempts(id)] == reasons
        assert os.listdir(run.record("graded") / "grading") == ["1"]


async def test_a_stop_without_a_gateway_leaves_no_process_either(tmp_path: Path) -> None:
    """Then nobody hears that the attempt was interrupted: it counts as lost."""
    config = settings(function("sleep"), EXACT, **FAST)
    store = MemoryStore()
    key = await store.issue_key(KeyKind.SERVICE)
    async with contextlib.AsyncExitStack() as stack:
        async with serve(create_app(config, store, NoEngine()), config.gateway, grace_s=0.2) as url:
            client = await stack.enter_async_context(Client(url, key, retry_s=0.2))
            run = Rig(store, client, url, tmp_path / "run", config)
            run.start(stop_harnesses=True)
            await run.add("r", max_attempts=2)
            await run.running("r")
        keeper = json.loads((run.record("r") / "keeper.json").read_text())["pid"]
        await run.stop()
        assert not alive(keeper)
        assert (await store.rollout("r")).state is RolloutState.RUNNING
        port = int(url.rsplit(":", 1)[1])
        async with serve(create_app(config, store, NoEngine()), config.gateway, port=port, grace_s=0.2):
            run.start(stop_harnesses=True)
            await run.until(lambda rollout: rollout.attempt == 2, "r")
            await run.stop()
    assert [a.reason for a in await store.attempts("r")] == [Reason.NODE_LOST, Reason.INTERRUPTED]


async def test_only_one_controller_per_run_folder(tmp_path: Path) -> None:
    config = settings(function("nothing"), EXACT)
    with pytest.raises(LaunchError, match="is another controller running for this run folder"):
        async with (
            process_runner(config, tmp_path, "http://g"),
            process_runner(config, tmp_path, "http://g", lock_s=0.2),
        ):
            pass
    async with process_runner(config, tmp_path, "http://g", lock_s=0.2):
        pass


@pytest.mark.parametrize(
    ("harness", "error", "message"),
    [
        ({"use": "mini-swe"}, ConfigError, "did you mean 'mini-swe-agent'"),
        ({"function": "no_such_module:run"}, LaunchError, "cannot import 'no_such_module'"),
        ({"command": ["true"], "env": {"OPENAI_API_KEY": "x"}}, ConfigError, "harness.env names OPENAI_API_KEY"),
        ({"command": ["true"], "files": {"x": "absent.txt"}}, ConfigError, "absent.txt does not exist"),
    ],
)
async def test_faults_of_the_settings_end_the_controller_at_once(
    tmp_path: Path, harness: dict[str, Any], error: type[Exception], message: str
) -> None:
    async with rig(settings(harness, grader("full")), tmp_path) as run:
        run.start()
        assert run.controller is not None
        with pytest.raises(error, match=message):
            await asyncio.wait_for(run.controller, 30)
        run.controller = None


async def test_a_key_that_the_store_refuses_ends_the_controller(tmp_path: Path) -> None:
    async with rig(settings(function("nothing"), grader("full")), tmp_path) as run, Client(run.url, "wrong") as client:
        run.client = client
        run.start()
        assert run.controller is not None
        with pytest.raises(Unauthorized):
            await asyncio.wait_for(run.controller, 30)
        run.controller = None


async def test_no_graders_key_exists_while_a_harness_runs(tmp_path: Path) -> None:
    """A harness runs as the same user: it could read whatever lies about, and reward itself with it."""
    go, database = tmp_path / "go", tmp_path / "run" / "canter.db"
    database.parent.mkdir()
    config = settings(function("wait_for"), grader("slow"), **FAST)

    def kinds() -> list[tuple[str, bool]]:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            rows = connection.execute("SELECT kind, revoked FROM keys WHERE rollout_id = 'r' ORDER BY kind")
            return [(kind, bool(revoked)) for kind, revoked in rows]

    async with rig(config, tmp_path / "run", open_store(database)) as run:
        run.start()
        await run.add("r", input={"file": str(go)})
        await run.running("r")
        assert kinds() == [("agent", False)]
        go.touch()
        await eventually((run.record("r") / "grading" / "1" / "stdout.txt").exists)
        assert kinds() == [("agent", True), ("grader", False)]
        for file in (path for path in run.run_dir.rglob("*") if path.is_file()):
            assert b"ck-grader-" not in file.read_bytes(), file
        await run.store.cancel("r")
        assert kinds() == [("agent", True), ("grader", True)]


@pytest.mark.parametrize("kind", ["agent", "grader"])
async def test_keys_do_not_pass_through_the_launchers(tmp_path: Path, kind: str) -> None:
    config = settings(function("sleep" if kind == "agent" else "nothing"), grader("slow"), **FAST)
    key = re.compile(rb"ck-%s-[\w-]{43}" % kind.encode())
    async with rig(config, tmp_path) as run:
        run.start()
        await run.add("r")
        grading = run.record("r") / "grading" / "1"
        folder, record = (run.folder("r"), run.record("r")) if kind == "agent" else (grading, grading)
        await eventually((folder / "stdout.txt").exists)
        keeper = json.loads((record / "keeper.json").read_text())["pid"]
        launcher = int(Path(f"/proc/{keeper}/stat").read_text().rsplit(")", 1)[1].split()[1])
        assert set(environment_of(launcher)) <= {
            "PATH",
            "LANG",
            "LC_ALL",
            "PYTHONPATH",
            "VIRTUAL_ENV",
            "LD_LIBRARY_PATH",
            "PYTHONUTF8",
        }
        assert key.search(_memory(keeper))
        assert not key.search(_memory(launcher))


def _memory(pid: int) -> bytes:
    """The writable memory of a process."""
    held = b""
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "rb") as memory:
        for line in maps:
            where, rights = line.split()[:2]
            if rights.startswith("rw"):
                start, end = (int(part, 16) for part in where.split("-"))
                memory.seek(start)
                held += memory.read(end - start)
    return held
