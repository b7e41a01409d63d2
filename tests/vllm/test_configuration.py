"""What vLLM makes of settings together with the plug-in, without an engine."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.vllm_engine import CPU_ENVIRONMENT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found():
    command = [vllm_python(), ROOT / "tests/vllm/configuration_dump.py"]
    environment = os.environ | CPU_ENVIRONMENT | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(ended.stdout.splitlines()[-1])


def test_data_parallel_engines_of_a_dense_model_have_ports_of_their_own(found):
    assert found["ports"] == [7000, 7001, 7002]


def test_the_layout_can_be_that_of_the_connector_beside_ours(found):
    default, chosen = found["layouts"]
    assert "KV cache layout mismatch" in default
    assert chosen == "LBHNC"


def test_engines_that_keep_other_layers_in_the_models_type_have_other_blocks(found):
    of_one, with_more_memory, of_another = found["orders"]
    assert of_one.startswith("opaque-")
    assert of_one == with_more_memory
    assert of_one != of_another


def test_wrong_settings_are_refused_before_a_model_with_full_cuda_graphs_loads(found):
    assert found["refusals"] == ["False", "kvferry.transports[0]: Invalid enum value 'tpc'; allowed: shm, nixl, tcp"]
