"""Harnesses that attack what the controller has on this machine: it goes on, and says what became of the attempt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from controller_rig import Rig, alive, eventually, pids_in, rig, settings

from canter.client import Client
from canter.config import Config
from canter.controller import procfs
from canter.controller.exit import Exit
from canter.controller.folder import Place, attempts, place, read_exit, read_keeper
from canter.controller.removal import remove
from canter.errors import LaunchError
from canter.types import Attempt, KeyKind, Outcome, Reason, RolloutState


def attack(name: str, keep: str = "all", **harness: Any) -> Config:
    return settings(
        {"function": f"hostile_programs:{name}", **harness},
        {"function": "grader_programs:by_exit_code"},
        runner={"retry_delay_s": 0.0, "keep_dirs": keep},
    )


async def goes_on(run: Rig) -> None:
    """The controller still starts rollouts."""
    await run.add("next")
    await run.until(lambda rollout: rollout.attempt > 0, "next")


SPOILERS = (
    "remove_folder",
    "replace_folder",
    "replace_work",
    "replace_rollout",
    "strange_names",
    "cut_another_file",
    "nest",
)


@pytest.mark.parametrize("keep", ["all", "none"])
async def test_its_folder_is_the_harness_s_to_spoil(tmp_path: Path, keep: str) -> None:
    """It ended, and is graded, whatever it has made of its folder; nothing outside of that is touched."""
    outside = tmp_path / "outside"
    (outside / "1").mkdir(parents=True)
    precious = outside / "1" / "precious"
    precious.write_text("x" * 2**20)
    os.truncate(precious, 20 * 2**20)  # longer than a log may be
    os.chmod(outside, 0o755)
    async with rig(attack("spoil", keep), tmp_path / "run") as run:
        run.start()
        for name in SPOILERS:
            given = precious if name == "cut_another_file" else outside
            await run.add(name, input={"how": name, "outside": str(given)})
        for name in SPOILERS:
            assert (await run.done(name)).reward == 1.0
            assert (await run.store.attempts(name))[0].outcome is Outcome.EXITED
        await goes_on(run)
        if keep == "none":
            for name in set(SPOILERS) - {"replace_rollout", "strange_names"}:
                await eventually(lambda name=name: not os.path.lexists(run.folder(name)))
                await eventually(lambda name=name: not os.path.lexists(run.record(name)))
    remove(tmp_path, "run")  # deeper than what cleans up after tests can go
    assert precious.stat().st_size == 20 * 2**20
    assert outside.stat().st_mode & 0o777 == 0o755


async def test_pipes_in_the_place_of_its_output_hold_nobody_up(tmp_path: Path) -> None:
    async with rig(attack("pipes"), tmp_path) as run:
        run.start()
        await run.add("r")
        assert (await run.done("r")).reason is Reason.NO_CALLS
        await goes_on(run)


async def test_who_kills_its_keeper_is_lost_and_leaves_nothing(tmp_path: Path) -> None:
    """Whatever it forges: how it ended is told on a connection that only its keeper has."""
    file = tmp_path / "pid"
    async with rig(attack("kill_keeper"), tmp_path / "run") as run:
        run.start()
        await run.add("r", input={"pid": str(file)})
        rollout = await run.done("r")
        assert (rollout.state, rollout.reason) == (RolloutState.INVALID, Reason.NODE_LOST)
        await eventually(lambda: not alive(pids_in(file)[0]))
        await goes_on(run)


async def test_what_a_clean_end_leaves_behind_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    async with rig(attack("daemon"), tmp_path / "run") as run:
        run.start()
        await run.add("r", input={"pid": str(file), "cwd": "/"})
        assert (await run.done("r")).reward == 1.0
        assert not alive(pids_in(file)[0])


NONSENSE = [
    "",
    "[]",
    "[" * 30_000,
    '{"pid": 99999999999999999999, "start": 1, "boot": "BOOT"}',
    '{"pid": true, "start": 1, "boot": "BOOT"}',
    '{"pid": 1, "start": -1, "boot": "BOOT"}',
    '{"pid": 1, "start": 1e300, "boot": "BOOT", "outcome": "exited", "exit_code": 1e300, "message": ""}',
    '{"outcome": "exited", "exit_code": {"a": 1}, "message": 5}',
    '{"outcome": ["exited"], "exit_code": 0, "message": ""}',
    '{"outcome": "exited", "exit_code": 0, "message": 5}',
    '{"outcome": "exited", "exit_code": 4096, "message": ""}',
    '{"outcome": "soaring", "exit_code": 0, "message": ""}',
]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_a_record_that_no_keeper_wrote_counts_as_missing(tmp_path: Path, text: str) -> None:
    for name in ("keeper.json", "exit.json"):
        (tmp_path / name).write_text(text.replace("BOOT", procfs.boot_id()))
    assert read_keeper(tmp_path) is None
    found = read_exit(Place(tmp_path, (), ()))
    assert found.outcome is Outcome.LOST
    assert "exit.json cannot be read" in found.message


def test_a_record_that_is_no_file_counts_as_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keeper.json")
    (tmp_path / "exit.json").mkdir()
    assert read_keeper(tmp_path) is None
    assert read_exit(Place(tmp_path, (), ())).outcome is Outcome.LOST


def test_half_a_surrogate_pair_does_not_get_into_a_message() -> None:
    exit = Exit.read({"outcome": "exited", "exit_code": 1, "message": "\ud800"})
    assert exit.message.encode() == b"?"


async def test_forged_records_do_not_stop_the_next_controller(tmp_path: Path) -> None:
    async with rig(attack("forge_records"), tmp_path) as run:
        run.start(stop_harnesses=False)
        texts = {"keeper": NONSENSE[3].replace("BOOT", procfs.boot_id()), "exit": NONSENSE[7]}
        await run.add("r", input=texts)
        await run.running("r")
        await eventually((run.record("r") / "exit.json").exists)
        keeper = (await run.store.attempts("r"))[0].process["pid"]
        await run.stop()
        run.start()
        rollout = await run.done("r")
        assert (rollout.reason, rollout.attempt) == (Reason.NODE_LOST, 1)
        assert "cannot be read" in rollout.message
        await eventually(lambda: not alive(keeper))
        await goes_on(run)


@pytest.mark.parametrize("id", ["..", ".", "é" * 60, "a" * 201])
async def test_an_id_that_makes_no_folder_ends_its_rollout(tmp_path: Path, id: str) -> None:
    with pytest.raises(LaunchError, match="makes no folder name"):
        place(tmp_path, id, 1)
    async with rig(attack("daemon"), tmp_path) as run:
        run.start()
        try:
            await run.add(id, max_attempts=2)
        except ValueError:
            pytest.skip("the store does not take it")
        rollout = await run.done(id)
        assert (rollout.state, rollout.reason, rollout.attempt) == (RolloutState.INVALID, Reason.SPAWN_ERROR, 2)
        assert "makes no folder name" in rollout.message


class FaultyClient(Client):
    """Has a fault that no part of the controller expects."""

    async def set_process(self, rollout_id: str, number: int, process: dict[str, Any]) -> Attempt:
        if rollout_id == "bad":
            raise KeyError("a fault of ours")
        return await super().set_process(rollout_id, number, process)


async def test_a_fault_in_one_rollout_costs_only_that(tmp_path: Path) -> None:
    async with rig(attack("spoil"), tmp_path) as run:
        key = await run.store.issue_key(KeyKind.SERVICE)
        async with FaultyClient(run.url, key) as run.client:
            run.start()
            await run.add("bad", "good")
            assert (await run.done("good")).reward == 1.0
            rollout = await run.done("bad")
            assert (rollout.state, rollout.reason) == (RolloutState.INVALID, Reason.SPAWN_ERROR)
            assert rollout.message == "Start: KeyError: 'a fault of ours'"
            await run.stop()


def test_only_numbers_are_attempts(tmp_path: Path) -> None:
    for name in ("r/1", "r/²", "r/01", "r/-1", "r/12", "²/1", "a%20b/3", "a b/4"):
        (tmp_path / "control" / "attempts" / name).mkdir(parents=True)
    assert sorted(attempts(tmp_path)) == [("a b", 3), ("r", 1), ("r", 12)]


async def test_a_time_limit_beyond_what_the_system_takes(tmp_path: Path) -> None:
    config = settings({"command": ["true"], "timeout_s": 86_400}, {"function": "grader_programs:by_exit_code"})
    limitless = config.harness.model_copy(update={"timeout_s": 1e300})
    async with rig(config.model_copy(update={"harness": limitless}), tmp_path) as run:
        run.start()
        await run.add("r")
        assert (await run.done("r")).reward == 1.0


def test_removal_follows_no_link_and_minds_no_rights(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    folder = tmp_path / "root" / "a" / "b"
    (folder / "closed" / "in").mkdir(parents=True)
    (folder / "to").symlink_to(outside)
    (folder / "closed" / "to").symlink_to(outside / "precious")
    os.mkfifo(folder / "pipe")
    os.chmod(folder / "closed" / "in", 0)
    os.chmod(folder / "closed", 0)
    remove(tmp_path / "root", "a", "b")
    assert os.listdir(tmp_path / "root") == ["a"]
    (tmp_path / "root" / "a" / "b").symlink_to(outside)
    remove(tmp_path / "root", "a", "b")
    assert os.listdir(tmp_path / "root" / "a") == []
    (tmp_path / "root" / "a").rmdir()
    (tmp_path / "root" / "a").symlink_to(tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        remove(tmp_path / "root", "a", "outside")
    assert [path.name for path in outside.iterdir()] == ["precious"]
    remove(tmp_path / "root", "absent", "b")
