"""``kvferry bench`` as it is called."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from typer.testing import CliRunner

from core.errors import ConfigError
from kvferry import cli
from kvferry.bench.run import first_model

pytestmark = pytest.mark.slow


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


@pytest.fixture
def trace(tmp_path):
    line = {"timestamp": 0, "input_length": 3, "output_length": 2, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for _ in range(70)))
    return str(path)


def test_trace_is_sent_whole_unless_it_is_cut(bench, server, trace):
    assert bench("--trace", trace, "--concurrency", "8").exit_code == 0
    assert len(server.bodies) == 70
    assert bench("--trace", trace, "--num-requests", "2").exit_code == 0
    assert len(server.bodies) == 72


@pytest.mark.parametrize(
    ("flag", "value"), [("--rate", "5"), ("--prompt-tokens", "256"), ("--output-tokens", "64"), ("--shared-prefix", "0")]
)
def test_flags_of_a_synthetic_workload_are_refused_beside_a_trace(bench, server, trace, flag, value):
    result = bench("--trace", trace, flag, value)
    assert isinstance(result.exception, ConfigError)
    assert flag in str(result.exception)
    assert server.bodies == []


def test_wrong_lengths_are_refused_by_name(bench):
    result = bench("--prompt-tokens", "9:5")
    assert "prompt-tokens" in str(result.exception)


@pytest.mark.parametrize("flags", [[], ["--model", "m"]])
def test_address_that_is_none_is_refused_by_name(flags):
    result = CliRunner().invoke(cli.app, ["bench", "--url", "http://127.0.0.1:abc", *flags])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith("--url = 'http://127.0.0.1:abc': ")


def test_a_model_name_that_no_request_can_hold_is_refused_before_the_load(bench, server):
    result = bench("--model", os.fsdecode(b"a\xff"), "--num-requests", "1")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith("--model: character 2 of the text is a byte that is not UTF-8")
    assert server.bodies == []


@pytest.mark.parametrize("name", ["no/such/folder/x.json", ""])
def test_file_that_cannot_be_written_is_refused_before_the_load(bench, server, tmp_path, name):
    result = bench("--num-requests", "1", "--json", str(tmp_path / name))
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(f"--json = {tmp_path / name}: ")
    assert server.bodies == []


def test_figures_can_go_into_a_pipe(bench, server, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as reader:
        figures = reader.submit(pipe.read_text)
        assert bench("--num-requests", "1", "--output-tokens", "4", "--json", str(pipe)).exit_code == 0
        assert json.loads(figures.result(timeout=30))["num_requests"] == 1


@pytest.mark.parametrize("answer", [["x"], {"data": None}, {"data": ["m"]}, {"data": []}, {}])
def test_a_server_that_lists_no_models_is_named(monkeypatch, answer):
    response = httpx.Response(200, json=answer, request=httpx.Request("GET", "http://a/v1/models"))
    monkeypatch.setattr(httpx, "get", lambda *args, **options: response)
    with pytest.raises(ConfigError, match=r"cannot read the model name from http://a/v1/models .* give --model"):
        first_model("http://a", "")


def test_keys_may_have_any_letters(bench):
    flags = ["--num-requests", "1", "--output-tokens", "4"]
    assert bench(*flags, "--api-key", "clé").exit_code == 0


def test_processes_of_a_cluster_do_not_import_the_http_client():
    code = "import sys, kvferry.cli; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("is_trace", [False, True])
def test_every_run_has_prompts_of_its_own_unless_its_seed_is_given(bench, server, trace, is_trace):
    flags = ["--num-requests", "1", *(["--trace", trace] if is_trace else ["--output-tokens", "4"])]
    first, second = bench(*flags), bench(*flags)
    seed = re.search(r"--seed (\d+) sends the same prompts again", second.output).group(1)
    again = bench(*flags, "--seed", seed)
    assert [result.exit_code for result in (first, second, again)] == [0, 0, 0]
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[0] != prompts[1] == prompts[2]
