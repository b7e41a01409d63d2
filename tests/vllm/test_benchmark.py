"""The benchmarks with vLLM run, and write what they have measured."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.benchmark_goals import read_figures

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.slow]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script, folder, *arguments):
    path = folder / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *arguments, "--json", str(path)]
    subprocess.run(command, check=True, timeout=280)
    return read_figures(path)


def test_both_connectors_are_measured_side_by_side(tmp_path):
    figures = run("vllm_plugin.py", tmp_path)
    assert [goal["name"].partition(",")[0] for goal in figures["goals"]] == [
        "handoff of 256 tokens",
        "CPU of an idle pair without requests",
        "CPU of an idle pair with one lease held",
    ]
    assert len(figures["seconds"]) == 3


def test_our_router_is_measured_beside_a_proxy(tmp_path):
    ways = run("vllm_router.py", tmp_path)["ways"]
    assert set(ways) == {"our router and agents", "proxy, two plain calls"}
    assert all(len(way["cpu_s"]["16"]) == 3 for way in ways.values())


def test_disaggregation_is_measured_with_vllm_too(tmp_path):
    figures = run("disaggregation.py", tmp_path, "--peers", "--chunks", "2048", "--repeats", "1", "--plot", str(tmp_path))
    assert figures["sides"].keys() == {
        "1P1D",
        "2 aggregated, 2048",
        "2 vLLM, 256",
        "vLLM 1P1D, kvferry",
        "vLLM 1P1D, NixlConnector",
    }
    for side in figures["sides"].values():
        assert len(side["intervals"]["long_ttft_ms"]) == 2
        assert side["intervals"]["busy_ms"]
    assert (tmp_path / "gaps.svg").exists()
    assert (tmp_path / "goodput.svg").exists()
