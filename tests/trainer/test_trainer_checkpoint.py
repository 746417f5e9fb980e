import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_disk import largest_file

from canter.errors import CheckpointError
from canter.trainer.checkpoint import Checkpoints


def writes(text: str, size: int = 1000) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "weights.bin").write_bytes(b"w" * size)
        (folder / "sub" / "note.txt").write_text(text)

    return write


def test_the_newest_is_found_and_the_oldest_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.latest() is None
    for step in (2, 9, 10):
        checkpoints.save(step, {"version": step}, writes(f"step {step}"))
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.state, latest.path.name) == (10, {"version": 10}, "step-00010")
    assert (latest.path / "sub" / "note.txt").read_text() == "step 10"
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["step-00009", "step-00010"]


@pytest.mark.parametrize("kind", ["missing", "short", "changed", "unlisted"])
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {}, writes("one"))
    path = checkpoints.save(2, {}, writes("two"))
    weights = path / "weights.bin"
    if kind == "missing":
        weights.unlink()
    elif kind == "short":
        weights.write_bytes(b"w" * 999)
    elif kind == "changed":
        weights.write_bytes(b"w" * 999 + b"v")
    else:
        (path / "files.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00002 is damaged: .*remove this folder to resume from step-00001"):
        checkpoints.latest()


def test_a_write_that_is_cut_off_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, {}, writes("one"))

    def killed(folder: Path) -> None:
        writes("two")(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, {}, killed)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    checkpoints.save(2, {}, writes("two"))  # over what was left
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00001", "step-00002"]


def test_a_full_disk_is_a_clear_error_and_the_older_checkpoint_stays(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, {}, writes("one"))
    message = (
        r"cannot write the checkpoint of step 2 in .* MiB are free: .*File too large; the checkpoint step-00001 stays"
    )
    with largest_file(50_000), pytest.raises(CheckpointError, match=message):
        checkpoints.save(2, {}, writes("two", size=100_000))
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00001"]


def test_the_list_has_every_file(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, keep=1).save(3, {"a": 1}, writes("x"))
    listed = json.loads((path / "files.json").read_text())
    assert sorted(listed) == ["state.json", "sub/note.txt", "weights.bin"]
    assert listed["weights.bin"]["bytes"] == 1000
