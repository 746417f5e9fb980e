"""How attempts ended, in words: their exits, what they said last, and what a failed start is to be cured with."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from canter.controller.printed import open_regular
from canter.types import Attempt, Outcome

TAIL_BYTES = 64 * 1024
LINE_CHARS = 300

_MISSING = re.compile(r"no such file|can'?t open|cannot open|cannot find|can'?t find|not found|does not exist", re.I)
_IMPORTS = re.compile(r"ModuleNotFoundError|ImportError|No module named|Cannot find (module|package) '[^./]|LoadError")
_COMMAND = re.compile(r"command not found|: not found$|env: .*No such file", re.I | re.M)
_ENDPOINT = re.compile(
    r"connect|getaddrinfo|resolve|name or service|api[ _-]?key|base[ _-]?url|unauthori[sz]ed|credential", re.I
)
_QUOTED = re.compile(r"""(?=['"]([^'"]+)['"])""")
_WORD = re.compile(r"[\w./+@~-]*\w")


def ending(attempt: Attempt) -> str:
    """One or two words: `exit code 3`, `killed by signal 9`, `timed out`, …; "" while it runs."""
    if attempt.outcome is None:
        return ""
    if attempt.outcome is Outcome.EXITED and attempt.exit_code is not None:
        return f"exit code {attempt.exit_code}" if attempt.exit_code >= 0 else f"killed by signal {-attempt.exit_code}"
    return attempt.outcome.value.replace("_", " ")


def last_lines(file: Path, count: int) -> list[str]:
    """The last lines of what a program has printed, each cut to LINE_CHARS; none where there is no such file.

    The program could write the file, so it is read only if it is a plain one, and no more than its end.
    """
    with contextlib.suppress(OSError), open(open_regular(str(file), os.O_RDONLY), "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = log.read(TAIL_BYTES).decode("utf-8", "replace").rstrip().splitlines()
        return [line[:LINE_CHARS] for line in lines[-count:]]
    return []


def start_advice(said: Sequence[str], base: Path, work: Path) -> str | None:
    """What cures a program that ended with an error before its first request, by its last lines `said`.

    None where they point at the endpoint, or say nothing: then the program did not find the gateway.
    """
    text = "\n".join(said)
    if beside := sorted(set(_beside(said, base, work))):
        names = ", ".join(f"{{base}}/{name}" for name in beside)
        return (
            f"it runs in work/, where that file is not; it lies beside the TOML file: write {names} in harness.command "
            "(or copy it there with harness.files)"
        )
    if _IMPORTS.search(text):
        return (
            "it could not import a module: install that for the program that harness.command starts, or name one that "
            "has it by its full path, such as that of the Python of an environment"
        )
    if _COMMAND.search(text):
        return "it starts a program that is not on its PATH: install that, or give its full path"
    if _ENDPOINT.search(text) or not text.strip():
        return None
    if _MISSING.search(text):
        return (
            "it looks for a file that is not there: it runs in work/, into which harness.files copies files; "
            "{base}/NAME in harness.command is a file beside the TOML file"
        )
    return "it ended with an error of its own before its first request: see its last words above"


def _beside(said: Sequence[str], base: Path, work: Path) -> Iterator[str]:
    """Files that are said to be missing, are not in `work`, and lie in `base`."""
    for line in said:
        if not _MISSING.search(line):
            continue
        for name in (*_QUOTED.findall(line), *_WORD.findall(line)):
            inside = os.path.normpath(name.removeprefix(f"{work}/"))
            if os.path.isabs(inside) or inside.startswith(".."):
                continue
            with contextlib.suppress(OSError, ValueError):
                if (base / inside).is_file() and not (work / inside).exists():
                    yield inside
