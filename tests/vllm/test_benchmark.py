"""The benchmark of the plug-in runs, and writes its goals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "benchmarks/vllm_plugin.py"


def test_both_connectors_are_measured_side_by_side(tmp_path):
    path = tmp_path / "figures.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(path)], check=True, timeout=280)
    figures = json.loads(path.read_text())
    assert [goal["name"].partition(",")[0] for goal in figures["goals"]] == [
        "handoff of 256 tokens",
        "CPU of an idle pair without requests",
        "CPU of an idle pair with one lease held",
    ]
    assert len(figures["seconds"]) == 3
