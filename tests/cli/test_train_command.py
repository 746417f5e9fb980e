"""`canter train` before anything starts: what it refuses, and what a resume may change."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from rich.console import Console

from canter.cli import run as canter
from canter.cli.finish import Finished, learned_nothing, print_result
from canter.cli.train import RESUMABLE, different, resumed
from canter.config import Config, load
from canter.errors import ConfigError
from canter.runs import RunFolder
from canter.store import open_store
from canter.types import Rollout, Task

TOML = """
[model]
path = "model"
[tasks]
train = "train.jsonl"
[harness]
command = ["true"]
[grader]
use = "exact"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "train.jsonl").write_text(json.dumps({"id": "a", "prompt": "p"}) + "\n")
    return tmp_path / "run.toml"


@pytest.fixture
def run(file: Path, tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "runs", "x")
    folder.config.write_text(TOML)
    folder.update_manifest({"base": str(tmp_path)})
    return folder


def test_dry_run_prints_the_tree_and_checks_the_files(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["train", str(file), "--dry-run", "trainer.steps=7"]) == 0
    assert "steps = 7" in capsys.readouterr().out
    (file.parent / "train.jsonl").write_text("{")
    assert canter(["train", str(file), "--dry-run"]) == 2
    assert "train.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train"], "give the TOML file"),
        (["train", "{file}", "engine.use=openai", "engine.url=http://127.0.0.1:1/v1"], "cannot be trained"),
        (["train", "{file}", "model.chat_template=absent.jinja"], "absent.jinja"),
        (["train", "{file}", "harness.files.a=absent"], "absent"),
        (["train", "{file}", "run.dir=/proc/x"], "model"),
        (["train", "{file}", "run.name=a/b"], "run.name"),
        (["train", "--resume", "nowhere"], "nowhere"),
        (["train", "{file}", "trainer.stepz=1"], "trainer.steps"),
    ],
)
def test_refusals(argv: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter([a.replace("{file}", str(file)) for a in argv]) == 2
    assert says in capsys.readouterr().err
    assert not list(file.parent.glob("runs/*")), "a start that fails leaves no run folder"


def test_a_resume_changes_only_what_alters_nothing_recorded(run: RunFolder, file: Path) -> None:
    resumed(str(run.path), None, ("trainer.steps=9", "runner.concurrency=2"))
    assert load(run.config).trainer.steps == 9
    assert run.manifest()["resumed_with"] == ["trainer.steps=9", "runner.concurrency=2"]
    with pytest.raises(ConfigError, match=r"trainer\.lr cannot change"):
        resumed(str(run.path), file, ("trainer.lr=1",))


def test_a_changed_file_is_noticed(run: RunFolder, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    resumed(str(run.path), file, ())
    assert "note:" not in capsys.readouterr().err
    file.write_text(TOML.replace('"true"', '"false"'))
    resumed(str(run.path), file, ())
    assert "harness.command" in capsys.readouterr().err


def test_every_resumable_setting_exists(file: Path) -> None:
    known = {f"{s}.{n}" for s in Config.model_fields if s != "base" for n in type(getattr(load(file), s)).model_fields}
    assert known >= RESUMABLE
    assert different(load(file), load(file, ["trainer.steps=3", "trainer.lr=1"])) == ["trainer.lr"]


def test_a_finished_run_is_not_started_again(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has no model: a start would fail at it."""
    steps = load(run.config).trainer.steps
    run.metrics.write_text(json.dumps({"step": steps, "time": time.time()}) + "\n")
    assert canter(["train", "--resume", str(run.path)]) == 2, "not finished"
    run.update_manifest({"finished_at": time.time(), "train_wall_s": 3.5})
    run.report.write_text("report")
    capsys.readouterr()
    assert canter(["train", "--resume", str(run.path)]) == 0
    assert "already complete" in capsys.readouterr().out
    assert run.manifest()["train_wall_s"] == 3.5
    with run.metrics.open("a") as file:  # killed after a later resume's last step, before its report
        file.write(json.dumps({"step": steps + 1, "time": time.time() + 60}) + "\n")
    assert canter(["train", "--resume", str(run.path), f"trainer.steps={steps + 1}"]) == 2
    assert canter(["train", "--resume", str(run.path), f"trainer.steps={steps + 2}"]) == 2


def test_the_end_names_a_failed_rollout_and_says_when_nothing_was_learned(run: RunFolder) -> None:
    manifest = {
        "evaluation": {"details": {}},
        "drops": {"rollouts": {}},
        "train_wall_s": 1.0,
        "counts": {"attempts.exited_nonzero": 2},
    }
    console = Console(record=True, width=40)
    flat = {"groups": 2, "groups_without_spread": 2, "grad_norm": 0.0}
    print_result(console, run, Finished(manifest, [flat, flat], "s00001-g000-r00"))
    text = console.export_text()
    assert f"canter rollouts show {run.path} s00001-g000-r00" in text
    assert "nothing was learned: in every group all rewards were equal" in text


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"groups": 0, "groups_without_spread": 0}],
        [{"groups": 2, "groups_without_spread": 2}, {"groups": 2, "groups_without_spread": 1}],
        [{"groups": 1, "groups_without_spread": 1, "grad_norm": 0.1}],
    ],
)
def test_what_may_have_been_learned(rows: list[dict[str, float]]) -> None:
    assert not learned_nothing(rows)


def test_verify_counts_what_it_does_not_look_at(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    async def fill() -> None:
        store = open_store(run.store)
        await store.create_rollouts([Rollout(f"r{i}", "g", Task("t", "p"), index=i, step=1) for i in range(3)])
        await store.start_attempt("r0", 1)
        await store.cancel("r1")
        await store.close()

    asyncio.run(fill())
    assert canter(["samples", str(run.path), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "every committed call of a finished rollout is trained" in said
    assert "2 rollouts are not finished (0 calls): not counted" in said
    assert canter(["samples", str(run.path), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == {"rollouts": 2, "calls": 0}
