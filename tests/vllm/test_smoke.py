"""One handoff between two real vLLM engines, in every run; the rest runs with ``make test-vllm``."""

import pytest

from tests.vllm.conftest import settings

pytestmark = pytest.mark.slow


def test_a_prompt_that_one_engine_has_computed_is_answered_by_another(new_pair):
    pair = new_pair(extra=settings("tcp"))
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    assert pair.answer(prompt, params) == pair.reference(prompt)
    assert pair.counts() == {"loads": 1, "verified": 10, "failures": {}}
    pair.assert_nothing_is_held()
