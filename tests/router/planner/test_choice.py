"""Which switch the load of the roles calls for, and the workers that must stay."""

from __future__ import annotations

import pytest

from core.wire.kv import KVLayoutInfo
from core.wire.messages import Register
from router.dispatch.members import GenerationWorker, WorkerKey
from router.planner.choice import Limits, Stay, Switch, choose
from router.planner.loads import RoleLoad

LIMITS = Limits(low=0.7, least={"prefill": 1, "decode": 1})


def worker(name, role, home=None, dtype="float32", num_inflight=0):
    layout = KVLayoutInfo(dtype=dtype, order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024)
    facts = Register(
        engine_id=name,
        incarnation=1,
        role=role,
        model="m",
        model_fingerprint=b"f",
        layout=layout,
        max_model_len=64,
        max_num_seqs=4,
        num_blocks=8,
        can_switch_role=True,
        home_role=home or role,
    )
    return GenerationWorker(key=WorkerKey(name, 1), peer=b"", last_seen=0.0, facts=facts, num_inflight=num_inflight)


def cluster(roles):
    """Return workers p0, d0, d1 … of roles such as "pdd"."""
    names = {"p": "prefill", "d": "decode", "a": "aggregated"}
    return [worker(f"{role}{number}", names[role]) for number, role in enumerate(roles)]


def loads(workers, prefill, decode):
    """Return the loads of roles whose demand is given in workers."""
    counts = {role: sum(each.role == role for each in workers) for role in ("prefill", "decode", "aggregated")}
    demands = {"prefill": prefill, "decode": decode, "aggregated": 0.0}
    return {
        role: RoleLoad(num_available=counts[role], demanded=demands[role], wait_s=0.0, inflight_tokens=0) for role in counts
    }


def choice(workers, prefill, decode, fixed=(), limits=LIMITS):
    return choose(loads([*workers, *fixed], prefill, decode), workers, list(fixed), limits)


def test_a_role_in_need_gets_a_worker_that_the_other_can_spare():
    found = choice(cluster("pdd"), prefill=1.2, decode=0.5)
    assert isinstance(found, Switch)
    assert (found.worker.role, found.role) == ("decode", "prefill")
    assert "prefill needs 1.20 of 1 workers" in found.reason


def test_the_least_loaded_worker_is_given():
    workers = [worker("p0", "prefill"), worker("d0", "decode", num_inflight=3), worker("d1", "decode", num_inflight=1)]
    found = choice(workers, prefill=1.2, decode=0.5)
    assert isinstance(found, Switch)
    assert found.worker.key.engine_id == "d1"


def test_a_worker_returns_to_its_own_role_before_another_is_taken():
    workers = [worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode", home="prefill", num_inflight=3)]
    found = choice(workers, prefill=1.2, decode=0.5)
    assert isinstance(found, Switch)
    assert found.worker.key.engine_id == "d1"


@pytest.mark.parametrize(
    ("roles", "prefill", "decode", "why"),
    [
        ("pd", 5.0, 0.1, "decode can spare none"),  # the last one
        ("pdd", 1.2, 0.8, "decode can spare none"),  # the other one would be too loaded
        ("pdd", 1.2, 2.1, "both roles need more"),
        ("pdd", 0.9, 0.1, "prefill needs 0.90 of 1 workers"),  # between the two thresholds
    ],
)
def test_nothing_changes(roles, prefill, decode, why):
    found = choice(cluster(roles), prefill, decode)
    assert isinstance(found, Stay)
    assert why in found.reason


def test_a_lent_worker_returns_once_it_can_be_spared():
    workers = [worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "prefill", home="decode")]
    assert isinstance(choice(workers, prefill=0.8, decode=0.1), Stay)
    found = choice(workers, prefill=0.6, decode=0.1)
    assert isinstance(found, Switch)
    assert (found.worker.key.engine_id, found.role) == ("d1", "decode")


def test_a_role_without_workers_gets_one_though_nothing_waits_for_it():
    """As after a command that has taken the last one; decode workers compute the prompts alone."""
    found = choice(cluster("dd"), prefill=0.0, decode=0.3)
    assert isinstance(found, Switch)
    assert found.role == "prefill"


@pytest.mark.parametrize(
    ("roles", "prefill", "decode", "role"),
    [("ddd", 0.0, 1.8, "prefill"), ("ddd", 0.4, 3.2, "prefill"), ("ppp", 2.0, 0.0, "decode"), ("ppp", 3.1, 0.2, "decode")],
)
def test_a_role_below_its_least_number_gets_a_worker_however_loaded_the_others_are(roles, prefill, decode, role):
    """As after a crash of its last worker: without one nothing is served, or only by decode workers alone."""
    workers = cluster(roles)
    found = choice(workers, prefill, decode)
    assert isinstance(found, Switch)
    assert found.role == role
    restored = [worker(each.key.engine_id, role if each is found.worker else each.role) for each in workers]
    assert isinstance(choice(restored, prefill, decode), Stay)


def test_no_role_gets_a_worker_from_one_that_has_only_its_least_number():
    limits = Limits(low=0.7, least={"prefill": 1, "decode": 2})
    found = choice(cluster("dd"), prefill=1.0, decode=0.1, limits=limits)
    assert isinstance(found, Stay)
    assert "decode can spare none: it has its least number" in found.reason
    assert isinstance(choice(cluster("d"), prefill=0.0, decode=0.1, limits=limits), Stay)  # both have too few


def test_only_workers_that_heed_the_planner_count_for_the_floor():
    """Three decode workers take requests, but two of them may be switched by another router at any time."""
    workers = cluster("pd")
    seen = [*workers, worker("d8", "decode"), worker("d9", "decode")]
    found = choose(loads(seen, 1.2, 0.1), workers, [], LIMITS)
    assert isinstance(found, Stay)
    assert "leaving too few behind" in found.reason


def test_a_worker_that_nobody_can_switch_counts_for_the_floor():
    found = choice(cluster("pd"), prefill=1.2, decode=0.1, fixed=[worker("d9", "decode")])
    assert isinstance(found, Switch)


def test_settings_can_demand_more_workers_of_a_role():
    assert isinstance(choice(cluster("pdd"), 1.2, 0.1, limits=Limits(low=0.7, least={"prefill": 1, "decode": 2})), Stay)


def test_no_worker_is_left_without_a_partner_that_can_read():
    """Two layouts, in the midst of an upgrade: each has one decode worker, and neither may go."""
    old = [worker("p0", "prefill"), worker("d0", "decode")]
    new = [worker("p1", "prefill", dtype="bfloat16"), worker("d1", "decode", dtype="bfloat16")]
    assert isinstance(choice([*old, *new], prefill=2.5, decode=0.1), Stay)
    found = choice([*old, *new, worker("d2", "decode", dtype="bfloat16", num_inflight=9)], prefill=2.5, decode=0.1)
    assert isinstance(found, Switch)
    assert found.worker.key.engine_id in {"d1", "d2"}
