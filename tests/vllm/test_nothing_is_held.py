"""Requests that end early, on P and on D, in every state: nothing is held, and no block is handed out under a valid seal."""

import time

import pytest

from tests.support.vllm_engine import REMOTE_DECODE
from tests.vllm.conftest import LEASE_S, settings, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def chunked_pair(new_pair):
    """Return a pair whose steps take 64 tokens, so that a prompt takes several."""
    return new_pair(extra=settings("tcp"), max_num_batched_tokens=64, enable_chunked_prefill=True, dtype="bfloat16")


def assert_goes_on(pair):
    pair.assert_nothing_is_held()
    prompt = pair.prompt()
    assert pair.answer(prompt, pair.hand_off(prompt)) == pair.reference(prompt)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("num_steps", range(7))
def test_a_prompt_that_is_aborted_after_some_steps(chunked_pair, num_steps):
    name = chunked_pair.name()
    prompt = chunked_pair.prompt()
    chunked_pair.p.ask("add_and_step", name=name, prompt=prompt, max_tokens=1, params=REMOTE_DECODE, count=num_steps)
    chunked_pair.p.ask("abort", name=name)
    assert_goes_on(chunked_pair)


@pytest.mark.parametrize("num_steps", range(1, 6))
def test_a_prompt_that_is_preempted_is_handed_off_all_the_same(chunked_pair, num_steps):
    pair, name, prompt = chunked_pair, chunked_pair.name(), chunked_pair.prompt()
    request = {"name": name, "prompt": prompt, "max_tokens": 1, "params": REMOTE_DECODE}
    was_running = pair.p.ask("add_step_and_preempt", count=num_steps, **request)
    assert was_running == (num_steps < 5)  # a step takes 64 of 300 tokens
    params = pair.p.ask("result", name=name)["params"]
    assert pair.answer(prompt, params) == pair.reference(prompt)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("num_steps", range(4))
def test_an_answer_that_is_aborted_after_some_steps(chunked_pair, num_steps):
    pair, name, prompt = chunked_pair, chunked_pair.name(), chunked_pair.prompt()
    params = pair.hand_off(prompt)
    pair.d.ask("add_and_step", name=name, prompt=prompt, max_tokens=16, params=params, count=num_steps)
    pair.d.ask("abort", name=name)
    assert_goes_on(pair)


def test_an_answer_that_is_aborted_while_its_peer_is_frozen(chunked_pair):
    pair = chunked_pair
    name, prompt = pair.name(), pair.prompt()
    params = pair.hand_off(prompt)
    pair.p.freeze()
    try:
        pair.d.ask("add_and_step", name=name, prompt=prompt, max_tokens=16, params=params, count=3)
        assert pair.d.ask("usage")["used_blocks"] == 10
        pair.d.ask("abort", name=name)
        end = time.monotonic() + 10
        while pair.d.ask("usage")["used_blocks"]:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        pair.p.thaw()
    assert_goes_on(pair)


def test_a_load_ends_and_releases_its_lease_while_its_engine_is_paused(chunked_pair):
    pair, name, prompt = chunked_pair, chunked_pair.name(), chunked_pair.prompt()
    params = pair.hand_off(prompt)
    pair.p.freeze()
    try:
        pair.d.ask("add_and_step", name=name, prompt=prompt, max_tokens=16, params=params, count=3)
        pair.d.ask("pause", mode="keep")
    finally:
        pair.p.thaw()
    wait_until(lambda: not pair.p.ask("usage")["published"])
    assert pair.d.ask("usage")["loading"] == 0
    pair.d.ask("resume")
    assert pair.d.ask("result", name=name)["tokens"] == pair.reference(prompt)
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("side", ["d", "p"])
def test_a_request_that_the_api_rejects_releases_the_handoff(tcp_pair, side):
    params = tcp_pair.hand_off(tcp_pair.prompt())
    assert tcp_pair.p.ask("usage")["published"] == 1
    getattr(tcp_pair, side).ask("reject", name=tcp_pair.name(), params=params)
    end = time.monotonic() + LEASE_S / 2
    while tcp_pair.p.ask("usage")["published"]:
        assert time.monotonic() < end, "the lease was left to expire"
        time.sleep(0.02)
    tcp_pair.assert_nothing_is_held()


def test_a_request_that_is_answered_on_p_is_no_handoff(tcp_pair):
    result = tcp_pair.p.generate(tcp_pair.name(), tcp_pair.prompt(), 8, params=REMOTE_DECODE)
    assert result["params"] is None
    tcp_pair.assert_nothing_is_held()


def test_a_handoff_that_fails_ends_the_request_where_the_policy_says_so(new_pair):
    pair = new_pair(extra=settings("tcp"), policy="fail")
    (warning,) = [line for line in pair.d.log_path.read_text().splitlines() if "kv_load_failure_policy_is_fail" in line]
    assert "ends its request with an error" in warning
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    assert pair.answer(prompt, params)
    pair.reuse_blocks()
    pair.d.ask("reset_prefix_cache")
    assert pair.d.generate(pair.name(), prompt, params=params)["finish_reason"] == "error"
    pair.assert_nothing_is_held()
