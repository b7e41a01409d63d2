"""A handoff between engines that have the plug-in from its wheel, and nothing else of this repository."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.plugin_wheel import build_wheel, unpack_wheel
from tests.support.vllm_engine import vllm_python
from tests.vllm.conftest import OURS, settings

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

CPU_LAYOUT = Path(__file__).parent / "cpu_layout"


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    unpacked = unpack_wheel(build_wheel(folder / "built"), folder / "unpacked")
    return {"PYTHONPATH": os.pathsep.join([str(unpacked), str(CPU_LAYOUT)])}


def test_the_name_of_the_connector_is_all_that_a_configuration_needs(new_pair, variables):
    transfer = {
        "kv_connector": OURS,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings("tcp"),
    }
    pair = new_pair(kv_transfer_config=transfer, environments=(variables, variables))
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    assert pair.answer(prompt, params) == pair.reference(prompt)
    assert pair.counts() == {"loads": 1, "verified": 10, "failures": {}}
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("name", ["core", "connectors", "router", "kvferry"])
def test_no_generic_name_can_be_imported_beside_it(variables, name):
    program = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    command = [str(vllm_python()), "-c", program]
    run = subprocess.run(command, env=os.environ | variables, cwd="/", capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "None"
