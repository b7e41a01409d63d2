"""Workers die in the midst of a prompt that a decode worker reads while it is computed: exact answers, and nothing left."""

from __future__ import annotations

import random
from collections.abc import Callable
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
LEAST_STRUCK = 0.7
NUM_BOUNDARIES = 9
NUM_OF_EACH = {"kill": 20, "freeze": 2, "abort": 4, "preempt": 4}  # faults at drawn boundaries; kills: 20 on each transport


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


@pytest.mark.timeout(900)
def test_no_fault_of_a_prefill_worker_at_a_drawn_chunk_changes_an_answer(faulty):
    """The boundary is drawn; the worker is the one that computes. Sixty kills over ``tcp``, ``shm`` and ``nixl``."""
    drawn = random.Random(faulty.cell)
    kinds = [kind for kind, number in NUM_OF_EACH.items() for _ in range(number)]
    drawn.shuffle(kinds)
    num_struck = 0
    for kind in kinds:
        num_struck += FAULTS[kind](faulty, drawn.randint(1, NUM_BOUNDARIES))
        faulty.assert_released()
    assert num_struck >= LEAST_STRUCK * len(kinds), "most faults come while the prompt is computed"


def start_and_wait(faulty, number: int):
    """Start a prompt; return the stream and its prefill worker, once that has made ``number`` steps or has answered."""

    def num_steps(name: str) -> float:
        return faulty.gauge(name, "kvferry_engine_steps_total")

    before = {name: num_steps(name) for name in ("prefill-0", "prefill-1")}
    stream = faulty.start(NUM_TOKENS)
    prefill = faulty.busy("prefill", "kvferry_num_requests_running")
    faulty.eventually(lambda: num_steps(prefill) >= before[prefill] + number or stream.token_ids, f"{number} steps")
    return stream, prefill


# Each returns whether the fault struck while the prompt was computed.


def kill(faulty, number: int) -> bool:
    stream, prefill = start_and_wait(faulty, number)
    pid = faulty.cluster.pids[prefill]
    faulty.kill(prefill, SIGKILL)
    is_in_time = not stream.token_ids
    faulty.assert_correct(stream)
    faulty.wait_for_restart(prefill, pid)
    faulty.wait_for_members("prefill", 2)
    return is_in_time


def freeze(faulty, number: int) -> bool:
    stream, prefill = start_and_wait(faulty, number)
    faulty.kill(prefill, SIGSTOP)
    is_in_time = not stream.token_ids
    faulty.wait_for_members("prefill", 1)
    faulty.kill(prefill, SIGCONT)
    faulty.assert_correct(stream)
    faulty.wait_for_members("prefill", 2)
    return is_in_time


def abort(faulty, number: int) -> bool:
    stream, _ = start_and_wait(faulty, number)
    is_in_time = not stream.token_ids
    stream.leave()
    return is_in_time


def preempt(faulty, number: int) -> bool:
    stream, prefill = start_and_wait(faulty, number)
    faulty.squeeze(prefill)
    faulty.assert_correct(stream)
    return faulty.was_squeezed(prefill)


FAULTS: dict[str, Callable[..., bool]] = {"kill": kill, "freeze": freeze, "abort": abort, "preempt": preempt}
