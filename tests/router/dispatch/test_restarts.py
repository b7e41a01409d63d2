"""Estimates of when a missing role returns, under times that the test sets."""

from __future__ import annotations

import pytest

from core.wire.kv import KVLayoutInfo
from core.wire.messages import Register
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.restarts import Restarts

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=64, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=2048)
ROLES = {"p": "prefill", "d": "decode", "a": "aggregated"}


def worker(name: str, **facts) -> GenerationWorker:
    register = Register(
        engine_id=name,
        incarnation=1,
        role=ROLES[name[0]],
        model="tiny",
        model_fingerprint=b"w",
        layout=LAYOUT,
        max_model_len=100,
        max_num_seqs=4,
        num_blocks=10,
        **{"start_ms": 12_000, "is_supervised": True, **facts},
    )
    return GenerationWorker(key=WorkerKey(name, 1), peer=name.encode(), last_seen=0.0, facts=register)


def known(*names: str, **facts):
    """Return the estimates after these workers have registered, and the workers."""
    restarts, workers = Restarts(worker_wait_s=10.0), {name: worker(name, **facts) for name in names}
    for found in workers.values():
        restarts.on_joined(found, 0.0)
    restarts.look(workers.values(), 0.0)
    return restarts, workers


@pytest.mark.parametrize("back_after_s", [15.0, 31.0])
def test_a_client_that_waits_as_told_finds_the_restarted_worker(back_after_s):
    restarts, workers = known("p0", "d0")
    restarts.look([workers["p0"]], 100.0)
    for asked_after_s in range(int(back_after_s)):
        now = 100.0 + asked_after_s
        assert now + restarts.retry_after_s(now) >= 100.0 + back_after_s


def test_a_start_that_takes_longer_than_ever_makes_the_estimate_grow():
    restarts, workers = known("p0", "d0")
    restarts.look([workers["p0"]], 0.0)
    waits = [restarts.retry_after_s(now) for now in (0.0, 20.0, 34.0, 60.0, 120.0)]
    assert waits == [34, 14, 17, 30, 60]


def test_an_absence_that_was_longer_than_expected_is_learned():
    restarts, workers = known("p0", "d0")
    restarts.look([workers["p0"]], 0.0)
    restarts.on_joined(workers["d0"], 80.0)
    restarts.look(workers.values(), 80.0)
    restarts.look([workers["p0"]], 1000.0)
    assert restarts.retry_after_s(1000.0) == 80


def test_a_slow_start_is_forgotten_after_some_quick_ones():
    restarts, workers = known("p0", "d0")
    restarts.look([workers["p0"]], 0.0)
    restarts.on_joined(workers["d0"], 500.0)
    restarts.look(workers.values(), 500.0)
    for _ in range(4):
        restarts.on_joined(workers["d0"], 600.0)
    restarts.look([workers["p0"]], 1000.0)
    assert restarts.retry_after_s(1000.0) == 34


def test_of_two_ways_to_serve_the_sooner_counts():
    restarts, _ = known("p0", "d0", "a0")
    restarts.look([], 0.0)
    restarts.look([], 10.0)
    assert restarts.retry_after_s(10.0) == 24


def test_without_any_worker_a_start_is_awaited():
    restarts = Restarts(worker_wait_s=10.0)
    restarts.look([], 0.0)
    assert restarts.retry_after_s(0.0) == 5, "workers that live find a new router within seconds"
    assert restarts.retry_after_s(6.0) == 44


def test_requests_wait_longer_for_supervised_workers():
    supervised, _ = known("d0")
    alone, _ = known("d0", is_supervised=False)
    assert supervised.patience_s(["decode", "aggregated"]) == 3 * 34.0
    assert alone.patience_s(["decode", "aggregated"]) == 10.0


def test_workers_that_have_left_are_remembered_while_requests_wait_for_them():
    restarts = Restarts(worker_wait_s=10.0)
    for number in range(3):
        restarts.on_left(worker(f"d{number}"), 4.0 * number)
    assert [each.key.engine_id for each in restarts.absent(11.0)] == ["d1", "d2"]
    restarts.on_joined(worker("d2", is_supervised=False), 11.0)
    assert [each.key.engine_id for each in restarts.absent(11.0)] == ["d1"]
    restarts.on_left(worker("d9"), 100.0)
    assert (len(restarts._left), len(restarts.absent(110.0))) == (1, 0)


def test_nobody_is_waited_for_without_patience():
    restarts = Restarts(worker_wait_s=0.0)
    restarts.on_left(worker("d0"), 1.0)
    assert restarts.absent(1.0) == []
