"""Several routers prefer different workers, and a single one none."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import router.dispatch.preferences as module
from core.wire.messages import Heartbeat
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.preferences import RouterPreferences
from tests.router.dispatch.test_membership import registration


def worker(name, role="prefill", incarnation=1):
    facts = msgspec.structs.replace(registration(name, incarnation), role=role)
    return GenerationWorker(key=WorkerKey(name, incarnation), peer=b"", last_seen=0.0, facts=facts)


def heartbeat(of, rank=0, num_others=0):
    key = of.key
    return Heartbeat(engine_id=key.engine_id, incarnation=key.incarnation, router_rank=rank, num_other_routers=num_others)


def preferences(workers, rank=0, num_routers=1):
    found = RouterPreferences()
    for each in workers:
        found.join(each)
        found.on_heartbeat(heartbeat(each, rank, num_routers - 1))
    return found


def names(found):
    return {key.engine_id for key in found.disliked}


@pytest.mark.slow
@given(num_routers=st.integers(2, 5), num_prefill=st.integers(1, 9), num_decode=st.integers(0, 9), seed=st.randoms())
def test_each_worker_is_one_router_s_and_roles_are_shared_out_evenly(num_routers, num_prefill, num_decode, seed):
    workers = [worker(f"w{n}", "prefill" if n < num_prefill else "decode") for n in range(num_prefill + num_decode)]
    routers = []
    for rank in range(num_routers):
        seed.shuffle(workers)  # they join in another order at every router
        routers.append(preferences(workers, rank, num_routers))
    assert all(sum(each.key not in router.disliked for router in routers) == 1 for each in workers)
    for role in ("prefill", "decode"):
        counts = [sum(each.key not in router.disliked for each in workers if each.role == role) for router in routers]
        assert max(counts) - min(counts) <= 1


def test_a_single_router_and_one_of_an_earlier_release_like_all_workers():
    assert not preferences([worker("p0"), worker("p1")]).disliked


def test_preferences_follow_the_membership_and_the_roles():
    workers = [worker("p0"), worker("p1"), worker("p2")]
    found = preferences(workers, rank=0, num_routers=2)
    assert names(found) == {"p1"}
    found.forget(workers[0].key)
    assert names(found) == {"p2"}
    workers[1].facts = msgspec.structs.replace(workers[1].facts, role="decode")
    found.join(workers[1])
    assert not found.disliked


def test_a_restarted_worker_keeps_its_place():
    found = preferences([worker("p0"), worker("p1")], rank=1, num_routers=2)
    found.forget(WorkerKey("p0", 1))
    again = worker("p0", incarnation=9)
    found.join(again)
    assert not found.disliked, "it has not said yet how many routers it serves"
    found.on_heartbeat(heartbeat(again, 1, 1))
    assert found.disliked == {WorkerKey("p0", 9)}


def test_each_worker_s_own_word_counts(monkeypatch):
    """During a rolling upgrade workers of the earlier release say at each heartbeat that there is one router."""
    old, new = [worker("p0"), worker("p2")], [worker("p1"), worker("p3")]
    found = RouterPreferences()
    for each in (*old, *new):
        found.join(each)
    assert not found.disliked
    monkeypatch.setattr(module, "_places_of", None)  # nothing is sorted again
    for _ in range(3):
        for each in new:
            found.on_heartbeat(heartbeat(each, rank=0, num_others=1))
        for each in old:
            found.on_heartbeat(heartbeat(each))
        assert names(found) == {"p1", "p3"}
    found.on_heartbeat(heartbeat(new[0], rank=1, num_others=1))
    assert names(found) == {"p3"}
