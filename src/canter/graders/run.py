"""The grader process: fetch, compute, post. Called in a fork of the grader launcher."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from canter.errors import CanterError, GatewayUnavailable, GraderError
from canter.graders import GraderExit, Grading
from canter.graders.answer import final_answer, read
from canter.graders.gateway import Gateway
from canter.graders.match import match
from canter.programs import not_found
from canter.types import Outcome, Task


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the controller tells a grader. `folder` is the attempt's, `private` this grading's, `base` the TOML file's.

    One of `use`, `function`, `command` is set, as in `[grader]`.
    """

    gateway: str
    key: str
    rollout_id: str
    attempt: int
    folder: str
    private: str
    base: str
    answer: str
    tolerance: float
    retry_s: float
    use: str | None = None
    function: str | None = None
    command: Sequence[str] = ()


def main(told: Mapping[str, Any]) -> None:
    """Ends with SystemExit, one of `GraderExit`; the last line of standard error is the message of a failure."""
    assignment = Assignment(**told)
    gateway = Gateway(
        assignment.gateway, assignment.key, assignment.rollout_id, assignment.attempt, retry_s=assignment.retry_s
    )
    try:
        grading = see(gateway.grading(), assignment)
        if grading.calls == 0 and grading.outcome is Outcome.EXITED and grading.exit_code != 0:
            _end(GraderExit.NO_CALLS, no_calls(grading))
        value, details = judge(grading, assignment)
        gateway.post(value, details)
    except GatewayUnavailable as error:
        _end(GraderExit.GATEWAY_UNAVAILABLE, str(error))
    except CanterError as error:
        _end(GraderExit.FAILED, str(error))
    sys.exit(GraderExit.POSTED)


def see(row: Mapping[str, Any], assignment: Assignment) -> Grading:
    """The gateway's reply, with the answer read from where the settings say."""
    folder = Path(assignment.folder)
    work, stdout = folder / "work", folder / "stdout.txt"
    return Grading(
        task=Task(**row["task"]),
        answer=final_answer(assignment.answer, last_message=row["last_message"], stdout=stdout, work=work),
        dir=work,
        stdout=stdout,
        stderr=folder / "stderr.txt",
        outcome=Outcome(row["outcome"]),
        exit_code=row["exit_code"],
        calls=row["calls"],
        last_message=row["last_message"],
    )


def no_calls(grading: Grading) -> str:
    """Why there is nothing to grade, with what the harness said last and where the rest is, from the run folder."""
    words = _last_line(grading.stderr)
    said = f"its last words: {words}" if words else "it said nothing"
    where = "/".join(grading.stderr.parts[-4:])
    return f"the harness ended with exit code {grading.exit_code} before any answered call; {said} ({where})"


def judge(grading: Grading, assignment: Assignment) -> tuple[float, dict[str, Any]]:
    """The reward and its details. Raises GraderError unless the reward is a finite number."""
    if assignment.use is not None:
        return match(assignment.use, grading.answer, grading.hidden, tolerance=assignment.tolerance), {}
    if assignment.function is not None:
        return verdict(_call(assignment.function, grading), by=assignment.function)
    line = _run(grading, assignment)
    try:
        return verdict(json.loads(line), by="grader.command")
    except json.JSONDecodeError:
        raise GraderError(f"the last line of grader.command must be a number or {{'value': …}}, got {line!r}") from None


def verdict(result: Any, *, by: str) -> tuple[float, dict[str, Any]]:
    """A number, or a mapping with `value` whose other entries become the details of the reward. Raises GraderError."""
    details: dict[str, Any] = {}
    if isinstance(result, Mapping):
        details = {str(name): value for name, value in result.items() if name != "value"}
        if "value" not in result:
            raise GraderError(f"{by} must give a finite number: its object has no key 'value', only {sorted(details)}")
        result = result["value"]
    try:
        value = float(result)
    except (TypeError, ValueError, OverflowError):
        raise GraderError(f"{by} must give a finite number, got {result!r}") from None
    if not math.isfinite(value):
        raise GraderError(f"{by} must give a finite number, got {value}")
    return value, details


def _call(name: str, grading: Grading) -> Any:
    module, _, attribute = name.partition(":")
    function = importlib.import_module(module).__dict__[attribute]  # the launcher has checked that it is there
    try:
        return function(grading)
    except Exception as error:
        traceback.print_exc()
        raise GraderError(f"{name} raised {type(error).__name__}: {error}") from error


def _run(grading: Grading, assignment: Assignment) -> str:
    """The last line that the command prints. It finds the grading in the file `$CANTER_GRADING`, gone when it ends."""
    private = Path(assignment.private)
    file, output, errors = private / "grading.json", private / "command.txt", private / "stderr.txt"
    file.touch(mode=0o600)
    file.write_text(json.dumps(_as_json(grading)), encoding="utf-8")
    values = {"{base}": assignment.base, "{dir}": str(grading.dir)}
    argv = [_fill(part, values) for part in assignment.command]
    try:
        with output.open("wb") as printed, errors.open("ab") as complained:
            code = subprocess.run(
                argv,
                env={**os.environ, "CANTER_GRADING": str(file)},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=complained,
                check=False,  # its code is read below; the keeper ends it when its time is over
            ).returncode
    except OSError as error:
        advice = f"; {not_found(argv[0], assignment.base)}" if isinstance(error, FileNotFoundError) else ""
        raise GraderError(f"grader.command: cannot start {argv[0]!r}: {error.strerror}{advice}") from error
    finally:
        file.unlink(missing_ok=True)
    lines = (read(output, tail=True) or "").strip().splitlines()
    if code != 0:
        raise GraderError(f"grader.command ended with exit code {code}: {_last_line(errors) or 'it said nothing'}")
    if not lines:
        raise GraderError("grader.command printed nothing; its last line must be the reward")
    return lines[-1]


def _last_line(file: Path) -> str:
    lines = (read(file, tail=True) or "").strip().splitlines()
    return lines[-1].strip() if lines else ""


def _fill(part: str, values: Mapping[str, str]) -> str:
    for placeholder, value in values.items():
        part = part.replace(placeholder, value)
    return part


def _as_json(grading: Grading) -> dict[str, Any]:
    task = grading.task
    return {
        "task": {**task.public(), "hidden": dict(task.hidden)},
        "answer": grading.answer,
        "dir": str(grading.dir),
        "stdout": str(grading.stdout),
        "stderr": str(grading.stderr),
        "outcome": grading.outcome.value,
        "exit_code": grading.exit_code,
        "calls": grading.calls,
        "last_message": grading.last_message,
    }


def _end(code: GraderExit, message: str) -> NoReturn:
    # on a line of its own, whatever the grader has printed before
    sys.stderr.write("\n" + " ".join(message.splitlines()) + "\n")
    sys.exit(code)
