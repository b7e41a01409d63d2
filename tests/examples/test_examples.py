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
@pytest.mark.full
def test_local_cluster_answers_by_a_handoff(run_example):
    printed = run_example("local_cluster.py", "What is the capital of France?")
    assert "Paris" in printed
    assert "transferred_bytes" in printed


def test_aggregated_engine_continues_the_text(run_example):
    printed = run_example("aggregated_engine.py", "The three primary colours are")
    assert printed.startswith("The three primary colours are")
    assert "red" in printed


@pytest.mark.e2e
@pytest.mark.full
def test_conversation_computes_only_what_is_new(run_example):
    turns = [line for line in run_example("shared_store_chat.py").splitlines() if line.startswith("turn")]
    assert len(turns) == 3
    assert turns[0].split()[3] != turns[1].split()[3], "the second turn lands on a worker that has not seen the first"
    assert all(int(line.split()[-2]) < 110 for line in turns[1:])
