"""Which workers fit together, and whose room is kept: as found by kinds of workers, and by each pair of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidRequest, KVFerryError, NoWorker, Overloaded
from router.dispatch import policy
from router.dispatch.kept_room import KeptRoom, Need
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.partners import Partners
from router.dispatch.policy import (
    Demand,
    choose_route,
    computing,
    max_model_len,
    mismatch,
    routes,
    starters,
    unpaired,
    usable,
    why_not_ready,
)
from tests.router.dispatch.test_policy import LAYOUT, futures, member


@pytest.mark.parametrize("hosts", [1, 15])
def test_workers_of_two_kinds_are_compared_by_kind(monkeypatch, hosts):
    """However many there are: all pairs of 30 prefill and 30 decode workers would be 900."""
    kinds = [("tcp",), ("shm", "rdma")]
    workers = [
        member(role, f"{role}{number}", transports=kinds[number // 15], host_id=f"host{number % hosts}")
        for role in ("prefill", "decode")
        for number in range(30)
    ]
    for worker in workers[30:]:
        worker.may_serve_alone = True
    compared, real = [], policy._mismatch
    monkeypatch.setattr(policy, "_mismatch", lambda *pair: compared.append(pair) or real(*pair))
    demand = Demand(num_tokens=10)
    only_others = Demand(num_tokens=10, refusing=frozenset(worker.key for worker in [*workers[:15], *workers[45:]]))
    full = Demand(num_tokens=10, refusing=frozenset(worker.key for worker in workers))
    assert choose_route(workers, demand).prefill is workers[0]
    assert usable(workers, demand) == workers
    assert usable(workers, only_others) == []
    assert computing(workers) == workers[:30]
    assert starters(workers, demand) == workers[:30]
    assert (max_model_len(workers), unpaired(workers)) == (100, {})
    assert max_model_len([*workers[:15], *workers[45:]]) == 100, "of decode workers that serve alone"
    assert why_not_ready(workers) is None
    for refused in (full, only_others):
        with pytest.raises(Overloaded):
            choose_route(workers, refused)
    assert len(compared) < 200


@given(
    data=st.data(),
    kinds=st.lists(
        st.tuples(
            st.sampled_from([("tcp",), ("shm",), ("shm", "tcp"), ("rdma", "tcp"), ()]),
            st.sampled_from(["", "h0", "h1"]),
            st.sampled_from([b"v1", b"v2"]),
            st.sampled_from(["p2p", "shared"]),
            st.sampled_from(["auto", "digest"]),
            st.booleans(),
            st.sampled_from([64, 32]),
        ),
        max_size=10,
    ),
)
def test_partners_found_by_kind_are_those_of_each_pair(data, kinds):
    workers = []
    for number, (transports, host_id, weights, connector, kv_verify, has_digests, block_size) in enumerate(kinds):
        layout = msgspec.structs.replace(LAYOUT, block_size=block_size, block_bytes=32 * block_size)
        facts = {"transports": transports, "host_id": host_id, "model_fingerprint": weights, "connector": connector}
        facts |= {"kv_verify": kv_verify, "has_digests": has_digests, "layout": layout}
        workers.append(member(data.draw(st.sampled_from(["prefill", "decode"])), f"w{number}", **facts))
    of_role = {role: [worker for worker in workers if worker.role == role] for role in ("prefill", "decode")}
    partners = {role: Partners(others, mismatch) for role, others in of_role.items()}
    for prefill in of_role["prefill"]:
        expected = [decode for decode in of_role["decode"] if mismatch(prefill, decode) is None]
        assert (list(partners["decode"].of(prefill)), partners["decode"].fit(prefill)) == (expected, bool(expected))
    for decode in of_role["decode"]:
        expected = [prefill for prefill in of_role["prefill"] if mismatch(prefill, decode) is None]
        assert (list(partners["prefill"].of(decode)), partners["prefill"].fit(decode)) == (expected, bool(expected))


@st.composite
def members(draw) -> list[GenerationWorker]:
    """Draw up to seven workers, some full, closed, or without a partner."""
    workers = []
    for number in range(draw(st.integers(1, 7))):
        worker = member(
            draw(st.sampled_from(["prefill", "decode", "aggregated"])),
            f"w{number}",
            load=draw(st.integers(0, 4)),
            is_draining=draw(st.integers(0, 9)) == 0,
            transports=draw(st.sampled_from([("tcp",), ("rdma",)])),
            max_num_choices=draw(st.sampled_from([0, 2, 4])),
            max_model_len=draw(st.sampled_from([50, 100])),
        )
        worker.may_serve_alone = worker.role != "aggregated" and draw(st.booleans())  # one that was a decode worker keeps it
        workers.append(worker)
    return workers


def is_able(worker: GenerationWorker, need: Need, refusing: Sequence[object]) -> bool:
    fits = worker.facts.max_model_len >= need.max_model_len and worker.may_hold(need.num_choices)
    return fits and worker.key not in refusing


@given(data=st.data(), workers=members())
def test_room_is_kept_at_the_workers_of_each_route_that_a_request_can_get(data, workers):
    keys = st.frozensets(st.sampled_from([worker.key for worker in workers]))
    needs = st.builds(Need, st.sampled_from([50, 100]), st.just(b""), st.integers(1, 4))
    kept, expected = KeptRoom(workers), set()
    for need, refusing in data.draw(st.lists(st.tuples(needs, keys), max_size=5)):
        kept.keep(need, refusing)
        able = [route for route in routes(workers) if all(is_able(worker, need, refusing) for worker in route.workers)]
        used = {worker.key: worker for route in able for worker in route.workers}
        expected |= {key for key, worker in used.items() if not worker.has_room(need.num_choices)}
        if data.draw(st.booleans()):
            assert kept.workers() == expected
    assert kept.workers() == expected
    need, refusing, gives_way = data.draw(needs), data.draw(keys), data.draw(st.booleans())
    closed = refusing | expected if gives_way else refusing
    has_room = any(
        all(is_able(worker, need, closed) and worker.has_room(need.num_choices) for worker in route.workers)
        for route in routes(workers)
    )
    assert kept.may_begin(need, refusing, gives_way=gives_way) or not has_room


@given(workers=members(), absent=members(), num_tokens=st.sampled_from([10, 60]), num_choices=st.integers(1, 6))
def test_choices_are_refused_for_good_if_no_route_of_any_worker_holds_them(workers, absent, num_tokens, num_choices):
    def limits(every):
        able = [route for route in routes(every) if all(w.facts.max_model_len >= num_tokens for w in route.workers)]
        return [min(w.facts.max_num_choices or 99 for w in route.workers) for route in able]

    absent = [replace(worker, key=WorkerKey(f"{worker.key.engine_id}b", 1)) for worker in absent]
    now = limits(workers)
    later = [limit for some in futures(workers, absent) for limit in limits(some)]
    error: KVFerryError | None = None
    try:
        choose_route(workers, Demand(num_tokens=num_tokens, num_choices=num_choices), absent)
    except KVFerryError as raised:
        error = raised
    if not now or max(now) >= num_choices:
        assert type(error) is not InvalidRequest  # it may be a subclass: too long
    elif max(later, default=0) >= num_choices:
        assert isinstance(error, NoWorker)
    else:
        assert type(error) is InvalidRequest
        assert str(error).endswith(f"more than {max(now)} choices")


def test_too_many_choices_are_refused_without_a_look_at_each_route(monkeypatch):
    workers = [member(role, f"{role}{number}", max_num_choices=8) for role in ("prefill", "decode") for number in range(30)]
    made, real = [], policy.Route
    monkeypatch.setattr(policy, "Route", lambda *workers: made.append(workers) or real(*workers))
    with pytest.raises(InvalidRequest, match="more than 8 choices"):
        choose_route(workers, Demand(num_tokens=10, num_choices=9))
    assert len(made) < 30
