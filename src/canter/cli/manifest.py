"""The first part of a run's manifest: what is needed to trust and to repeat it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from canter import __version__
from canter.config import Config, to_toml
from canter.harness import Entry, Pip
from canter.harness.arguments import arguments
from canter.harness.catalogue import entry
from canter.harness.installed import Installed, distribution, mark_of, program
from canter.runs import RunFolder, write_atomically


def save_settings(run: RunFolder, config: Config) -> None:
    """Writes the resolved settings, and the chat template where it is a file, into the run folder."""
    write_atomically(run.config, to_toml(config))


def describe(config: Config, run: RunFolder) -> dict[str, Any]:
    """Code, lock, data, harness, settings, hardware and seeds at the start of a run."""
    data = {"train": config.tasks.train, "eval": config.tasks.eval}
    return {
        "run": run.id,
        "created_at": time.time(),
        "base": str(config.base),
        "code": {"canter": __version__, "commit": commit(), "python": sys.version.split()[0]},
        "lock": sorted(f"{d.name}=={d.version}" for d in metadata.distributions()),
        "data": {k: {"path": v, "sha256": file_hash(config.path(v))} for k, v in data.items() if v},
        "harness": harness(config),
        "settings": json.loads(config.model_dump_json()),
        "hardware": hardware(),
        "seed": config.run.seed,
    }


def harness(config: Config) -> dict[str, Any]:
    """Name, version and hash of the harness, and of every file of the recipe that shapes it."""
    settings = config.harness
    name = settings.use or settings.function or " ".join(settings.command or [])
    files = {
        source: file_hash(config.path(source)) for source in settings.files.values() if config.path(source).is_file()
    }
    for setting, value in settings.args.items():
        if setting != "path" and isinstance(value, str) and config.path(value).is_file():
            files[value] = file_hash(config.path(value))
    return {"name": name, "files": files, **(identity(config, entry(settings.use)) if settings.use else {})}


def identity(config: Config, one: Entry) -> dict[str, Any]:
    """Version and hash of the program that `harness.use` starts, and what was installed with it.

    The version of a program that `canter harness install` has not put there is not known (None), its hash is.
    """
    if isinstance(one.install, Pip) and not one.install.own:
        return _distribution(distribution(one.install))
    settings = arguments(config, one.name, one.settings)
    assert isinstance(settings, Installed)
    found = program(config, one, settings)
    mark = mark_of(found)
    if isinstance(one.install, Pip) and not mark:
        return _distribution(distribution(one.install)) | {"program": str(found)}
    hashes = {} if isinstance(one.install, Pip) else {"sha256": file_hash(found)}
    return {"version": mark.get("version"), "program": str(found), "packages": mark.get("packages", {}), **hashes}


def _distribution(name: str) -> dict[str, Any]:
    """Version of a distribution in this environment, and the hash of the list of its files."""
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return {"version": None}
    record = found.read_text("RECORD") or ""
    return {"version": found.version, "sha256": hashlib.sha256(record.encode()).hexdigest()}


def hardware() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": next(cpu_names(), platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def cpu_names() -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def file_hash(path: Path) -> str:
    """SHA-256 of a file, or of a folder's weight and tokenizer files in order of name."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    for file in files:
        with file.open("rb") as handle:
            while block := handle.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def commit() -> str | None:
    """The commit of the checkout that this code runs from, `+` if it has changes; None outside one."""
    git, here = shutil.which("git"), Path(__file__).resolve().parent
    if git is None:
        return None
    head = subprocess.run([git, "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=10, check=False)
    if head.returncode != 0:
        return None
    changes = subprocess.run(
        [git, "status", "--porcelain", "."], cwd=here, capture_output=True, text=True, timeout=10, check=False
    )
    return head.stdout.strip() + ("+" if changes.stdout.strip() else "")
