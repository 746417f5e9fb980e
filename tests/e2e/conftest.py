from __future__ import annotations

import pytest
from tiny_run import write_run
from whole_run import WholeRun


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """A finished run with the local engine."""
    folder = tmp_path_factory.mktemp("local")
    run = WholeRun(folder, write_run(folder, engine="local", steps=2))
    run.start()
    assert run.finish() == 0, run.output()
    return run
