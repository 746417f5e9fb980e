"""`canter rollouts`: how attempts ended, by a run folder in which a real harness ran."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from canter.cli import run as canter
from canter.cli.check import configured
from canter.cli.trial import run_trial, scripted_model, trial_folder
from canter.runs import RunFolder

TOML = """
[model]
path = "nowhere"
[tasks]
train = "train.jsonl"
[harness]
command = ["sh", "-c", {script}]
[grader]
use = "exact"
"""


def ran(folder: Path, script: str, timeout_s: float = 60.0) -> RunFolder:
    """The run folder of one attempt of a shell script."""
    (folder / "run.toml").write_text(TOML.format(script=json.dumps(script)))
    config, task = configured(str(folder / "run.toml"), (), timeout_s)
    run = trial_folder(folder, "r", config)
    asyncio.run(run_trial(config, run, task, scripted_model()))
    return run


def test_a_failed_attempt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ran(tmp_path, "for n in 1 2 3 4 5 6 7; do echo word $n >&2; done; exit 3")
    capsys.readouterr()
    assert canter(["rollouts", "list", str(run.path)]) == 0
    assert "exit code 3" in capsys.readouterr().out
    assert canter(["rollouts", "list", str(run.path), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rollouts"]
    assert row["ended"] == {"outcome": "exited", "exit_code": 3, "text": "exit code 3"}
    assert canter(["rollouts", "show", str(run.path), "trial"]) == 0
    printed = capsys.readouterr().out
    assert f"the end of {run.attempts / 'trial' / '1' / 'stderr.txt'}:" in printed
    assert "| word 3" in printed
    assert "| word 2" not in printed
    assert "removed" not in printed
    assert printed.count("before any answered call") == 1


def test_an_attempt_whose_folder_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ran(tmp_path, "sleep 30", timeout_s=1.0)
    shutil.rmtree(run.attempts / "trial")
    capsys.readouterr()
    assert canter(["rollouts", "show", str(run.path), "trial"]) == 0
    printed = capsys.readouterr().out
    assert f"attempt 1: timed out  {run.attempts / 'trial' / '1'} (removed; runner.keep_dirs)" in printed


def test_a_run_folder_that_was_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ran(tmp_path, "echo help >&2; exit 2")
    moved = RunFolder(run.path.rename(tmp_path / "moved"))
    capsys.readouterr()
    assert canter(["rollouts", "show", str(moved.path), "trial"]) == 0
    printed = capsys.readouterr().out
    assert str(moved.attempts / "trial" / "1" / "stderr.txt") in printed
    assert "| help" in printed
