"""The worker: the forked process that becomes the harness (exec of an argv) or calls it (a Python function).

What a warmed parent leaves behind is reset first: environment, signals, temporary folder, random state, event loop
policy. A fault before the harness itself starts goes to the keeper through a pipe. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import inspect
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from canter.programs import not_found

FAULT_BYTES = 4096
_PR_SET_PDEATHSIG = 1


def work(spec: Mapping[str, Any], fault: int) -> NoReturn:
    """Becomes the program of `spec` in its folder and environment, or calls its function; never returns."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed keeper takes its worker along
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _redirect(spec["folder"], spec.get("stdin") or os.devnull)
        os.chdir(spec["cwd"])
        if spec.get("argv"):
            _execute(spec["argv"], spec["env"], spec["base"])
        function = _prepare(spec["function"], spec["env"])
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            os.write(fault, (str(error) or type(error).__name__).encode()[:FAULT_BYTES])
    else:
        os.close(fault)
        code = _call(function, spec["argument"])
    finally:
        # no interpreter shutdown: it would run the warmed parent's exit handlers, and costs more than a short harness
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def load(name: str) -> Callable[[Any], object]:
    """The function called `module:function`. Raises ImportError that says what is wrong with the name."""
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ImportError(f"{name!r} must be module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module's top level may raise anything
        raise ImportError(
            f"cannot import {module_name!r} for {name!r}: {type(error).__name__}: {error}; it must be importable from "
            "the folder of the run's TOML file or be installed"
        ) from error
    function = module.__dict__.get(attribute)
    if not callable(function):
        raise ImportError(f"{module_name!r} ({module.__file__}) has no function {attribute!r}")
    return function  # type: ignore[no-any-return]


def _redirect(folder: str, stdin: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for descriptor, (path, mode) in enumerate(
        ((stdin, os.O_RDONLY), (f"{folder}/stdout.txt", flags), (f"{folder}/stderr.txt", flags))
    ):
        opened = os.open(path, mode, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)


def _execute(argv: list[str], env: dict[str, str], base: str) -> NoReturn:
    # Python ignores these two; programs expect them as they are by default
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise OSError(f"cannot start {argv[0]!r}: {error.strerror}; {_advice(error, argv, base)}") from error


def _advice(error: OSError, argv: list[str], base: str) -> str:
    if error.errno == errno.E2BIG:
        size = sum(len(os.fsencode(part)) for part in argv)
        return f"its arguments take {size} bytes; let it read the task from the file $CANTER_TASK instead"
    if error.errno == errno.ENOENT and os.path.exists(argv[0]):
        return "the interpreter that its first line names does not exist"
    if error.errno == errno.ENOENT:
        return not_found(argv[0], base)
    if error.errno == errno.EACCES:
        return "make it executable (chmod +x)"
    return "check that it is a program for this machine"


def _prepare(name: str, env: dict[str, str]) -> Callable[[Any], object]:
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [name]
    time.tzset()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None  # type: ignore[attr-defined]
    if "asyncio" in sys.modules:
        sys.modules["asyncio"].set_event_loop_policy(None)
    if "numpy.random" in sys.modules:  # the random module reseeds itself after a fork, numpy does not
        sys.modules["numpy.random"].seed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # so that a killed harness leaves what it has printed
    return load(name)


def _call(function: Callable[[Any], object], argument: Any) -> int:
    """The exit code that a Python process with this function as its main program would have."""
    code = 0
    try:
        result = function(argument)
        if inspect.iscoroutine(result):
            import asyncio

            asyncio.run(result)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
        code = 0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # as the interpreter, and a child of `multiprocessing`, ends: idle pools are told to end, threads are joined
    threading._shutdown()  # type: ignore[attr-defined]
    return code
