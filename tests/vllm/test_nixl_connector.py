"""What vLLM's own NixlConnector does in the cases in which ours is right: these tests say when that changes.

No fault is injected: an ordinary router's delay or mistake is enough.
"""

import time

import pytest

from kvferry.cluster_plan import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NIXL_LEASE_S = 6  # its heartbeat is a sixth of that, in whole seconds

wrong_tokens = pytest.mark.xfail(
    strict=True, raises=AssertionError, reason="NixlConnector reads blocks without asking what is in them"
)


@pytest.fixture(scope="module")
def nixl(new_pair):
    return new_pair(
        connector="NixlConnector",
        with_layout=False,
        extra={"kv_lease_duration": NIXL_LEASE_S},
        environments=[{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in free_ports(2)],
    )


def assert_answers_right(pair, prompt, params):
    assert pair.answer(prompt, params) == pair.reference(prompt)


def test_a_handoff_is_right(nixl):
    prompt = nixl.prompt()
    assert_answers_right(nixl, prompt, nixl.hand_off(prompt))


@wrong_tokens
def test_a_handoff_used_twice(nixl):
    prompt = nixl.prompt()
    params = nixl.hand_off(prompt)
    nixl.answer(prompt, params)
    nixl.reuse_blocks()
    nixl.d.ask("reset_prefix_cache")
    assert_answers_right(nixl, prompt, params)


@wrong_tokens
def test_a_handoff_whose_lease_is_over(nixl):
    prompt = nixl.prompt()
    params = nixl.hand_off(prompt)
    time.sleep(NIXL_LEASE_S + 0.5)
    nixl.reuse_blocks()
    assert_answers_right(nixl, prompt, params)


@wrong_tokens
def test_a_handoff_of_another_prompt(nixl):
    params, prompt = nixl.hand_off(nixl.prompt()), nixl.prompt()
    assert_answers_right(nixl, prompt, params)
