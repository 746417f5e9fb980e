"""Each benchmark says what it measures and takes `--json`; one is run, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
BENCHMARKS = sorted(FOLDER.glob("*.py"))


def run(benchmark: Path, *args: str) -> str:
    command = [sys.executable, str(benchmark), *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_there_are_benchmarks() -> None:
    assert len(BENCHMARKS) >= 4


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda path: path.stem)
def test_every_benchmark_takes_json(benchmark: Path) -> None:
    assert "--json" in run(benchmark, "--help")


def test_the_readme_names_every_benchmark() -> None:
    text = (FOLDER / "README.md").read_text()
    assert [path.name for path in BENCHMARKS if f"`{path.name}`" not in text] == []


def test_the_last_line_is_one_json_object_of_figures_with_units() -> None:
    figures = json.loads(run(FOLDER / "samples.py", "--json", "--repeats", "1").splitlines()[-1])
    assert figures
    for name, figure in figures.items():
        assert set(figure) == {"value", "unit"}, name
        assert isinstance(figure["value"], int | float), name
        assert figure["unit"], name
