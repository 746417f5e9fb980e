"""The documentation names what the code has: every error, every reason, every setting; and its links lead somewhere."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from canter import errors
from canter.types import Reason

ROOT = Path(__file__).parent.parent
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ERRORS = [name for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


@pytest.mark.parametrize("name", [name for name in ERRORS if name != "CanterError"])
def test_every_error_is_explained(name: str) -> None:
    assert f"| `{name}`" in TROUBLESHOOTING


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_explained(reason: Reason) -> None:
    assert f"| `{reason}`" in TROUBLESHOOTING


def test_settings_page_is_up_to_date() -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "generate.py", "--check"], check=True, timeout=60)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
