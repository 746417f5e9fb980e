"""How the command line words the end of an attempt, and what it advises where a program did not get far."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from canter.cli.endings import LINE_CHARS, ending, last_lines, start_advice
from canter.types import Attempt, Outcome


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (None, None, ""),
        (Outcome.EXITED, 0, "exit code 0"),
        (Outcome.EXITED, 3, "exit code 3"),
        (Outcome.EXITED, -9, "killed by signal 9"),
        (Outcome.TIMED_OUT, -15, "timed out"),
        (Outcome.SPAWN_FAILED, 1, "spawn failed"),
        (Outcome.LOST, None, "lost"),
    ],
)
def test_endings(outcome: Outcome | None, code: int | None, words: str) -> None:
    assert ending(Attempt("r", 1, outcome=outcome, exit_code=code)) == words


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("python3: can't open file '{work}/a b.py': [Errno 2] No such file or directory", "{base}/a b.py"),
        ("bash: src/run.sh: No such file or directory", "{base}/src/run.sh"),
        ("Error: Cannot find module '{work}/src/run.sh'", "{base}/src/run.sh"),
        ("bash: here.sh: No such file or directory", "looks for a file"),
        ("bash: other.sh: No such file or directory", "looks for a file"),
        ("bash: ../secret: No such file or directory", "looks for a file"),
        ("bash: line 1: agent: command not found", "not on its PATH"),
        ("sh: 1: agent: not found", "not on its PATH"),
        ("ModuleNotFoundError: No module named 'agent'", "import"),
        ("Error: Cannot find module 'openai'", "import"),
        ("KeyError: 'x'", "an error of its own"),
        ("httpx.ConnectError: [Errno 111] Connection refused", None),
        ("openai.OpenAIError: the api_key client option must be set", None),
        ("", None),
    ],
)
def test_advice_for_a_failed_start(line: str, advice: str | None, tmp_path: Path) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    (base / "src").mkdir(parents=True)
    work.mkdir()
    for file in (base / "a b.py", base / "src/run.sh", base / "here.sh", work / "here.sh", tmp_path / "secret"):
        file.touch()
    said = start_advice([line.replace("{work}", str(work))], base, work)
    assert (said is None) == (advice is None)
    assert (advice or "") in (said or "")


def test_last_lines_are_few_and_short(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a\nb\n" + "c" * 1000 + "\n\n")
    assert last_lines(tmp_path / "log", 2) == ["b", "c" * LINE_CHARS]
    assert last_lines(tmp_path / "none", 2) == []


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to("secret")
    os.mkfifo(tmp_path / "pipe")
    assert last_lines(tmp_path / "link", 2) == last_lines(tmp_path / "pipe", 2) == []
