"""A handoff between two real engines: right tokens whatever becomes of the blocks, and nothing held."""

import time

import pytest

from tests.vllm.conftest import LEASE_S, settings
from tests.vllm.forged_params import with_blocks_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def failures_of(pair, action):
    """Return the reasons of the loads that failed during an action."""
    before = pair.counts()["failures"]
    action()
    after = pair.counts()["failures"]
    return {reason: count - before.get(reason, 0) for reason, count in after.items() if count > before.get(reason, 0)}


def assert_answers_right(pair, prompt, params, **options):
    assert pair.answer(prompt, params, **options) == pair.reference(prompt)


def assert_computes(pair, prompt, params, num_tokens):
    assert pair.num_computed(prompt, params) == num_tokens


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 300, 320, 1000])
def test_every_block_is_verified_and_the_tokens_are_right(pair, num_tokens):
    prompt = pair.prompt(num_tokens)
    before = pair.counts()
    assert_answers_right(pair, prompt, pair.hand_off(prompt))
    after = pair.counts()
    assert after["loads"] - before["loads"] == 1
    assert after["verified"] - before["verified"] == -(-num_tokens // 32)


def test_a_handoff_whose_lease_is_over_is_stale(pair):
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    time.sleep(LEASE_S + 0.3)
    pair.assert_nothing_is_held()
    pair.reuse_blocks()
    assert failures_of(pair, lambda: assert_answers_right(pair, prompt, params)) == {"stale": 1}


def test_only_the_blocks_that_lack_here_are_read(pair):
    first = pair.prompt()
    assert_answers_right(pair, first, pair.hand_off(first))
    second = first[:192] + pair.prompt(100)
    before = pair.counts()["verified"]
    assert_answers_right(pair, second, pair.hand_off(second))
    assert pair.counts()["verified"] - before == 4


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda pair, block: pair.p.ask("flip_bit", block_id=block), "digest"),
        (lambda pair, block: pair.p.ask("seal_as", block_id=block, generation=10**9), "stale"),
    ],
    ids=["a bit is flipped", "a block is reused"],
)
def test_one_bad_block_costs_the_tokens_behind_it(tcp_pair, spoil, reason):
    pair = tcp_pair
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    spoil(pair, params["remote_block_ids"][0][4])
    before = pair.counts()["verified"]
    assert failures_of(pair, lambda: assert_computes(pair, prompt, params, 300 - 4 * 32)) == {reason: 1}
    assert pair.counts()["verified"] - before == 9
    pair.assert_nothing_is_held()


def test_blocks_under_a_valid_lease_that_are_of_another_prompt_are_stale(tcp_pair):
    pair = tcp_pair
    mine, other = pair.prompt(), pair.prompt()
    params, of_other = pair.hand_off(mine), pair.hand_off(other)
    forged = with_blocks_of(params, of_other)
    assert failures_of(pair, lambda: assert_answers_right(pair, mine, forged)) == {"stale": 1}
    pair.assert_nothing_is_held()


def test_a_shared_prefix_stays_sealed_until_its_last_reader_is_done(tcp_pair):
    pair = tcp_pair
    prefix = pair.prompt(256)
    one, two = prefix + pair.prompt(20), prefix + pair.prompt(20)
    first, second = pair.hand_off(one), pair.hand_off(two)
    assert first["remote_block_ids"][0][:8] == second["remote_block_ids"][0][:8]
    assert_answers_right(pair, one, first)
    pair.reuse_blocks()
    assert failures_of(pair, lambda: assert_answers_right(pair, two, second)) == {}
    pair.assert_nothing_is_held()


def test_a_handoff_that_nobody_reads_is_freed_with_its_lease(pair):
    pair.hand_off(pair.prompt())
    assert pair.p.ask("usage")["published"] == 1
    time.sleep(LEASE_S)
    pair.assert_nothing_is_held()


def test_many_requests_at_once(pair):
    prompts = [pair.prompt(40 + 7 * index) for index in range(6)]
    params = [pair.hand_off(prompt) for prompt in prompts]
    names = [pair.name() for _ in prompts]
    for name, prompt, handoff in zip(names, prompts, params, strict=True):
        pair.d.ask("add", name=name, prompt=prompt, max_tokens=16, params=handoff)
    answers = [pair.d.ask("result", name=name)["tokens"] for name in names]
    assert answers == [pair.reference(prompt) for prompt in prompts]


def test_a_frozen_peer_costs_the_deadline_and_no_token(new_pair):
    pair = new_pair(extra=settings("tcp"))
    prompt = pair.prompt()
    params = pair.hand_off(prompt)
    pair.p.freeze()
    try:
        assert failures_of(pair, lambda: assert_answers_right(pair, prompt, params)) == {"deadline": 1}
        aborted = pair.name()
        pair.d.ask("add", name=aborted, prompt=pair.prompt(), max_tokens=16, params=params)
        pair.d.ask("abort", name=aborted)
    finally:
        pair.p.thaw()
    again = pair.prompt()
    assert failures_of(pair, lambda: assert_answers_right(pair, again, pair.hand_off(again))) == {}
    pair.assert_nothing_is_held()
    killed = pair.prompt()
    params = pair.hand_off(killed)
    pair.p.kill()
    assert failures_of(pair, lambda: assert_answers_right(pair, killed, params)) == {"peer_lost": 1}
    assert pair.d.ask("usage")["used_blocks"] == 0
