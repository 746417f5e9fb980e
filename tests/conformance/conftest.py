"""The real harnesses, run once for all tests that look at what they did."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest
from real_harnesses import CASES, Ran, missing_harnesses, run_all


@pytest.fixture(scope="session")
def missing() -> dict[str, str]:
    """Harness → why it cannot be installed here."""
    return missing_harnesses()


@pytest.fixture(scope="session")
def ran(missing: dict[str, str]) -> Iterator[dict[str, Ran]]:
    """Every case, run against the scripted policy."""
    found = asyncio.run(run_all(list(CASES.values()), missing))
    yield found
    for one in found.values():
        if one.trial is not None:
            shutil.rmtree(one.trial.run.path.parent, ignore_errors=True)
