"""Beside another connector in vLLM's MultiConnector: both store blocks, the handoff is ours, and the log says how it goes."""

import pytest

from tests.support.vllm_engine import EngineFailed, VllmEngine
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def connectors(shared):
    """Return the settings of ours and of another one, which stores blocks in this folder."""
    ours = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings("tcp"),
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(shared)},
    }
    return {"connectors": [ours, other]}


@pytest.fixture(scope="module")
def beside(new_pair, tmp_path_factory):
    """Return a pair with both connectors, whose logs have INFO."""
    extra, environments = connectors(tmp_path_factory.mktemp("shared")), [{"VLLM_LOGGING_LEVEL": "INFO"}] * 2
    return new_pair(connector="MultiConnector", extra=extra, environments=environments, disable_hybrid_kv_cache_manager=True)


def test_a_handoff_beside_another_connector(beside):
    pair = beside
    for num_tokens in (65, 300, 300):
        prompt = pair.prompt(num_tokens)
        assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
        pair.assert_nothing_is_held()
    log = pair.d.log_path.read_text()
    assert "kv_load_failed" not in log
    assert "handoff_refused" not in log


def test_one_line_says_which_transport_is_in_effect(beside):
    prompt = beside.prompt()
    beside.answer(prompt, beside.hand_off(prompt))
    log = beside.d.log_path.read_text()
    assert log.count("event=kvferry_ready transports=tcp ranks=1") == 1
    (line,) = [line for line in log.splitlines() if "event=kv_transport" in line and "peer=tcp://127.0.0.1" in line]
    assert "transport=tcp" in line
    assert "INFO" in line


def test_the_failure_policy_is_that_of_the_engine(beside):
    """Ours has vLLM's default, "fail", but the scheduler goes by MultiConnector's."""
    assert "kv_load_failure_policy_is_fail" not in beside.d.log_path.read_text()


def test_a_role_of_the_engine_under_which_loads_could_be_overwritten_is_refused(tiny_llama, tmp_path):
    transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": connectors(tmp_path)}
    options = {"kv_transfer_config": transfer, "disable_hybrid_kv_cache_manager": True}
    with VllmEngine(tmp_path / "p.log", tiny_llama, **options) as engine, pytest.raises(EngineFailed):
        engine.wait()
    assert "cannot be a connector of MultiConnector with kv_role = kv_producer" in engine.log_path.read_text()
