"""The run folder: where everything of one run lies, and its manifest."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from canter.errors import ConfigError, NotFound


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`runs/<id>/`: settings, store, metrics, checkpoints, attempts' folders, logs, report, manifest."""

    path: Path

    @classmethod
    def create(cls, parent: Path, name: str) -> RunFolder:
        """A fresh folder `parent/name-YYYYMMDD-HHMMSS[-n]`."""
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        for n in range(1000):
            path = parent / (f"{name}-{stamp}" + (f"-{n}" if n else ""))
            try:
                parent.mkdir(parents=True, exist_ok=True)
                path.mkdir(mode=0o700)
            except FileExistsError:
                continue
            except (OSError, ValueError) as error:
                raise ConfigError(f"run.dir: cannot make {path}: {error}") from error
            for part in ("attempts", "checkpoints", "logs"):
                (path / part).mkdir()
            return cls(path)
        raise FileExistsError(f"a thousand runs named {name}-{stamp} in {parent}")

    @classmethod
    def find(cls, name: str | Path, parent: Path = Path("runs")) -> RunFolder:
        """The folder given by path, by name under `parent`, or the newest one for `latest`. Raises NotFound."""
        if str(name) == "latest":
            folders = sorted(parent.glob("*/canter.db"), key=lambda p: p.stat().st_mtime)
            if not folders:
                raise NotFound(f"no run in {parent.resolve()}; start one with `canter train FILE`")
            return cls(folders[-1].parent.resolve())
        for path in (Path(name), parent / name):
            if (path / "config.toml").is_file():
                return cls(path.resolve())
        raise NotFound(f"no run folder {name} (nor {parent / name}); give its path, its name, or `latest`")

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def store(self) -> Path:
        return self.path / "canter.db"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def manifest(self) -> dict[str, Any]:
        """What `manifest.json` says now; empty where there is none yet."""
        try:
            value: dict[str, Any] = json.loads((self.path / "manifest.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ConfigError(
                f"{self.path / 'manifest.json'} is no JSON ({error}); restore it, or start a new run"
            ) from error
        return value

    def update_manifest(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Merges `values` into the manifest's top level and writes it atomically."""
        merged = {**self.manifest(), **values}
        write_atomically(self.path / "manifest.json", json.dumps(merged, indent=2, default=str) + "\n")
        return merged


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file so that a reader, or a crash, sees the old text or the new one whole."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
