"""What the plug-in uses of vLLM is what it was written for. With another minor version this test tells what has changed."""

import difflib
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_engine import CPU_ENVIRONMENT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HERE = Path(__file__).parent


def test_vllm_is_what_the_plug_in_was_written_for():
    """After looking at each difference: ``interface_dump.py`` prints the new text of the file."""
    command = [vllm_python(), HERE / "interface_dump.py"]
    found = subprocess.run(command, env=os.environ | CPU_ENVIRONMENT, check=True, capture_output=True, text=True)
    recorded = (HERE / "interface_0_32.txt").read_text().splitlines()
    actual = [line for line in found.stdout.splitlines() if not line.startswith("INFO")]
    changes = [line for line in difflib.unified_diff(recorded, actual, lineterm="", n=0) if not line.startswith("@@")]
    assert not changes, "vLLM has changed:\n" + "\n".join(changes)
    assert len(recorded) > 100
