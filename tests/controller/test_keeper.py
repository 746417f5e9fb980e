"""Launcher, keeper and worker: real processes, without store and gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from controller_rig import HERE, alive, eventually, pids_in

from canter.controller import procfs
from canter.controller.folder import Place, make
from canter.controller.runner import Process
from canter.controller.spawner import Setup, Spawner, launcher_environment
from canter.errors import LaunchError
from canter.types import Outcome

ENV = {"PATH": os.environ["PATH"], "ONLY": "this"}


@pytest.fixture
async def spawner(tmp_path: Path) -> AsyncIterator[Spawner]:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    setup = Setup("test", ("harness_programs",), (str(HERE),), launcher_environment({}), tmp_path / "launcher.log")
    spawner = Spawner(setup, lock)
    await spawner.start()
    yield spawner
    await spawner.close()
    os.close(lock)
    assert (tmp_path / "launcher.log").read_text() == ""


class Run:
    """One process below a keeper."""

    def __init__(self, tmp_path: Path, spawner: Spawner, **spec: Any) -> None:
        name = f"run-{time.monotonic_ns()}"
        self.place = Place(tmp_path, ("attempts", name), ("control", name))
        self.folder, self.record = self.place.folder, self.place.record
        make(self.folder)
        self.record.mkdir(parents=True)
        self.work = self.folder / "work"
        self.work.mkdir()
        self.spawner = spawner
        self.spec = {
            "folder": str(self.folder),
            "record": str(self.record),
            "places": [str(self.folder)],
            "cwd": str(self.work),
            "env": {**ENV, "HOME": str(self.folder / "home"), "CANTER_TASK": str(self.folder / "task.json")},
            "timeout_s": 20.0,
            "grace_s": 0.2,
            "log_bytes": 10_000,
            "argument": {"id": "t", "prompt": "p", "input": {}},
            "base": str(HERE),
            **spec,
        }
        (self.folder / "task.json").write_text(json.dumps(self.spec["argument"]))

    async def start(self) -> Process:
        pending = await self.spawner.spawn(self.spec)
        process = Process.of(self.place, pending, self.spawner)
        assert process is not None
        await pending.go()
        return process

    async def result(self) -> Mapping[str, Any]:
        await asyncio.wait_for((await self.start()).exited(), 30)
        return self.exit_json()

    def exit_json(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.record / "exit.json").read_text())
        return result

    def printed(self, name: str = "stdout.txt") -> str:
        return (self.folder / name).read_text()


async def test_a_function_gets_exactly_its_environment_and_folder(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:report")
    assert (await run.result())["exit_code"] == 0
    report = json.loads((run.work / "report.json").read_text())
    assert report["environ"] == run.spec["env"]
    assert report["cwd"] == str(run.work)
    assert report["argv"] == ["harness_programs:report"]
    assert report["task"] == report["file"] == run.spec["argument"]
    assert not [name for name in report["descriptors"] if "socket" in name or "lock" in name or "pipe" in name]
    assert report["blocked"] == []
    # even what the kernel shows as this process's first environment is the launcher's, not the controller's
    assert "PYTEST" not in report["initial"]


THREADS_OWN = 0b11 << 31
"""Signals 32 and 33 belong to the thread library: Python can neither see nor reset them."""


async def test_a_command_gets_exactly_its_environment(tmp_path: Path, spawner: Spawner) -> None:
    script = "env -0; pwd >&2; grep -hE 'Sig(Blk|Ign)' /proc/self/status >&2; ls /proc/self/fd >&2"
    run = Run(tmp_path, spawner, argv=["sh", "-c", script])
    await run.result()
    given = dict(line.split("=", 1) for line in run.printed().split("\0") if line)
    by_the_shell = ("PWD", "SHLVL", "_", "OLDPWD")
    assert {name: value for name, value in given.items() if name not in by_the_shell} == run.spec["env"]
    cwd, *signals = run.printed("stderr.txt").split()[:5]
    assert cwd == str(run.work)
    assert signals[::2] == ["SigBlk:", "SigIgn:"]
    assert [int(mask, 16) & ~THREADS_OWN for mask in signals[1::2]] == [0, 0]
    assert set(run.printed("stderr.txt").split()[5:]) <= {"0", "1", "2", "3"}  # 3 is ls's own


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ({"function": "harness_programs:nothing"}, 0),
        ({"function": "harness_programs:fail"}, 1),
        ({"function": "harness_programs:leave", "argument": {"input": {"code": 7}}}, 7),
        ({"function": "harness_programs:leave", "argument": {"input": {"code": None}}}, 0),
        ({"function": "harness_programs:leave", "argument": {"input": {"code": "bad luck"}}}, 1),
        ({"function": "harness_programs:closed"}, 0),
        ({"function": "harness_programs:coroutine"}, 0),
        ({"argv": ["sh", "-c", "exit 5"]}, 5),
        ({"argv": ["sh", "-c", "kill -9 $$"]}, -9),
    ],
)
async def test_exit_codes(tmp_path: Path, spawner: Spawner, spec: dict[str, Any], code: int) -> None:
    result = await Run(tmp_path, spawner, **spec).result()
    assert (result["outcome"], result["exit_code"], result["message"]) == ("exited", code, "")


async def test_what_a_function_prints_is_kept(tmp_path: Path, spawner: Spawner) -> None:
    fails = Run(tmp_path, spawner, function="harness_programs:fail")
    leaves = Run(tmp_path, spawner, function="harness_programs:leave", argument={"input": {"code": "bad luck"}})
    threads = Run(tmp_path, spawner, function="harness_programs:thread")
    await asyncio.gather(fails.result(), leaves.result(), threads.result())
    assert fails.printed("stderr.txt").endswith("RuntimeError: the agent tripped\n")
    assert leaves.printed("stderr.txt") == "bad luck\n"
    assert threads.printed() == "from a thread\n"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"argv": ["no-such-agent", "--x"]}, "cannot start 'no-such-agent': No such file or directory; install it"),
        ({"argv": [Path(__file__).name]}, "No such file or directory; it lies beside the TOML file"),
        ({"argv": ["/"]}, "cannot start '/': Permission denied; make it executable"),
        ({"argv": ["echo", "x" * 200_000]}, "its arguments take 200004 bytes; let it read the task from the file"),
        ({"function": "no_such_module:run"}, "cannot import 'no_such_module'"),
        ({"function": "harness_programs:no_such"}, "has no function 'no_such'"),
        ({"function": "harness_programs"}, "must be module:function"),
    ],
)
async def test_what_cannot_start_says_why(tmp_path: Path, spawner: Spawner, spec: dict[str, Any], message: str) -> None:
    result = await Run(tmp_path, spawner, **spec).result()
    assert result["outcome"] == "spawn_failed"
    assert message in result["message"]


async def test_the_time_limit_kills_the_whole_tree(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:breed", timeout_s=1.0)
    process = await run.start()
    await eventually(lambda: len(pids_in(run.work / "pids")) == 5)
    pids = pids_in(run.work / "pids")
    assert all(alive(pid) for pid in pids)
    await process.exited()
    assert run.exit_json()["outcome"] == "timed_out"
    assert not [pid for pid in pids if alive(pid)]


async def test_the_end_of_the_harness_ends_what_it_left_behind(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:breed", argument={"input": {"leave": True}})
    result = await run.result()
    assert (result["outcome"], result["exit_code"]) == ("exited", 0)
    assert result["wall_s"] < 10
    pids = pids_in(run.work / "pids")
    assert len(pids) == 5
    assert not [pid for pid in pids if alive(pid)]


async def test_one_who_ignores_sigterm_is_killed(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:deaf")
    process = await run.start()
    await eventually(lambda: pids_in(run.work / "pids"))
    process.stop()
    assert (await process.exited()).outcome is Outcome.KILLED
    assert not alive(pids_in(run.work / "pids")[0])


async def test_one_who_obeys_sigterm_may_finish(tmp_path: Path, spawner: Spawner) -> None:
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    run = Run(tmp_path, spawner, argv=["sh", "-c", script], grace_s=5.0)
    process = await run.start()
    await eventually(lambda: run.printed() if (run.folder / "stdout.txt").exists() else "")
    process.stop()
    assert (await process.exited()).outcome is Outcome.KILLED
    assert run.printed() == "ready\nsaved\n"


async def test_a_fork_chain_does_not_outrun_the_keeper(tmp_path: Path, spawner: Spawner) -> None:
    chain = "import os, time\nwhile True:\n if os.fork(): os._exit(0)\n time.sleep(0.001)"
    run = Run(tmp_path, spawner, argv=[sys.executable, "-c", chain], timeout_s=0.5)
    started = time.monotonic()
    await run.result()
    assert time.monotonic() - started < 10
    assert procfs.sweep(str(run.place.home), [str(run.folder)], 0) == 0


async def test_a_flood_of_output_is_cut_in_the_middle(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:flood")
    assert (await run.result())["outcome"] == "exited"
    text = run.printed()
    assert len(text) < 11_000
    assert text.startswith("first\nxxx")
    assert "bytes left out" in text
    assert text.endswith("xxx\n42\n")


async def test_the_keeper_outlives_its_launcher(tmp_path: Path, spawner: Spawner) -> None:
    first = Run(tmp_path, spawner, argv=["sleep", "0.7"])
    process = await first.start()
    launcher = spawner.pid
    assert launcher is not None
    os.kill(launcher, signal.SIGKILL)
    second = Run(tmp_path, spawner, function="harness_programs:nothing")
    assert (await second.result())["exit_code"] == 0
    assert spawner.pid != launcher
    await process.exited()
    assert first.exit_json()["exit_code"] == 0


async def test_without_go_nothing_starts(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, argv=["touch", "started"])
    pending = await spawner.spawn(run.spec)
    assert alive(pending.pid)
    pending.abandon()
    await eventually(lambda: not alive(pending.pid))
    assert os.listdir(run.work) == []
    assert not (run.record / "keeper.json").exists()


async def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, argv=["true"])
    run.spec["record"] = str(tmp_path / "absent")
    with pytest.raises(LaunchError, match=r"cannot start the test: .*absent"):
        await spawner.spawn(run.spec)


async def test_a_killed_keeper_takes_its_worker_along(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, function="harness_programs:deaf")
    process = await run.start()
    await eventually(lambda: pids_in(run.work / "pids"))
    keeper = json.loads((run.record / "keeper.json").read_text())["pid"]
    os.kill(keeper, signal.SIGKILL)
    assert (await process.exited()).outcome is Outcome.LOST
    await eventually(lambda: not alive(pids_in(run.work / "pids")[0]))


async def test_what_a_killed_keeper_leaves_is_found_by_its_home(tmp_path: Path, spawner: Spawner) -> None:
    run = Run(tmp_path, spawner, argv=["sh", "-c", "setsid sleep 60 & echo $! > pids; wait"])
    process = await run.start()
    await eventually(lambda: pids_in(run.work / "pids"))
    os.kill(json.loads((run.record / "keeper.json").read_text())["pid"], signal.SIGKILL)
    assert (await process.exited()).outcome is Outcome.LOST
    await eventually(lambda: not alive(pids_in(run.work / "pids")[0]))


async def test_what_hides_from_its_folder_is_found_by_the_launcher(tmp_path: Path, spawner: Spawner) -> None:
    other = await Run(tmp_path, spawner, argv=["sleep", "60"]).start()
    script = "(cd /; exec env -i setsid sleep 60) & echo $! > pids; wait"
    run = Run(tmp_path, spawner, argv=["sh", "-c", script])
    process = await run.start()
    await eventually(lambda: pids_in(run.work / "pids"))
    hidden = pids_in(run.work / "pids")[0]
    await eventually(lambda: Path(f"/proc/{hidden}/comm").read_text() == "sleep\n")
    os.kill(json.loads((run.record / "keeper.json").read_text())["pid"], signal.SIGKILL)
    assert (await process.exited()).outcome is Outcome.LOST
    await eventually(lambda: not alive(hidden))
    assert Process.find(other.place) is not None, "a keeper that lives is left alone"
    other.stop()
    assert (await other.exited()).outcome is Outcome.KILLED


async def test_an_import_that_fails_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_library")
    setup = Setup("harness", ("broken:run",), (str(tmp_path),), launcher_environment({}), tmp_path / "log")
    spawner = Spawner(setup, os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT))
    with pytest.raises(LaunchError, match=r"cannot import 'broken'.*no_such_library"):
        await spawner.start()
    await spawner.close()


def test_the_launcher_imports_nothing_but_the_standard_library() -> None:
    """It is forked for every attempt: what it has in memory is paid for each time."""
    script = "import sys, canter.controller.launcher; print(*{name.split('.')[0] for name in sys.modules})"
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    foreign = set(result.stdout.split()) & {"numpy", "pydantic", "aiohttp", "msgpack", "orjson", "torch", "asyncio"}
    assert foreign == set()


def test_descendants_and_start_times_are_those_of_the_kernel() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        deadline = time.monotonic() + 5
        while len(below := procfs.descendants(os.getpid())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert child.pid in {process.pid for process in below}
        assert {p.parent for p in below} >= {os.getpid(), child.pid}
        me = procfs.stat(child.pid)
        assert me is not None
        assert procfs.alive(child.pid, me.start)
        assert not procfs.alive(child.pid, me.start + 1)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert procfs.stat(child.pid) is None


async def test_a_process_of_another_boot_or_a_later_one_is_not_taken_for_the_keeper(tmp_path: Path) -> None:
    me = procfs.stat(os.getpid())
    assert me is not None
    kept = {"pid": me.pid, "start": me.start, "boot": procfs.boot_id()}
    for change, found in (
        ({}, True),
        ({"boot": "another"}, False),
        ({"start": me.start + 1}, False),
        ({"pid": 2**22}, False),
    ):
        (tmp_path / "keeper.json").write_text(json.dumps({**kept, **change}))
        assert (Process.find(Place(tmp_path, (), ())) is not None) is found
