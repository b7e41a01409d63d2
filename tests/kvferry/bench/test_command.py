"""``kvferry bench`` as it is called."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvferry import cli


@pytest.fixture
def bench(server):
    return lambda *flags: CliRunner().invoke(cli.app, ["bench", "--url", f"http://127.0.0.1:{server.server_port}/v1", *flags])


def test_loads_the_first_model_and_reports(bench, server, tmp_path):
    figures = tmp_path / "report.json"
    result = bench("--num-requests", "3", "--prompt-tokens", "5:9", "--output-tokens", "4", "--json", str(figures))
    assert result.exit_code == 0, result.output
    assert "time to first token" in result.output
    assert [body["model"] for body in server.bodies] == ["the-model"] * 3
    assert all(5 <= len(body["prompt"]) <= 9 for body in server.bodies)
    report = json.loads(figures.read_text())
    assert (report["num_requests"], report["num_failed"], report["num_output_tokens"]) == (3, 0, 12)


def test_failed_requests_show_in_the_exit_code(bench):
    result = bench("--num-requests", "2", "--output-tokens", "99")
    assert result.exit_code == 1
    assert "2 x HTTP 503" in result.output


def test_wrong_lengths_are_refused_by_name(bench):
    result = bench("--prompt-tokens", "9:5")
    assert "prompt-tokens" in str(result.exception)


def test_processes_of_a_cluster_do_not_import_the_http_client():
    code = "import sys, kvferry.cli; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
