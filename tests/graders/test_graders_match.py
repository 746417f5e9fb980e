"""The built-in matches and where answers are read from."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canter.errors import GraderError
from canter.graders.answer import ANSWER_BYTES, final_answer
from canter.graders.match import exact, last_number, match, numeric, regex


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", 42, 1.0),
        ("42.", "42", 0.0),
        ("Paris", ["Paris", "paris"], 1.0),
        ("Rome", ["Paris", "paris"], 0.0),
        ("", "", 1.0),
        ("True", True, 1.0),
    ],
)
def test_exact(answer: str, expected: Any, reward: float) -> None:
    assert exact(answer, expected) == reward


def test_regex_is_searched_and_a_bad_one_is_the_tasks_fault() -> None:
    assert regex("the answer is 42", r"\b42\b") == 1.0
    assert regex("the answer is 421", r"\b42\b") == 0.0
    with pytest.raises(GraderError, match="is no regular expression"):
        regex("x", "(")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42),
        ("so 6 times 7 is 42.", 42),
        ("-3", -3),
        ("−3", -3),
        ("1,234.5", 1234.5),
        ("in all 1,234,567", 1234567),
        ("1,2", 2),
        ("2e-4", 2e-4),
        (".5", 0.5),
        ("$7.25!", 7.25),
        ("no number", None),
        ("", None),
        ("nan", None),
        ("9e999", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(alphabet="abc xyz:=\n"))
def test_any_number_written_in_a_sentence_is_found(value: float, words: str) -> None:
    assert last_number(f"{words} {value!r} {words}") == value
    assert numeric(f"{words} {value!r}", value, 0.0) == 1.0


@given(st.integers(-(10**12), 10**12))
def test_thousands_separators_change_nothing(value: int) -> None:
    assert last_number(f"it is {value:,}.") == value


@pytest.mark.parametrize(("difference", "reward"), [(0.0, 1.0), (0.009, 1.0), (0.02, 0.0), (-0.009, 1.0)])
def test_tolerance_is_absolute(difference: float, reward: float) -> None:
    assert numeric(str(10 + difference), 10, 0.01) == reward


def test_no_answer_is_the_agents_failure_and_no_expected_answer_the_tasks() -> None:
    for use in ("exact", "regex", "numeric"):
        assert match(use, None, {"answer": "1"}, tolerance=0) == 0.0
        with pytest.raises(GraderError, match=r"needs hidden\.answer"):
            match(use, "1", {"solution": "1"}, tolerance=0)
    for bad in ("many", math.nan, None):
        with pytest.raises(GraderError, match="must be a finite number"):
            match("numeric", "1", {"answer": bad}, tolerance=0)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "hidden.txt").write_text("42")
    (tmp_path / "stdout.txt").write_text("thinking\n42\n")
    return work


def answer(work: Path, where: str, last_message: str | None = "said") -> str | None:
    return final_answer(where, last_message=last_message, stdout=work.parent / "stdout.txt", work=work)


def test_places_of_the_answer(work: Path) -> None:
    (work / "a").mkdir()
    (work / "a" / "answer.txt").write_text("filed")
    assert answer(work, "last_message") == "said"
    assert answer(work, "last_message", None) is None
    assert answer(work, "stdout") == "thinking\n42\n"
    assert answer(work, "file:a/answer.txt") == "filed"
    assert answer(work, "file:absent") is None
    for wrong in ("file:", "stdin", "file"):
        with pytest.raises(GraderError, match="use last_message, stdout or file:NAME"):
            answer(work, wrong)


def test_only_plain_files_inside_the_working_folder_are_read(work: Path) -> None:
    """An agent may put a link to a file with the answers where its own answer is expected."""
    (work / "link").symlink_to(work.parent / "hidden.txt")
    (work / "folder").symlink_to(work.parent)
    (work / "loop").symlink_to(work / "loop")
    os.mkfifo(work / "pipe")
    (work / "dir").mkdir()
    for name in ("link", "folder/hidden.txt", "../hidden.txt", "loop", "loop/x", "pipe", "dir", "nul\0"):
        assert answer(work, f"file:{name}") is None


def test_an_endless_answer_is_none_but_of_printed_text_the_end_counts(work: Path) -> None:
    with (work / "big").open("wb") as file:
        file.truncate(ANSWER_BYTES + 1)
    assert answer(work, "file:big") is None
    (work.parent / "stdout.txt").write_bytes(b"x" * ANSWER_BYTES + b"\nlast \xff line")
    text = answer(work, "stdout")
    assert text is not None
    assert len(text) <= ANSWER_BYTES
    assert text.endswith("\nlast � line")
