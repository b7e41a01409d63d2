"""Many requests while workers are killed at random: right answers, or one of the errors that a client may retry."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.streaming_client import Stream

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CLIENTS = 4
NUM_REQUESTS, NUM_TOKENS = 20, 10  # at least so many requests
NUM_KILLS = 2
RETRYABLE = {"no_worker", "overloaded", "peer_lost", "router_silent"}


@pytest.mark.timeout(600)
@pytest.mark.quick_on("shm")
def test_answers_are_right_while_workers_are_killed_every_few_seconds(faulty):
    rng = random.Random(20)
    is_over = threading.Event()
    kills: list[str] = []
    killer = threading.Thread(target=kill_now_and_then, args=(faulty, rng, is_over, kills))
    killer.start()
    streams: list[Stream] = []
    try:
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            while len(streams) < NUM_REQUESTS or len(kills) < NUM_KILLS:  # a fast machine answers 20 within a second or two
                numbers = range(len(streams), len(streams) + NUM_CLIENTS)
                streams += clients.map(lambda number: ask(faulty, number), numbers)
    finally:
        is_over.set()
        killer.join()
    failed = [stream.error["code"] for stream in streams if stream.error is not None]
    assert set(failed) <= RETRYABLE
    assert len(failed) <= len(streams) // 10
    for stream in streams:
        if stream.error is None:
            faulty.assert_correct(stream, NUM_TOKENS)


def ask(faulty, number):
    """Send one of a few prompts, each under a salt of its own, and wait for the end of the answer."""
    return faulty.start((40, 90, 140)[number % 3], NUM_TOKENS, offset=200 * (number % 2)).result()


def kill_now_and_then(faulty, rng, is_over, kills):
    """Kill one of the two workers of a role whenever both are up, so that one can always continue."""
    while not is_over.wait(rng.uniform(1.0, 3.0)):
        roles = [role for role in ("prefill", "decode") if faulty.num_members(role) == 2]
        if roles:
            kills.append(f"{rng.choice(roles)}-{rng.randrange(2)}")
            faulty.cluster.kill(kills[-1])
