"""`canter train` before anything starts: what it refuses, and what a resume may change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from canter.cli import run as canter
from canter.cli.train import RESUMABLE, different, resumed
from canter.config import Config, load
from canter.errors import ConfigError
from canter.runs import RunFolder

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
