"""`import canter` and `canter --help` stay light: no torch, no web framework, under half a second."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "aiohttp", "sqlalchemy", "litellm")


@pytest.mark.parametrize(
    "code", ["import canter", "import canter.cli; canter.cli.run(['--help'])", "import canter.types"]
)
def test_loads_nothing_heavy(code: str) -> None:
    check = f"import sys; {code}; print('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_help_costs_less_than_half_a_second_of_cpu() -> None:
    """CPU seconds, not wall time: machines that run tests are shared."""
    code = "import canter.cli, time; canter.cli.run(['--help']); print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert float(done.stdout.splitlines()[-1]) < 0.5


def test_gateway_controller_samples_and_client_need_no_torch() -> None:
    modules = "canter.gateway.app, canter.controller.loop, canter.samples, canter.client, canter.tokens.rendering"
    check = f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
