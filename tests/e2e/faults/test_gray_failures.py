"""Processes that live and do nothing: an engine that hangs, a router that stands still. No stream breaks, no token differs."""

from __future__ import annotations

import time
from signal import SIGCONT, SIGSTOP

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STALLS = ("kvferry_worker_stalls_total", "decode")


@pytest.mark.quick_on("shm")
def test_stream_leaves_a_worker_whose_engine_hangs_and_it_is_taken_back(faulty):
    stalls_before = faulty.samples("router").get(STALLS, 0.0)
    stream = faulty.start(max_tokens=60)
    faulty.wait_for_tokens(stream, 5)
    name = faulty.trace("posted")[0]["worker"]
    hung_at = faulty.hang(name)
    num_before = len(stream.token_ids)
    faulty.assert_correct(stream, 60)
    assert stream.transfer["replays"] >= 1
    faulty.measure("hang to next token, from another worker", stream.times[num_before] - hung_at)
    assert faulty.samples("router")[STALLS] > stalls_before
    faulty.unhang()
    faulty.eventually(lambda: faulty.samples("router")[("kvferry_workers_stalled",)] == 0, "the worker is taken back")
    faulty.assert_released()


@pytest.mark.quick_on("shm")
def test_router_that_is_paused_for_long_loses_no_stream(faulty):
    streams = [faulty.start(60 + number, 160) for number in range(4)]
    for stream in streams:
        faulty.wait_for_tokens(stream, 3)
    workers = [worker.engine_id for worker in faulty.cluster.workers]
    frozen_at = faulty.kill("router", SIGSTOP)
    faulty.eventually(
        lambda: all(faulty.gauge(name, "kvferry_registered_routers") == 0 for name in workers), "workers give it up", 60.0
    )
    faulty.kill("router", SIGCONT)
    thawed_at = time.monotonic()
    faulty.measure("pause of the router", thawed_at - frozen_at)
    for stream in streams:
        faulty.assert_correct(stream, 160)
    faulty.assert_released()
