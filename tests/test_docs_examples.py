"""What the pages show works: graders are run, settings load, task rows parse; and tables name every field and key."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from canter.cli.manifest import describe as describe_run
from canter.config import load
from canter.graders import Grading
from canter.graders.run import Assignment, judge
from canter.runs import RunFolder
from canter.samples import build
from canter.trainer.data import read_tasks
from canter.trainer.loop import row_of
from canter.trainer.loss import Loss
from canter.trainer.metrics import describe
from canter.trainer.micro_batch import Sums
from canter.types import Outcome, Task

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
MADE_BY_THE_BACKEND = {"grad_norm": 1.0, "lr": 1e-5, "tokens_without_gradient": 0.0}
LAPS = {"collect_s": 1.0, "update_s": 1.0, "publish_s": 1.0, "checkpoint_s": 1.0}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def words(page: str) -> set[str]:
    """Everything that a page of `docs/` has in backticks."""
    return set(re.findall(r"`([^`\n]+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")))


def cases(language: str, *names: str) -> list[Any]:
    """The blocks of a language on these pages (all where none is named)."""
    pages = [page for page in PAGES if not names or page.name in names]
    return [
        pytest.param(text, id=f"{page.stem}-{n}") for page in pages for n, text in enumerate(blocks(page, language))
    ]


@pytest.mark.parametrize("text", cases("python"))
def test_python_compiles(text: str) -> None:
    compile(text, "docs", "exec")


@pytest.mark.parametrize("text", cases("toml"))
def test_settings_load(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    needed = {
        "model": 'path = "m"',
        "tasks": 'train = "t.jsonl"',
        "harness": 'command = ["a"]',
        "grader": 'use = "exact"',
    }
    missing = [f"[{name}]\n{line}\n" for name, line in needed.items() if f"[{name}]" not in text]
    file.write_text(text + "\n" + "".join(missing))
    load(file)


@pytest.mark.parametrize("text", cases("json", "tasks.md", "serve.md"))
def test_task_rows_parse(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(text)
    assert read_tasks(file)


def grading(folder: Path, hidden: dict[str, Any], answer: str | None = None) -> Grading:
    for name in ("work", "private"):
        (folder / name).mkdir(exist_ok=True)
    return Grading(
        task=Task("t", "p", {}, hidden),
        answer=answer,
        dir=folder / "work",
        stdout=folder / "stdout.txt",
        stderr=folder / "stderr.txt",
        outcome=Outcome.EXITED,
        exit_code=0,
        calls=1,
        last_message=answer,
    )


def assignment(folder: Path, **grader: Any) -> Assignment:
    where = {"folder": str(folder), "private": str(folder / "private"), "base": str(folder)}
    return Assignment("http://127.0.0.1:9", "", "r", 1, answer="stdout", tolerance=0, retry_s=0, **where, **grader)


@pytest.mark.parametrize(
    ("left", "value"),
    [
        ('{"a": 1, "b": 3}', 0.5),
        ('{"a": 1, "b": 2}', 1.0),
        ("[1, 2]", 0.0),
        ("nonsense", 0.0),
        ("[" * 100_000, 0.0),
        (None, 0.0),
    ],
)
def test_the_function_grades(left: str | None, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_grader.py").write_text(blocks(ROOT / "docs" / "graders.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_grader", raising=False)
    ended = grading(tmp_path, {"values": {"a": 1, "b": 2}})
    if left is not None:
        (ended.dir / "result.json").write_text(left)
    assert judge(ended, assignment(tmp_path, function="my_grader:grade"))[0] == value


@pytest.mark.parametrize(("answer", "value"), [("Red and blue.", 1.0), ("red", 0.5), (None, 0.0)])
def test_the_command_grades(answer: str | None, value: float, tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(blocks(ROOT / "docs" / "graders.md", "python")[1])
    ended = grading(tmp_path, {"words": ["red", "blue"]}, answer)
    found, details = judge(ended, assignment(tmp_path, command=[sys.executable, "-I", "{base}/grade.py"]))
    assert found == value
    assert len(details["found"]) == 2 * value


def test_the_graders_page_names_every_field_and_key(tmp_path: Path) -> None:
    ended = grading(tmp_path, {})
    show = "import os; print('{\"value\": 0, \"seen\": ' + open(os.environ['CANTER_GRADING']).read() + '}')"
    _, details = judge(ended, assignment(tmp_path, command=[sys.executable, "-c", show]))
    names = {field.name for field in dataclasses.fields(Grading)} | set(details["seen"]) | set(details["seen"]["task"])
    assert names <= words("graders.md")


def test_the_metrics_page_names_every_key() -> None:
    one = torch.ones(1)
    sums = Sums()
    sums.add(Loss(*[one] * 7), one)
    row = row_of(1, 1, build([], []), {**sums.metrics(1), **MADE_BY_THE_BACKEND}, LAPS)
    assert set(row) <= words("metrics.md")
    assert "loss" in describe(row)


def test_the_metrics_page_names_every_key_of_the_manifest(tmp_path: Path) -> None:
    config = load(ROOT / "recipes" / "quickstart" / "quickstart.toml")
    found = json.loads(json.dumps(describe_run(config, RunFolder(tmp_path))))
    assert set(found) | set(found["code"]) | set(found["hardware"]) <= words("metrics.md")
