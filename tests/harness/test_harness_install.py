"""Installing harnesses with the real npm and pip, from packages made here: no network is needed."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from canter.cli import run as canter
from canter.cli.manifest import harness as manifest_of
from canter.config import Config, resolve
from canter.errors import ConfigError
from canter.harness import Entry, Npm, Pip, Recipe
from canter.harness.catalogue import ENTRIES
from canter.harness.install import install, machine
from canter.harness.installed import Installed, folder_of, installations, program

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on PATH")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "canter" / "harnesses"


def no_recipe(config: Config) -> Recipe:
    raise AssertionError("no recipe is made here")


def entry(how: Npm | Pip, name: str = "agent") -> Entry:
    return Entry(name, "an agent", ("chat",), how, Installed, no_recipe)


def config(name: str = "codex", args: dict[str, Any] | None = None) -> Config:
    harness = {"use": name, "args": args or {}}
    return resolve({"model": {"path": "m"}, "tasks": {"train": "t"}, "harness": harness, "grader": {"use": "exact"}})


@pytest.fixture
def packed(tmp_path: Path) -> Npm:
    """An npm package in versions 1.0.0 and 1.10.0, whose scripts would leave a mark."""
    for version in ("1.0.0", "1.10.0"):
        source = tmp_path / f"source-{version}"
        (source / "bin").mkdir(parents=True)
        scripts = f'"scripts": {{"postinstall": "touch {tmp_path}/ran"}}'
        (source / "package.json").write_text(f'{{"name": "agent-{machine()}", "version": "{version}", {scripts}}}')
        (source / "bin" / "agent").write_text(f"#!/bin/sh\necho {version}\n")
        words = ["npm", "pack", "--silent", "--pack-destination", str(tmp_path), str(source)]
        subprocess.run(words, check=True, timeout=60, env={**os.environ, "npm_config_cache": str(tmp_path / "npm")})
    package = f"{tmp_path}/agent-{{platform}}-{{version}}.tgz"
    return Npm(package, "agent-{platform}/bin/agent", "agent-on-path", ("1.0.0",))


@needs_npm
def test_an_npm_harness_is_installed_once_and_found(packed: Npm, tmp_path: Path, cache: Path) -> None:
    said: list[str] = []
    made = install(entry(packed), said.append)
    assert made is not None
    assert made.folder == cache / "agent" / "1.0.0"
    assert subprocess.run([made.program], capture_output=True, text=True, timeout=10, check=True).stdout == "1.0.0\n"
    assert not (tmp_path / "ran").exists()
    assert program(config(), entry(packed), Installed()) == made.program
    assert said[-1] == f"installed agent 1.0.0: {made.program}"

    before = made.program.stat().st_mtime_ns
    assert install(entry(packed), said.append) == made
    assert said[-1] == f"agent 1.0.0 is installed already: {made.program}"
    assert made.program.stat().st_mtime_ns == before


@needs_npm
def test_what_is_known_to_work_comes_before_what_is_newer(packed: Npm) -> None:
    said: list[str] = []
    newer = install(entry(packed), said.append, version="1.10.0")
    assert newer is not None
    assert said[0] == "agent 1.10.0 has not been tried; known to work: 1.0.0"
    assert program(config(), entry(packed), Installed()) == newer.program
    known = install(entry(packed), said.append)
    assert known is not None
    assert [one.version for one in installations(entry(packed))] == ["1.0.0", "1.10.0"]
    assert program(config(), entry(packed), Installed()) == known.program
    assert program(config(), entry(packed), Installed(version="1.10.0")) == newer.program
    with pytest.raises(
        ConfigError, match=r"'2' is not installed \(installed: 1.0.0, 1.10.0\); `canter harness install"
    ):
        program(config(), entry(packed), Installed(version="2"))


@needs_npm
def test_an_install_that_was_cut_short_is_none(packed: Npm, cache: Path) -> None:
    made = install(entry(packed), lambda text: None)
    assert made is not None
    (made.folder / "installed.json").unlink()  # it is written last
    made.program.write_text("half")
    assert installations(entry(packed)) == []
    again = install(entry(packed), lambda text: None)
    assert again is not None
    assert "echo 1.0.0" in again.program.read_text()


@needs_npm
def test_a_failed_install_says_why_and_leaves_nothing(packed: Npm, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"npm install .* failed \(exit code"):
        install(entry(packed), lambda text: None, version="9.9.9")
    wrong = dataclasses.replace(packed, program="agent-{platform}/bin/other")
    with pytest.raises(ConfigError, match=r"has 0 programs .*bin/other, not one; known to work: 1.0.0"):
        install(entry(wrong), lambda text: None)
    assert [name for name in os.listdir(cache / "agent") if name != ".lock"] == []


def test_two_installs_at_once_are_refused(cache: Path) -> None:
    (cache / "agent").mkdir(parents=True)
    with (cache / "agent" / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is installing into"):
            install(entry(Npm("x@{version}", "x", "x", ("1.0.0",))), lambda text: None)


@pytest.mark.parametrize("version", ["", "..", "../../x", "1 0", "a/b"])
def test_a_version_that_is_none_is_refused(version: str) -> None:
    how = Npm("x@{version}", "x", "x", ("1.0.0",))
    with pytest.raises(ConfigError, match=r"is no version; agent is known to work as 1\.0\.0"):
        install(entry(how), lambda text: None, version=version)


def test_without_npm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"npm is not on PATH; install Node\.js"):
        install(entry(Npm("x@{version}", "x", "x", ("1.0.0",))), lambda text: None)


def test_a_program_on_path_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    how = Npm("x@{version}", "x", "agent-on-path", ("1.0.0",))
    advice = "agent is not on this machine; install it with `canter harness install agent`, or name the program"
    with pytest.raises(ConfigError, match=advice):
        program(config(), entry(how), Installed())
    (tmp_path / "agent-on-path").write_text("#!/bin/sh\n")
    (tmp_path / "agent-on-path").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert program(config(), entry(how), Installed()) == tmp_path / "agent-on-path"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A library `agentlib` 3.1."""
    file = tmp_path / "agentlib-3.1-py3-none-any.whl"
    meta = "Metadata-Version: 2.1\nName: agentlib\nVersion: 3.1\n"
    tags = "Wheel-Version: 1.0\nGenerator: here\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("agentlib.py", "ANSWER = 42\n")
        archive.writestr("agentlib-3.1.dist-info/METADATA", meta)
        archive.writestr("agentlib-3.1.dist-info/WHEEL", tags)
        archive.writestr("agentlib-3.1.dist-info/RECORD", "")
    return file


def test_a_python_harness_gets_an_environment_of_its_own(wheel: Path, cache: Path) -> None:
    how = Pip((str(wheel).replace("3.1-py3", "{version}-py3"),), ("3.1",))
    made = install(entry(how), lambda text: None)
    assert made is not None
    assert made.program == cache / "agent" / "3.1" / "bin" / "python"
    asked = [made.program, "-I", "-c", "import agentlib; print(agentlib.ANSWER)"]
    assert subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout == "42\n"
    assert '"agentlib": "3.1"' in (made.folder / "installed.json").read_text()


def test_a_python_that_is_too_old_or_none_is_refused(tmp_path: Path) -> None:
    how = Pip(("agentlib=={version}",), ("3.1",), python=(3, 99))
    with pytest.raises(ConfigError, match=r"agent needs Python 3\.99 or newer, and none is on PATH; name one"):
        install(entry(how), lambda text: None)
    with pytest.raises(ConfigError, match="--python python3 is Python 3"):
        install(entry(how), lambda text: None, python="python3")
    with pytest.raises(ConfigError, match="is no Python that can make environments"):
        install(entry(how), lambda text: None, python="/bin/true")


def test_a_machine_is_named_as_npm_does() -> None:
    assert machine().count("-") == 1
    system, processor = machine().split("-")
    assert system == "linux"
    assert processor in ("x64", "arm64") or processor == os.uname().machine
    assert machine(("baseline", "musl")).startswith(machine())


def test_the_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["harness", "list"]) == 0
    printed = capsys.readouterr().out
    for found in ENTRIES.values():
        assert f"{found.name}: {found.about}\n" in printed
    assert "not installed: canter harness install codex" in printed


def test_a_name_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert canter(["harness", "install", "cdex"]) == 2
    assert "there is no recipe 'cdex' (harness.use); did you mean 'codex'?" in capsys.readouterr().err


def test_the_manifest_names_what_was_installed(cache: Path, tmp_path: Path) -> None:
    folder = folder_of("codex") / "0.171.0"
    folder.mkdir(parents=True)
    (folder / "codex").write_text("x")
    (folder / "installed.json").write_text('{"version": "0.171.0", "program": "codex", "packages": {"a": "1"}}')
    found = manifest_of(config("codex"))
    assert found == {
        "name": "codex",
        "files": {},
        "version": "0.171.0",
        "program": str(folder / "codex"),
        "packages": {"a": "1"},
        "sha256": "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881",
    }
    (tmp_path / "own").write_text("x")
    (tmp_path / "own").chmod(0o755)
    own = manifest_of(config("codex", {"path": str(tmp_path / "own")}))
    assert own["version"] is None
    assert own["sha256"] == found["sha256"]


def test_a_folder_that_no_install_has_finished_is_passed_over(cache: Path) -> None:
    for name, text in (("1", "no json"), ("2", "{}"), ("3", '{"version": "3", "program": "absent"}'), ("4", "[]")):
        (cache / "codex" / name).mkdir(parents=True)
        (cache / "codex" / name / "installed.json").write_text(text)
    assert installations(ENTRIES["codex"]) == []
