"""``kvferry serve`` with vLLM engines: real servers, started, supervised and ended by the cluster."""

import os
import re
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from core.config import load_config
from kvferry import LocalCluster
from kvferry.demo_vllm import read_engine
from kvferry.local import ProcessOptions
from tests.support.plugin_wheel import build_wheel, unpack_wheel
from tests.support.polling import wait_until
from tests.support.tiny_models import VOCAB_SIZE
from tests.support.vllm_engine import CPU_ENVIRONMENT, vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.full]

WAIT_S = 120.0
COMMAND = str(vllm_python().with_name("vllm"))
ARGUMENTS = "--enforce-eager --block-size 32 --num-gpu-blocks-override 100"


@pytest.fixture
def variables(tmp_path):
    """Return the environment of servers that have the plug-in from its wheel."""
    unpacked = unpack_wheel(build_wheel(tmp_path / "built"), tmp_path / "unpacked")
    return {**CPU_ENVIRONMENT, "PYTHONPATH": str(unpacked)}


@pytest.fixture
def cluster(served_model, tmp_path, variables):
    """Yield a supervised cluster of two servers; afterwards no process is left."""
    settings = {
        "model.name": str(served_model),
        "model.served_name": "tiny",
        "model.max_model_len": 1024,
        "model.dtype": "float32",
        "local.engine": "vllm",
        "local.vllm_command": COMMAND,
        "local.vllm_arguments": ARGUMENTS,
        "agent.patience_s": 3.0,
        "router.port": 0,
    }
    options = ProcessOptions(environment=variables)
    running = LocalCluster(load_config(overrides=settings), supervise=True, log_dir=tmp_path / "logs", options=options)
    with running:
        yield running
        processes = [psutil.Process(pid) for pid in running.pids.values()]
        processes += [child for one in processes for child in one.children(recursive=True)]
        assert len(processes) >= 9  # a router, two agents; of each server a wrapper, the API, and a core at least
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes), WAIT_S)


def answer(cluster, first_token):
    prompt = [5 + (first_token + 7 * position) % (VOCAB_SIZE - 5) for position in range(300)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=WAIT_S)


def reading(cluster):
    return read_engine(cluster.metrics("decode-0-vllm"))


def test_servers_hand_off_and_one_that_dies_is_replaced_at_the_same_address(cluster):
    first = answer(cluster, 1)
    assert first.status_code == 200, first.text
    wait_until(lambda: reading(cluster).num_loads == 1, WAIT_S)
    assert reading(cluster).num_verified_blocks == 10
    server = psutil.Process(cluster.pids["prefill-0-vllm"])
    core = next(child for child in server.children(recursive=True) if "EngineCore" in "".join(child.cmdline()))
    os.kill(core.pid, signal.SIGKILL)
    wait_until(lambda: "prefill-0-vllm" in cluster.ends, WAIT_S)
    cluster.wait_until_ready(WAIT_S)
    second = answer(cluster, 2)
    assert second.status_code == 200, second.text
    wait_until(lambda: reading(cluster).num_loads == 2, WAIT_S)
    assert reading(cluster).problems == {}
    again = answer(cluster, 1).json()
    assert again["choices"][0]["token_ids"] == first.json()["choices"][0]["token_ids"]


def test_the_demo_shows_a_verified_handoff(served_model, variables):
    words = "".join(f"t{token}" for token in range(300, 400))
    command = [sys.executable, "-P", "-m", "kvferry", "demo", "--model", str(served_model), "--prompt", words]
    options = ["--engine", "vllm", "--vllm-command", COMMAND, "--vllm-arguments", ARGUMENTS, "--max-tokens", "8"]
    options += ["--set", "model.max_model_len=1024"]
    result = subprocess.run(
        [*command, *options], env=os.environ | variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"router, prefill-0, decode-0 are ready at http://127\.0\.0\.1:\d+", result.stdout), result.stdout
    (num_tokens,) = re.findall(r"prompt: (\d+) tokens", result.stdout)
    assert 100 < int(num_tokens) < 128  # with the chat template's own
    assert "verified blocks: 4\n" in result.stdout
    assert "no block is held on either engine" in result.stdout
