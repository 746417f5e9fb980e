"""`canter harness install`: one version of a harness from npm or PyPI into a folder of its own.

The folder counts once its mark stands, which is written last, so that an install that was cut short is none. Only the
registries' own clients are used, with the settings that they have on this machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from canter.errors import ConfigError
from canter.harness import Entry, Npm, Pip
from canter.harness.installed import MARK, Installation, folder_of, read, version_here, version_key

Say = Callable[[str], None]

INSTALL_S = 1800.0
"""Deadline of one npm or pip."""
_PROBE_S = 30.0
_PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:2])"


def install(entry: Entry, say: Say, *, version: str | None = None, python: str | None = None) -> Installation | None:
    """Installs a version (default: the first that is known to work), unless it is there. Returns None for a library
    that now is in Canter's own environment. Raises ConfigError with what to do."""
    wanted = entry.install.versions[0] if version is None else version
    if wanted in ("", ".", "..") or not all(part.isalnum() or part in ".-_+" for part in wanted):
        raise ConfigError(f"{wanted!r} is no version; {entry.name} is known to work as {known(entry)}")
    if wanted not in entry.install.versions:
        say(f"{entry.name} {wanted} has not been tried; known to work: {known(entry)}")
    if isinstance(entry.install, Pip) and not entry.install.own:
        _beside_canter(entry, entry.install, wanted, say)
        return None
    place = folder_of(entry.name)
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {place}: {error.strerror}; set XDG_CACHE_HOME") from error
    with _lock(place):
        found = read(place / wanted)
        if found is not None:
            say(f"{entry.name} {wanted} is installed already: {found.program}")
            return found
        return _install(entry, wanted, place / wanted, python, say)


def known(entry: Entry) -> str:
    return ", ".join(entry.install.versions)


def _install(entry: Entry, version: str, folder: Path, python: str | None, say: Say) -> Installation:
    shutil.rmtree(folder, ignore_errors=True)  # one that was cut short
    try:
        folder.mkdir()
        if isinstance(entry.install, Npm):
            program = _npm(entry.install, version, folder, say)
        else:
            program = _venv(entry, entry.install, version, folder, python, say)
        mark = {"version": version, "program": str(program.relative_to(folder)), "packages": _packages(folder, program)}
        (folder / f"{MARK}.part").write_text(json.dumps(mark, indent=2) + "\n", encoding="utf-8")
        os.replace(folder / f"{MARK}.part", folder / MARK)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    say(f"installed {entry.name} {version}: {program}")
    return Installation(version, program, folder)


# -- npm --


def _npm(how: Npm, version: str, folder: Path, say: Say) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise ConfigError("npm is not on PATH; install Node.js (18 or newer), or set harness.args.path to the program")
    words = {"version": version, "platform": machine(how.variants)}
    package = how.package.format(**words)
    say(f"npm install {package} into {folder}")
    # nothing of the package is run: its scripts only look for the program that is the package itself
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--no-update-notifier")
    _run([npm, "install", "--prefix", str(folder), *quiet, "--loglevel=error", package], folder)
    pattern = how.program.format(**words)
    programs = sorted((folder / "node_modules").glob(pattern))
    if len(programs) != 1:
        raise ConfigError(
            f"{package} has {len(programs)} programs node_modules/{pattern}, not one; known to work: "
            + ", ".join(how.versions)
        )
    programs[0].chmod(programs[0].stat().st_mode | 0o555)
    return programs[0]


def machine(variants: Sequence[str] = ()) -> str:
    """This machine as npm packages of native programs are named, with those of the `variants` that it needs."""
    names = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
    processor = names.get(platform.machine().lower(), platform.machine())
    needed = {"baseline": processor == "x64" and not _has_avx2(), "musl": platform.libc_ver()[0] != "glibc"}
    return "-".join([sys.platform, processor, *(name for name in variants if needed[name])])


def _has_avx2() -> bool:
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True


# -- pip --


def _venv(entry: Entry, how: Pip, version: str, folder: Path, python: str | None, say: Say) -> Path:
    base = _python(entry, how, python)
    program = folder / "bin" / "python"
    packages = [package.format(version=version) for package in how.packages]
    say(f"pip install {' '.join(packages)} into {folder} ({base})")
    _run([base, "-m", "venv", str(folder)], folder)
    pip = [str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
    _run([*pip, *packages], folder)
    return program


def _beside_canter(entry: Entry, how: Pip, version: str, say: Say) -> None:
    if version_here(entry) == version:
        say(f"{entry.name} {version} is installed already, beside Canter")
        return
    packages = [package.format(version=version) for package in how.packages]
    say(f"pip install {' '.join(packages)} beside Canter ({sys.executable}), which imports it")
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", *packages])
    say(f"installed {entry.name} {version}")


def _python(entry: Entry, how: Pip, python: str | None) -> str:
    """A Python that is new enough and can make environments."""
    oldest = ".".join(map(str, how.python))
    if python is not None:
        found = _version_of(python)
        if found is None or found < how.python:
            what = "no Python that can make environments" if found is None else f"Python {found[0]}.{found[1]}"
            raise ConfigError(f"--python {python} is {what}; {entry.name} needs Python {oldest} or newer")
        return python
    for candidate in _pythons():
        found = _version_of(candidate)
        if found is not None and found >= how.python:
            return candidate
    raise ConfigError(f"{entry.name} needs Python {oldest} or newer, and none is on PATH; name one with --python")


def _pythons() -> Iterator[str]:
    yield sys.executable
    for minor in range(20, 10, -1):
        if found := shutil.which(f"python3.{minor}"):
            yield found
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    names = sorted(os.listdir(versions), key=version_key, reverse=True) if versions.is_dir() else []
    yield from (str(versions / name / "bin" / "python3") for name in names)


def _version_of(python: str) -> tuple[int, int] | None:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=True
        )
        major, minor = done.stdout.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _packages(folder: Path, program: Path) -> Mapping[str, str]:
    """Name → version of what was installed."""
    if program.parent == folder / "bin":
        done = _run([str(program), "-m", "pip", "list", "--format=json", "--disable-pip-version-check"], folder)
        return {row["name"]: row["version"] for row in json.loads(done)}
    found = {}
    for file in sorted((folder / "node_modules").glob("**/package.json")):
        if file.parent.parent.name == "node_modules" or file.parent.parent.name.startswith("@"):
            row = json.loads(file.read_text(encoding="utf-8"))
            found[str(row.get("name"))] = str(row.get("version"))
    return found


# -- both --


def _run(argv: Sequence[str], cwd: Path | None = None) -> str:
    """What a program prints. Raises ConfigError with the end of what it had to say."""
    try:
        done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{argv[0]} was not done after {INSTALL_S:.0f} s: {' '.join(argv)}") from None
    except OSError as error:
        raise ConfigError(f"cannot start {argv[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise ConfigError(f"{' '.join(argv)} failed (exit code {done.returncode}):\n{said}")
    return done.stdout


@contextlib.contextmanager
def _lock(place: Path) -> Iterator[None]:
    """One install of a harness at a time."""
    with (place / ".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is installing into {place}; try again when it is done") from None
        yield
