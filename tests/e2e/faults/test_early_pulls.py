"""Workers die in the midst of a prompt that a decode worker reads while it is computed: exact answers, and nothing left."""

from __future__ import annotations

from signal import SIGCONT, SIGKILL, SIGSTOP

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.profile("early pulls"),
    pytest.mark.quick_on("tcp"),
]

NUM_TOKENS = 600  # ten chunks


def reading(faulty) -> tuple[str, str]:
    """Wait until a decode worker holds blocks that were read early; return the prefill and the decode worker."""
    decode = faulty.busy("decode", "kvferry_kv_early_blocks")
    return faulty.busy("prefill", "kvferry_num_requests_running"), decode


def test_long_prompt_is_read_while_it_is_computed(faulty):
    stream = faulty.start(NUM_TOKENS)
    faulty.assert_correct(stream)
    transfer = stream.transfer
    assert transfer["fallback_reason"] == ""
    assert transfer["early_tokens"] >= NUM_TOKENS // 2
    assert transfer["early_tokens"] + transfer["transferred_tokens"] == NUM_TOKENS
    faulty.assert_released()


def test_prefill_worker_killed_in_mid_chunk_is_replaced_and_the_answer_is_exact(faulty):
    stream = faulty.start(NUM_TOKENS)
    prefill, _ = reading(faulty)
    pid = faulty.cluster.pids[prefill]
    faulty.kill(prefill, SIGKILL)
    faulty.assert_correct(stream)
    assert (stream.transfer["retries"], stream.transfer["fallback_reason"]) == (1, "")
    faulty.assert_released()
    faulty.wait_for_restart(prefill, pid)


def test_decode_worker_killed_while_it_reads_early_is_not_missed(faulty):
    stream = faulty.start(NUM_TOKENS)
    _, decode = reading(faulty)
    pid = faulty.cluster.pids[decode]
    faulty.kill(decode, SIGKILL)
    faulty.assert_correct(stream)
    faulty.assert_released()
    faulty.wait_for_restart(decode, pid)


def test_frozen_prefill_worker_costs_only_time(faulty):
    stream = faulty.start(NUM_TOKENS)
    prefill, _ = reading(faulty)
    faulty.kill(prefill, SIGSTOP)
    faulty.wait_for_members("prefill", 1)
    faulty.kill(prefill, SIGCONT)
    faulty.assert_correct(stream)
    faulty.assert_released()


def test_client_that_leaves_in_mid_chunk_leaves_nothing(faulty):
    stream = faulty.start(NUM_TOKENS)
    reading(faulty)
    faulty.assert_released(stream.leave())
