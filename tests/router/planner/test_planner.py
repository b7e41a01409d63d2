"""The planner's loop by a fake clock: how long reasons last, one switch at a time, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from core.config_router import PlannerSection
from core.wire.messages import Heartbeat
from router.dispatch.route_costs import RouteCosts
from router.dispatch.wait_estimate import WaitEstimates
from router.planner.loads import RoleLoad, RoleLoads
from router.planner.planner import Planner
from tests.router.planner.test_choice import worker

SECTION = PlannerSection(enabled=True, interval_s=1.0, hold_s=3.0, cooldown_s=20.0)


class ScriptedLoads(RoleLoads):
    """Loads with the demands that a test sets."""

    def __init__(self):
        super().__init__(RouteCosts(), WaitEstimates(), 1.0, 0.0)
        self.demanded = {"prefill": 0.1, "decode": 0.1, "aggregated": 0.0}

    def of(self, role, workers, now):
        count = sum(each.role == role and not each.is_closed for each in workers)
        return RoleLoad(num_available=count, demanded=self.demanded[role], wait_s=0.0, inflight_tokens=0)


class Cluster:
    """A planner and workers that heed it and follow its orders, unless a test says otherwise."""

    def __init__(self, section=SECTION):
        self.loads = ScriptedLoads()
        self.planner = Planner(section, self.loads, heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0)
        self.workers = [worker("p0", "prefill"), worker("d0", "decode"), worker("d1", "decode")]
        self.unheeding = set()
        self.now = 0.0
        self.number = 0

    def tick(self, *, is_settling=False, beats=True):
        """Let a second pass; return the orders."""
        self.now += 1.0
        self.number += 1
        for each in self.workers if beats else ():
            heartbeat = Heartbeat(
                engine_id=each.key.engine_id,
                incarnation=1,
                number=self.number,
                num_switches=each.facts.num_switches,
                is_planner=each.key.engine_id not in self.unheeding,
            )
            each.note_load(heartbeat, self.now)
        return self.planner.on_timer(self.workers, self.now, is_settling=is_settling)

    def run(self, seconds):
        """Return all orders of a period as (seconds from its start, order)."""
        return [(second, order) for second in range(1, seconds + 1) for order in self.tick()]

    def follow(self, order):
        """Let the worker do as it is told."""
        facts = order.worker.facts
        order.worker.facts = msgspec.structs.replace(facts, role=order.message.role, num_switches=facts.num_switches + 1)
        self.planner.on_switched(order.worker)


@pytest.fixture
def cluster():
    found = Cluster()
    found.loads.demanded["prefill"] = 1.5
    return found


def test_a_reason_must_last(cluster):
    assert cluster.run(2) == []
    cluster.loads.demanded["prefill"] = 0.1
    assert cluster.run(1) == []
    cluster.loads.demanded["prefill"] = 1.5
    ((second, order),) = cluster.run(4)
    assert second == 4
    assert order.message.role == "prefill"
    assert order.message.incarnation == 1
    assert order.message.heartbeat == cluster.number


def test_another_switch_waits_for_the_first_and_for_the_pause_after_it(cluster):
    cluster.workers += [worker("d2", "decode"), worker("d3", "decode")]
    cluster.loads.demanded["prefill"] = 9.0
    ((_, order),) = cluster.run(4)
    assert cluster.tick() == []
    assert "under way" in cluster.planner.why_idle
    cluster.follow(order)
    assert cluster.planner.last.outcome == "done"
    assert cluster.run(18) == []
    assert "less than 20 s ago" in cluster.planner.why_idle
    assert len(cluster.run(2)) == 1


def test_a_lent_worker_returns_after_the_load_and_the_pause(cluster):
    ((_, order),) = cluster.run(4)
    cluster.follow(order)
    cluster.loads.demanded["prefill"] = 0.3
    ((second, back),) = cluster.run(25)
    assert second == 20
    assert (back.worker, back.message.role) == (order.worker, "decode")
    cluster.follow(back)
    assert cluster.run(60) == []


def test_a_load_around_the_threshold_moves_a_worker_once(cluster):
    """Between the thresholds nothing happens, in either direction."""
    ((_, order),) = cluster.run(4)
    cluster.follow(order)
    for demanded in (0.9, 1.1) * 30:
        cluster.loads.demanded["prefill"] = demanded
        assert cluster.tick() == []


def test_a_crash_overtakes_a_switch(cluster):
    ((_, order),) = cluster.run(4)
    cluster.planner.on_left(order.worker.key)
    assert "lost" in cluster.planner.last.outcome


def test_another_switch_overtakes_it(cluster):
    ((_, order),) = cluster.run(4)
    order.worker.facts = msgspec.structs.replace(order.worker.facts, role="aggregated", num_switches=1)
    cluster.planner.on_switched(order.worker)
    assert cluster.planner.last.outcome == "overtaken: the worker has become aggregated"


def test_a_refusal_is_shown_and_ends_the_switch(cluster):
    ((_, order),) = cluster.run(4)
    cluster.planner.on_refused(order.worker.key, "it is leaving")
    assert cluster.planner.last.outcome == "refused: it is leaving"


def test_a_switch_without_an_answer_is_given_up(cluster):
    cluster.run(4)
    cluster.run(6)
    assert cluster.planner.last.outcome == "unanswered"


def test_workers_that_heed_another_router_are_left_alone(cluster):
    cluster.unheeding = {"p0", "d0", "d1"}
    assert cluster.run(10) == []
    assert "no worker that can switch" in cluster.planner.why_idle
    cluster.unheeding = {"d1"}  # of two decode workers one is another planner's: the other one must stay
    assert cluster.run(10) == []


def test_a_worker_that_was_not_heard_lately_is_left_alone(cluster):
    cluster.run(1)
    assert all(cluster.tick(beats=False) == [] for _ in range(10))


def test_a_worker_whose_registration_is_out_of_date_is_left_alone(cluster):
    cluster.run(2)
    for each in cluster.workers:
        each.note_load(msgspec.structs.replace(each.heartbeat, num_switches=1), cluster.now)
    assert cluster.planner.owned(cluster.workers, cluster.now) == []


def test_nothing_is_decided_shortly_after_a_pause_of_the_router(cluster):
    assert all(cluster.tick(is_settling=True) == [] for _ in range(10))
    ((second, _),) = cluster.run(4)
    assert second == 4


def test_without_the_setting_nothing_happens():
    cluster = Cluster(msgspec.structs.replace(SECTION, enabled=False))
    cluster.loads.demanded["prefill"] = 5.0
    assert cluster.run(20) == []
    assert cluster.planner.last is None


def test_a_load_without_workers_is_no_division_by_zero():
    empty = RoleLoad(num_available=0, demanded=0.0, wait_s=0.0, inflight_tokens=0)
    assert empty.load == 0.0
    assert replace(empty, demanded=0.1).load == float("inf")
