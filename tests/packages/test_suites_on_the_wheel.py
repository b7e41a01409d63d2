"""The agent's unit tests and the conformance suites of its transports, on the modules of the built wheel ``kvferry-vllm``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.plugin_wheel import environment_on

pytestmark = [pytest.mark.slow, pytest.mark.vllm]  # they need none, but a minute: with its own suite

ROOT = Path(__file__).parents[2]
SUITE_TIMEOUT_S = 840
AGENT = "connectors.p2p.producer.leases"


def python_on(unpacked, *arguments):
    """Run Python with the modules of the wheel."""
    variables = os.environ | environment_on(unpacked)
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=SUITE_TIMEOUT_S, check=False
    )


def pytest_on(unpacked, *arguments):
    """Run tests on the wheel in one process."""
    return python_on(unpacked, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def test_a_process_and_its_children_run_the_modules_of_the_wheel(unpacked):
    show = f"import {AGENT} as module; print(module.__file__)"
    run = python_on(unpacked, "-c", f"import subprocess, sys; {show}; subprocess.run([sys.executable, '-P', '-c', {show!r}])")
    in_wheel = unpacked.joinpath("kvferry_vllm/_kvferry", *AGENT.split(".")).with_suffix(".py")
    assert run.stdout.split() == [str(in_wheel)] * 2, run.stderr


def test_a_mistake_in_the_wheel_alone_fails_the_tests(unpacked, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(unpacked, changed)
    module = changed.joinpath("kvferry_vllm/_kvferry", *AGENT.split(".")).with_suffix(".py")
    module.write_text(module.read_text() + "\n\nLeaseTable.release = lambda *_: None\n")
    tests = "tests/connectors/p2p/producer/test_leases.py"
    assert pytest_on(unpacked, tests).returncode == 0
    assert pytest_on(changed, tests).returncode == 1


@pytest.mark.timeout(SUITE_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("tests", "chosen"),
    [
        pytest.param(
            ["tests/connectors/vllm", "tests/connectors/p2p/transfer", "tests/core/test_digest.py"],
            "not slow and not e2e and not gpu",
            id="plug-in, transfers, digest",
        ),
        pytest.param(
            ["tests/connectors/p2p", "tests/core/wire"],
            "not slow and not e2e and not gpu",
            id="agent",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["tests/connectors/p2p/transport", "tests/connectors/p2p/test_conformance.py", "tests/conformance"],
            "slow and not e2e and not gpu",
            id="nixl, stale references",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_suites_pass_on_it(unpacked, tests, chosen):
    run = pytest_on(unpacked, "-m", chosen, *tests)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
