"""Starts a program that can write only into its attempt's folder (the parent of `$HOME`) and to devices.

Landlock, which needs no rights: what the program starts is fenced as well. Standard library only; see landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import NoReturn

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1  # flag of CREATE_RULESET
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_WRITE_FILE, _TRUNCATE, _REFER = 1 << 1, 1 << 14, 1 << 13
_CHANGE = sum(1 << bit for bit in range(4, 13))  # remove and make entries of every kind
NEEDED_ABI = 3
FENCED = ".fenced"

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The kernel's version of Landlock, 0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)))


def fence(folders: list[Path]) -> None:
    """From now on this process and its children write below `folders` only. Raises OSError."""
    handled = _WRITE_FILE | _TRUNCATE | _REFER | _CHANGE
    rules = struct.pack("=Q", handled)
    ruleset = _checked(_libc.syscall(_CREATE_RULESET, rules, len(rules), 0))
    for folder in folders:
        opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        _checked(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", handled, opened), 0))
        os.close(opened)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _check(home: Path) -> None:
    """Leaves a mark in the home if the fence holds; raises if it does not."""
    try:
        (home.parent.parent / FENCED).touch()
    except PermissionError:
        (home / FENCED).touch()
        return
    raise RuntimeError("the fence does not hold")


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def main(argv: list[str]) -> NoReturn:
    if abi() >= NEEDED_ABI:
        home = Path(os.environ["HOME"])
        fence([home.parent, Path("/dev"), Path("/proc")])
        _check(home)
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
