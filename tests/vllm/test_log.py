"""What an operator sees in vLLM's log."""

import pytest

from tests.vllm.conftest import settings

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_one_line_says_which_transport_is_in_effect(new_pair):
    pair = new_pair(extra=settings("tcp"), environments=[{"VLLM_LOGGING_LEVEL": "INFO"}] * 2)
    prompt = pair.prompt()
    pair.answer(prompt, pair.hand_off(prompt))
    log = pair.d.log_path.read_text()
    assert log.count("event=kvferry_ready transports=tcp ranks=1") == 1
    (line,) = [line for line in log.splitlines() if "event=kv_transport" in line and "peer=tcp://127.0.0.1" in line]
    assert "transport=tcp" in line
    assert "INFO" in line
