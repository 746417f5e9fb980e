"""Harnesses that attack the controller, as far as a process of the same user can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DAEMON = """
import os, signal, sys, time
os.chdir(sys.argv[2])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.replace(sys.argv[1] + ".part", sys.argv[1])
time.sleep(60)
"""


def own() -> Path:
    return Path(os.environ["CANTER_TASK"]).parent


def spoil(task: dict[str, Any]) -> None:
    if (how := task["input"].get("how")) is not None:
        globals()[how](task)


def remove_folder(task: dict[str, Any]) -> None:
    shutil.rmtree(own())


def replace_folder(task: dict[str, Any]) -> None:
    """A link to a folder outside stands in its place."""
    shutil.rmtree(own())
    own().symlink_to(task["input"]["outside"])


def replace_work(task: dict[str, Any]) -> None:
    shutil.rmtree("../work")
    (own() / "work").symlink_to("/")


def replace_rollout(task: dict[str, Any]) -> None:
    """The folder of all attempts becomes a link to one that has a folder of the same number."""
    shutil.rmtree(own().parent)
    own().parent.symlink_to(task["input"]["outside"])


def pipes(task: dict[str, Any]) -> None:
    """Whoever reads these as files waits for ever."""
    for name in ("stdout.txt", "stderr.txt"):
        (own() / name).unlink()
        os.mkfifo(own() / name)
    sys.exit(3)


def cut_another_file(task: dict[str, Any]) -> None:
    (own() / "stdout.txt").unlink()
    (own() / "stdout.txt").symlink_to(task["input"]["outside"])


def strange_names(task: dict[str, Any]) -> None:
    """Digits to Python, but no numbers, in the places where numbers stand."""
    record = record_of(own())
    for name in (record.parent / "²", record / "grading" / "²", record.parent.parent / "%", own().parent / "²"):
        name.mkdir(parents=True)


def nest(task: dict[str, Any]) -> None:
    for _ in range(3000):
        os.mkdir("d")
        os.chdir("d")


def record_of(folder: Path) -> Path:
    return folder.parents[2] / "control" / folder.relative_to(folder.parents[2])


def kill_keeper(task: dict[str, Any]) -> None:
    """Leaves a daemon, forges a good end, kills the keeper."""
    daemon(task)
    record = record_of(own())
    (record / "exit.json").write_text(json.dumps({"outcome": "exited", "exit_code": 0, "message": ""}))
    os.kill(json.loads((record / "keeper.json").read_text())["pid"], signal.SIGKILL)
    time.sleep(60)


def daemon(task: dict[str, Any]) -> None:
    """A process without an environment in a session of its own."""
    file = task["input"]["pid"]
    subprocess.Popen(
        [sys.executable, "-c", DAEMON, file, task["input"].get("cwd", os.getcwd())],
        env={},
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not os.path.exists(file):
        time.sleep(0.01)


def forge_records(task: dict[str, Any]) -> None:
    """Nonsense where the next controller looks for the keeper."""
    record = record_of(own())
    (record / "keeper.json").write_text(task["input"]["keeper"])
    (record / "exit.json").write_text(task["input"]["exit"])
    time.sleep(60)
