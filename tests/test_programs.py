"""What to do about a program that is not found."""

from __future__ import annotations

from pathlib import Path

import pytest

from canter.programs import not_found


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("agent.sh", "write '{base}/agent.sh'"),
        ("./agent.sh", "write '{base}/agent.sh'"),
        ("bin/tool", "write '{base}/bin/tool'"),
        ("other.sh", "install it, or give its full path"),
        ("/no/such/agent.sh", "install it, or give its full path"),
    ],
)
def test_a_file_beside_the_settings_is_pointed_out(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / "bin").mkdir()
    for file in ("agent.sh", "bin/tool"):
        (tmp_path / file).touch()
    assert advice in not_found(name, str(tmp_path))
    assert "PATH" not in not_found(name, str(tmp_path))
