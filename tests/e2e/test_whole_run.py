"""What a finished run leaves behind, and what the command line reads from it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import write_run
from transformers import AutoModelForCausalLM
from whole_run import WholeRun, wait_until

from canter.cli import run as canter
from canter.types import RolloutState


def call_json(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert canter(list(argv)) == 0
    return json.loads(capsys.readouterr().out)


def test_the_run_folder_is_complete(local_run: WholeRun) -> None:
    folder = local_run.run.path
    names = {"manifest.json", "metrics.jsonl", "config.toml", "canter.db", "checkpoints", "report.html", "logs"}
    assert names <= {p.name for p in folder.iterdir()}
    manifest = json.loads((folder / "manifest.json").read_text())
    wanted = {"code", "lock", "data", "model", "harness", "settings", "hardware", "seed", "evaluation", "train_wall_s"}
    assert wanted <= set(manifest)
    assert manifest["drops"] == {"rollouts": {}, "calls": {}}
    assert manifest["tokens"]["trained"] == manifest["tokens"]["sampled"] > 0
    assert "<script" not in (folder / "report.html").read_text()


def test_no_key_stands_in_any_file(local_run: WholeRun) -> None:
    """Keys are recognisable by their prefix, so that they can be looked for."""
    for file in local_run.run.path.rglob("*"):
        if file.is_file():
            assert b"ck-" not in file.read_bytes(), f"{file} holds a key"


def test_samples_are_what_the_engine_drew(local_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """The engine's own journal, which does not go through the gateway, has the same ids and logprobs."""
    samples = call_json(capsys, "samples", str(local_run.run.path), "--json")["samples"]
    journal = [json.loads(line) for line in (local_run.run.logs / "engine.jsonl").read_text().splitlines()]
    drawn = {(tuple(line["prompt"]), tuple(line["ids"])): line["logprobs"] for line in journal}
    assert len({s["rollout_id"] for s in samples}) == len(samples) == 12
    matched = 0
    for sample in samples:
        ids, mask = sample["ids"], np.array(sample["mask"])
        edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            logprobs = drawn[tuple(ids[:start]), tuple(ids[start:end])]
            assert np.allclose(logprobs, sample["logprobs"][start:end], atol=1e-6)
            matched += 1
    assert matched == len(journal)


def test_recomputed_logprobs_agree(local_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    """A dense forward of the model as given, over the samples of version 0."""
    samples = call_json(capsys, "samples", str(local_run.run.path), "--json", "--step", "1")["samples"]
    model = AutoModelForCausalLM.from_pretrained(local_run.folder / "model").eval()
    for sample in samples:
        assert {v for v, m in zip(sample["versions"], sample["mask"], strict=True) if m} == {0}
        with torch.no_grad():
            logits = model(torch.tensor([sample["ids"]])).logits[0]
        found = logits[:-1].log_softmax(-1).gather(1, torch.tensor(sample["ids"][1:])[:, None])[:, 0].numpy()
        mask = np.array(sample["mask"])[1:]
        assert np.abs(found - np.array(sample["logprobs"])[1:])[mask].max() <= 1e-3


def test_the_same_seed_gives_the_same_rollouts(local_run: WholeRun, tmp_path: Path) -> None:
    again = WholeRun(tmp_path, write_run(tmp_path, engine="local", steps=1))
    again.start("runner.concurrency=2")
    assert again.finish() == 0, again.output()

    def first_step(run: WholeRun) -> list[tuple[str, int, list[int]]]:
        _, calls = run.recorded()
        return [(c.rollout_id, c.ordinal, c.sampled.tolist()) for c in calls if c.rollout_id.startswith("s00001")]

    assert first_step(again) == first_step(local_run)


def test_the_command_line_reads_the_run(local_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(local_run.run.path)
    listed = call_json(capsys, "rollouts", "list", path, "--json")["rollouts"]
    assert len(listed) == 12
    shown = call_json(capsys, "rollouts", "show", path, listed[0]["id"], "--json")
    assert len(shown["calls"]) == 2
    assert "hidden" not in shown["rollout"]["task"]
    counts = call_json(capsys, "rollouts", "show", path, "--json")["counts"]
    assert counts["rollouts.scored"] == 12
    assert canter(["rollouts", "list", path]) == 0
    assert canter(["rollouts", "show", path, listed[0]["id"]]) == 0
    assert canter(["samples", path, "--verify"]) == 0
    assert "next:" in capsys.readouterr().out


def test_what_is_not_there_is_said(local_run: WholeRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["rollouts", "show", str(local_run.run.path), "nobody"]) == 2
    assert "nobody" in capsys.readouterr().err
    assert canter(["rollouts", "list", "/nowhere"]) == 2
    assert "latest" in capsys.readouterr().err


def test_resuming_a_finished_run_changes_nothing(local_run: WholeRun) -> None:
    rows = local_run.rows()
    local_run.start()
    assert local_run.finish() == 0, local_run.output()
    assert local_run.rows() == rows


def test_interrupted_it_stops_everything_and_resumes(tmp_path: Path) -> None:
    """Harnesses, too; their attempts are made again, and were not counted: there is only one."""
    run = WholeRun(tmp_path, write_run(tmp_path, steps=2))
    run.start("harness.function=tiny_harness:linger", "runner.max_attempts=1", "runner.concurrency=3")
    assert wait_until(lambda: len(run.received()) == 3 or not run.running(), 90)
    ours = list(run.processes())
    names = [" ".join(p.cmdline()) for p in ours]
    assert sum("canter.controller.launcher" in name for name in names) == 2 + 2 * 3, names  # with keepers and harnesses
    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == 130, run.output()
    assert not [p for p in ours if p.is_running()]
    assert not list(run.processes())
    assert {r.state for r in run.recorded()[0]} == {RolloutState.QUEUED}
    (tmp_path / "received.txt.go").touch()
    run.start()
    assert run.finish() == 0, run.output()
    assert [row["step"] for row in run.rows()] == [1, 2]
    rollouts, _ = run.recorded()
    assert sorted(r.attempt for r in rollouts) == [1] * 9 + [2] * 3
    assert {r.state for r in rollouts} == {RolloutState.SCORED}


def test_without_its_supervisor_a_run_leaves_no_process(tmp_path: Path) -> None:
    run = WholeRun(tmp_path, write_run(tmp_path, steps=1))
    run.start("harness.function=tiny_harness:linger", "runner.concurrency=3")
    assert wait_until(lambda: len(run.received()) == 3 or not run.running(), 90)
    ours = list(run.processes())
    assert run.process is not None
    run.process.kill()
    run.process.wait(10)
    assert wait_until(lambda: not any(p.is_running() for p in ours), 60), [p for p in ours if p.is_running()]
    assert not list(run.processes())
    (tmp_path / "received.txt.go").touch()
    run.start()
    assert run.finish() == 0, run.output()
    assert {r.state for r in run.recorded()[0]} == {RolloutState.SCORED}


def test_a_broken_recipe_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    file = write_run(tmp_path, steps=1)
    for override, says in {
        "harness.function=tiny_harness:nothing": "nothing",
        "tasks.train=absent.jsonl": "absent.jsonl",
        "model.path=absent": "absent",
    }.items():
        command = [sys.executable, "-m", "canter.cli", "train", str(file), override]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode in (1, 2), (override, done)
        assert says in done.stderr, (override, done.stderr)
        assert "Traceback" not in done.stderr
