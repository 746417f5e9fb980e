"""`canter harness check` with agents of a team's own: what it prints, its exit code, what it leaves."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from canter.cli import run as canter

HERE = Path(__file__).parent
TOML = """
[model]
path = "nowhere"
[tasks]
train = "train.jsonl"
[harness]
function = "checked_agents:{agent}"
[grader]
use = "exact"
"""


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder into which checks put theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path / "tmp"


def toml(folder: Path, agent: str) -> str:
    shutil.copy(HERE / "checked_agents.py", folder)
    (folder / "run.toml").write_text(TOML.format(agent=agent), encoding="utf-8")
    return str(folder / "run.toml")


def test_a_good_agent(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["harness", "check", toml(tmp_path, "good")]) == 0
    printed = capsys.readouterr().out
    assert "POST /v1/chat/completions" in printed
    assert "extends" in printed
    assert "commands executed: 4 of 4" in printed
    assert "one token per byte" in printed
    assert "good: it finished" in printed
    assert list(left.iterdir()) == []


def test_for_programs(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "mine", "prompt": "My own task."}\n')
    assert canter(["harness", "check", toml(tmp_path, "good"), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["good"]
    assert [request["fork"] for request in row["requests"]] == [None] * 4
    assert [request["tools"] for request in row["requests"]] == [1] * 4
    assert [sample["calls"] for sample in row["samples"]] == [4]
    tokens = row["report"]["tokens"]
    assert tokens["sampled"] == tokens["trained"] == sum(r["sampled_tokens"] for r in row["requests"])
    assert "openai" in row["requests"][0]["user_agent"].lower()


def test_a_kept_folder_can_be_read(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "mine", "prompt": "My own task."}\n')
    assert canter(["harness", "check", toml(tmp_path, "good"), "--keep"]) == 0
    [folder] = left.glob("ct-*/c-*")
    assert f"kept: {folder}" in capsys.readouterr().out
    assert canter(["rollouts", "show", str(folder), "trial"]) == 0
    assert "My own task." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("agent", "options", "words"),
    [
        ("silent", [], ["it got no reply from the model", "OPENAI_BASE_URL", "| nothing to do"]),
        ("insistent", [], ["exit code 1 before any answered call", " gpt-9 ", "from CANTER_MODEL, or list it"]),
        ("endless", ["--timeout", "1"], ["it did not finish: timed_out", "--timeout SECONDS"]),
        ("fails_at_the_end", [], ["it ended with exit code 7"]),
    ],
)
def test_a_bad_agent_is_told_what_to_do(
    agent: str, options: list[str], words: list[str], tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canter(["harness", "check", toml(tmp_path, agent), *options]) == 1
    printed = capsys.readouterr().out
    assert "not good:" in printed
    for word in words:
        assert word in printed
    [folder] = left.glob("ct-*/c-*")
    assert str(folder) in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mini-swe-agnt"], "did you mean 'mini-swe-agent'?"),
        (["mini-swe-agent", "step_limt=3"], "step_limit"),
        (["mini-swe-agent", "config=none.yaml"], "none.yaml does not exist"),
        (["none.toml"], "cannot read none.toml"),
    ],
)
def test_what_cannot_be_checked(
    arguments: list[str], message: str, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert canter(["harness", "check", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(left.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "words", "absent"),
    [
        ('["no-such-program"]', ["could not be started: cannot start 'no-such-program'", "nothing of it ran"], "| "),
        ('["python3", "beside.py"]', ["write {base}/beside.py in harness.command"], "it never called"),
        ('["python3", "-c", "import no_such_module"]', ["it could not import a module"], "it never called"),
        ('["sh", "-c", "echo no use; exit 3"]', ["an error of its own", "| no use"], "it never called"),
        ('["sh", "-c", "exit 3"]', ["it never called the gateway"], "an error of its own"),
    ],
)
def test_a_program_that_never_asked(
    command: str, words: list[str], absent: str, tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who does not get as far as the gateway is not told of endpoints."""
    (tmp_path / "beside.py").touch()
    file = Path(toml(tmp_path, "good"))
    file.write_text(file.read_text().replace('function = "checked_agents:good"', f"command = {command}"))
    assert canter(["harness", "check", str(file)]) == 1
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
    assert absent not in printed
    assert "commands executed" not in printed


def test_a_refusal_is_said_once(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["harness", "check", toml(tmp_path, "insistent")]) == 1
    assert capsys.readouterr().out.count("The model 'gpt-9' does not exist") == 1
    assert canter(["harness", "check", toml(tmp_path, "insistent"), "--json"]) == 1
    [request] = json.loads(capsys.readouterr().out)["requests"]
    assert (request["status"], request["model"]) == (404, "gpt-9")
    assert "model_not_found" in request["refusal"]


def test_a_module_that_is_not_there(tmp_path: Path, left: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["harness", "check", toml(tmp_path, "good"), "harness.function=nothing:run"]) == 2
    assert "No module named 'nothing'" in capsys.readouterr().err
    assert list(left.iterdir()) == []
