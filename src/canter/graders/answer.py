"""Where the final answer is: the last message, standard output, or a file that the agent left."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from canter.errors import GraderError

ANSWER_BYTES = 2**20
"""Longest answer that is read; of standard output it is the end."""


def final_answer(where: str, *, last_message: str | None, stdout: Path, work: Path) -> str | None:
    """The answer at `grader.answer`, None where there is none. Raises GraderError if `where` is no such place."""
    if where == "last_message":
        return last_message
    if where == "stdout":
        return read(stdout, tail=True)
    kind, _, name = where.partition(":")
    if kind != "file" or not name:
        raise GraderError(f"grader.answer = {where!r}: use last_message, stdout or file:NAME")
    return read(work / name, within=work)


def read(path: Path, *, within: Path | None = None, tail: bool = False) -> str | None:
    """Text of a regular file; None for anything else that an agent may have left there: nothing, a symbolic link
    (also to, or through, a folder outside `within`), a pipe, or more than `ANSWER_BYTES` (unless `tail`)."""
    try:
        if within is not None and not path.parent.resolve().is_relative_to(within.resolve()):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (status.st_size > ANSWER_BYTES and not tail):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, status.st_size - ANSWER_BYTES))
        return file.read(ANSWER_BYTES).decode("utf-8", errors="replace")
