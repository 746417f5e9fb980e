"""Grades the working tree, not the agent's word: is `f.py` now the function that the hidden cases describe?

The file is read as data and never executed: it must parse as exactly one function of two parameters that returns one
binary operation of `+ - * %` on them, and that operation is computed here.
"""

from __future__ import annotations

import ast
import operator
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from canter.graders import Grading

SOLVED, WELL_FORMED, NOTHING = 1.0, 0.1, 0.0
MAX_BYTES = 4096

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}


def grade(grading: Grading) -> float:
    """1 if `f.py` gives every hidden value; 0.1 if it was changed into another well-formed function; else 0."""
    text = read(Path(grading.dir) / "f.py")
    if text is None or text == grading.task.input["files"]["f.py"]:
        return NOTHING
    function = parse(text, grading.task.hidden["name"])
    if function is None:
        return NOTHING
    solved = all(function(a, b) == value for a, b, value in grading.task.hidden["cases"])
    return SOLVED if solved else WELL_FORMED


def read(path: Path) -> str | None:
    """The text of a small regular file; None for anything else that an agent may have left there."""
    try:
        with open(path, "rb", opener=open_plainly) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
                return None
            return file.read(MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def open_plainly(path: str, flags: int) -> int:
    """Follows no link and waits for no pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def parse(text: str, name: str) -> Callable[[int, int], int] | None:
    """The function that the text defines, if it is one of the kind asked for and called `name`."""
    try:
        with warnings.catch_warnings(action="ignore"):
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match body:
        case [
            ast.FunctionDef(
                name=found,
                args=ast.arguments(
                    posonlyargs=[],
                    args=[ast.arg(arg=first), ast.arg(arg=second)],
                    vararg=None,
                    kwonlyargs=[],
                    kwarg=None,
                    defaults=[],
                ),
                body=[ast.Return(value=ast.BinOp(left=ast.Name(id=left), op=op, right=ast.Name(id=right)))],
                decorator_list=[],
            )
        ] if found == name and {left, right} <= {first, second} and type(op) in OPERATIONS:
            operation = OPERATIONS[type(op)]
        case _:
            return None

    def function(a: int, b: int) -> int:
        value = {first: a, second: b}
        return operation(value[left], value[right])

    return function
