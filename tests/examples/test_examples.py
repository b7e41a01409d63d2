"""The examples run as they are, on the real model."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def run_example(examples_dir, no_child_left):
    def run(name, *arguments):
        command = [sys.executable, str(examples_dir / name), *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    return run


@pytest.mark.e2e
def test_local_cluster_answers_by_a_hand_over(run_example):
    printed = run_example("local_cluster.py", "What is the capital of France?")
    assert "Paris" in printed
    assert "transferred_bytes" in printed


def test_aggregated_engine_continues_the_text(run_example):
    printed = run_example("aggregated_engine.py", "The three primary colours are")
    assert printed.startswith("The three primary colours are")
    assert "red" in printed
