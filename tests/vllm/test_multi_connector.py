"""Beside another connector in vLLM's MultiConnector: both store blocks, and the handoff is ours."""

import pytest

from tests.vllm.conftest import settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_handoff_beside_another_connector(new_pair, tmp_path):
    ours = {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "connectors.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings("tcp"),
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    pair = new_pair(connector="MultiConnector", extra={"connectors": [ours, other]}, disable_hybrid_kv_cache_manager=True)
    for num_tokens in (65, 300, 300):
        prompt = pair.prompt(num_tokens)
        assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
        pair.assert_nothing_is_held()
    log = pair.d.log_path.read_text()
    assert "kv_load_failed" not in log
    assert "handoff_refused" not in log
