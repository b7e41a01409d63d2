"""Router and worker together: reports from the engine's events to the index, and what the index does to placements."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.kv.content_feed import ContentFeed
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.kv.hashing import BlockHasher
from core.metrics import WorkerMetrics
from core.wire.contents import ContentReport
from core.wire.messages import Abort, Generate, Heartbeat, PrefillDone, Registered
from core.wire.sampling import SamplingParams
from core.worker.actions import AdmissionLimits, EngineLoad, Send
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from prefill.role import PrefillHandler
from router.contents.keys import prompt_chain
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.members import WorkerKey
from tests.router.dispatch.test_membership import registration

PROMPT = tuple(range(1000))
NUM_BLOCKS = 15  # of 64 tokens, the last token apart
HASHES = tuple(prompt_chain(BlockHasher(b"w"), PROMPT)[3::4])
LIMITS = RouterLimits(heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=60.0, max_requests=100)


class Worker:
    """A prefill worker's protocol, with links to routers that are called in the same thread."""

    def __init__(self, engine_id="p0", incarnation=1):
        self.key = WorkerKey(engine_id, incarnation)
        self.registration = registration(engine_id, incarnation, num_blocks=100, max_model_len=2000)
        self.feed = ContentFeed(engine_id, incarnation)
        self.state = WorkerState(
            self.registration,
            PrefillHandler(EngineFacts(max_model_len=2000, eos_token_ids=frozenset())),
            AdmissionLimits(max_num_seqs=4, max_waiting_requests=4, drain_timeout_s=1.0),
            EngineLoad,
            WorkerMetrics(CollectorRegistry(), {}),
            self.feed,
        )
        self.routers = {}
        self.loses_reports = False

    def join(self, router, link="a", now=0.0):
        self.routers[link] = router
        self.deliver(self.state.connect(link, now), now)

    def deliver(self, actions, now):
        for action in actions:
            if isinstance(action, Send) and not (self.loses_reports and isinstance(action.message, ContentReport)):
                for answer in self.routers[action.link].on_message(self.key.engine_id.encode(), action.message, now):
                    if isinstance(answer, Transmit):
                        self.deliver(self.state.on_router_message(action.link, answer.message, now), now)

    def run(self, until, since=0.0):
        """Let the timers fire until then."""
        now = since
        while (due := self.state.next_timer(now)) is not None and due <= until:
            now = max(now, due)
            self.deliver(self.state.on_timer(now), now)

    def store(self, hashes=HASHES):
        self.feed.publish([BlockStored(tuple(hashes), None, 64, 0)])


def router(router_id="R"):
    return RouterCore("tiny", router_id, LIMITS)


def hit_of(core, worker, prompt=PROMPT):
    member = core.membership.get(worker.key)
    return core.route_costs.offers([member], prompt, (), 0.0)[worker.key].hit_tokens


def send(core, worker, request_id="r", prompt=PROMPT, now=0.0):
    message = Generate(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=5), handoff=True)
    core.route_costs.on_sent(core.membership.get(worker.key), message, now)


def finish(core, request_id="r", num_cached_tokens=0, now=0.5):
    core.route_costs.on_prefill_done(
        PrefillDone(request_id=request_id, choices=(), prefill_ms=10.0, num_cached_tokens=num_cached_tokens), now
    )


@pytest.fixture
def core():
    return router()


@pytest.fixture
def worker(core):
    worker = Worker()
    worker.join(core)
    return worker


def test_a_worker_s_blocks_are_hits_before_the_router_has_placed_anything(core):
    worker = Worker()
    worker.store()
    worker.join(core)
    assert hit_of(core, worker) == NUM_BLOCKS * 64


def test_evictions_are_followed(core, worker):
    worker.store()
    worker.run(until=1.0)
    worker.feed.publish([BlockRemoved(HASHES[5:], 0)])
    worker.run(until=2.0, since=1.0)
    assert hit_of(core, worker) == 5 * 64
    worker.feed.publish([AllBlocksCleared()])
    worker.run(until=3.0, since=2.0)
    assert hit_of(core, worker) == 0


def test_a_prompt_counts_from_its_placement_until_the_worker_has_reported(core, worker):
    send(core, worker)
    assert hit_of(core, worker) == NUM_BLOCKS * 64
    finish(core)
    assert hit_of(core, worker) == NUM_BLOCKS * 64
    worker.store(HASHES[:4])  # the others are evicted already
    worker.run(until=1.0)
    assert hit_of(core, worker) == 4 * 64


def test_a_prompt_that_failed_is_no_hit(core, worker):
    send(core, worker)
    core.route_costs.drop("r", 0.1)
    assert hit_of(core, worker) == 0


def test_a_restarted_router_knows_the_contents_with_the_registration(core, worker):
    worker.store()
    worker.run(until=1.0)
    worker.routers["a"] = restarted = RouterCore("tiny", "R2", LIMITS)
    worker.run(until=3.0, since=1.0)
    assert hit_of(restarted, worker) == NUM_BLOCKS * 64


def test_two_routers_know_the_same(core, worker):
    other = router("R2")
    worker.join(other, "b")
    send(core, worker)
    finish(core)
    worker.store()
    worker.run(until=1.0)
    assert hit_of(core, worker) == hit_of(other, worker) == NUM_BLOCKS * 64


def test_a_lost_report_costs_hits_until_the_next_heartbeat(core, worker):
    worker.store()
    worker.run(until=1.0)
    worker.loses_reports = True
    worker.feed.publish([BlockRemoved(HASHES[5:], 0)])
    worker.run(until=1.5, since=1.0)
    worker.loses_reports = False
    worker.run(until=2.0, since=1.5)
    assert hit_of(core, worker) == 5 * 64


def test_a_worker_that_lies_loses_its_contents_until_its_snapshot(core, worker):
    worker.store()
    worker.run(until=1.0)
    contents = core.route_costs.contents.reports
    for number in range(4):
        send(core, worker, str(number), now=1.0)
        finish(core, str(number), now=1.1)
    assert not contents.is_known(worker.key)
    assert contents.num_unknown_workers == 1
    worker.run(until=2.0, since=1.0)
    assert contents.is_known(worker.key)


def test_a_worker_that_goes_on_lying_gets_no_credit(core, worker):
    worker.store()
    for second in range(1, 5):
        worker.run(until=float(second), since=second - 1.0)
        for number in range(4):
            send(core, worker, f"{second}.{number}", now=float(second))
            finish(core, f"{second}.{number}", now=second + 0.1)
    assert core.route_costs.contents.reports.is_known(worker.key)
    assert hit_of(core, worker) == 0


def test_siblings_that_were_computed_together_are_no_lie_of_the_worker(core, worker):
    for number in range(6):
        send(core, worker, str(number))
    for number in range(6):
        finish(core, str(number))
    assert not core.route_costs._workers[worker.key].accuracy.is_wrong


def test_a_report_in_the_name_of_another_worker_is_ignored(core, worker):
    other = Worker("p1")
    other.join(core)
    report = ContentReport(engine_id="p1", incarnation=1, number=1, stored=b"".join(value[:8] for value in HASHES))
    core.on_message(b"p0", report, 0.0)
    assert hit_of(core, other) == 0


def test_a_worker_without_reports_is_known_by_its_placements(core):
    core.on_message(b"old", registration("old", num_blocks=100), 0.0)
    old = Worker("old")
    send(core, old)
    finish(core)
    assert hit_of(core, old) == NUM_BLOCKS * 64


def test_a_connection_made_again_leads_to_a_snapshot(core, worker):
    worker.store()
    worker.run(until=1.0)
    core.membership.get(worker.key).num_inflight = 1
    core.on_message(b"new connection", msgspec.structs.replace(worker.registration), 1.0)
    assert hit_of(core, worker) == 0
    worker.run(until=2.0, since=1.0)
    assert hit_of(core, worker) == NUM_BLOCKS * 64


@pytest.mark.parametrize("fields", [{"model_fingerprint": b""}, {"model_fingerprint": bytes(65)}])
def test_a_model_that_hashes_nothing_has_no_hits(core, fields):
    core.on_message(b"p0", registration(num_blocks=100, **fields), 0.0)
    worker = Worker()
    send(core, worker)
    assert hit_of(core, worker) == 0


def test_a_router_that_routes_by_load_asks_for_no_reports():
    by_load = RouterCore("tiny", "R", replace(LIMITS, routing="least_loaded"))
    (answer,) = [action for action in by_load.on_message(b"p0", registration(), 0.0) if isinstance(action, Transmit)]
    assert answer.message == Registered(router_id="R", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000)


def test_the_work_of_another_router_is_waited_for(core, worker):
    other = router("R2")
    worker.join(other, "b")
    message = Generate(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=5), handoff=True)
    worker.deliver(worker.state.on_router_message("b", message, 0.5), 0.5)
    worker.run(until=1.0, since=0.5)

    def wait_ms(which, now):
        member = which.membership.get(worker.key)
        return which.route_costs.offers([member], PROMPT, (), now)[worker.key].wait_ms

    assert wait_ms(core, 1.0) > wait_ms(core, 1.05) > 0
    assert wait_ms(other, 1.0) == 0  # it knows its own prompts itself
    worker.deliver(worker.state.on_router_message("b", Abort(request_ids=("r",)), 1.0), 1.0)
    worker.run(until=2.0, since=1.0)
    assert wait_ms(core, 1.0) == 0


def test_each_router_learns_its_place_among_the_routers_of_a_worker(core, worker):
    """By heartbeats, in the order of the routers' ids; a router that is gone does not count."""
    other = RouterCore("tiny", "A", LIMITS)
    worker.join(other, "b")
    worker.run(until=1.0)
    preferences = [each.route_costs.preferences for each in (core, other)]
    assert [each.disliked for each in preferences] == [{worker.key}, frozenset()]
    worker.deliver(worker.state.disconnect("b", 1.0), 1.5)
    worker.run(until=2.0, since=1.5)
    assert not preferences[0].disliked


def test_a_prompt_of_another_router_is_told_before_the_next_heartbeat_is_due(core, worker):
    """A quarter of the interval after the one before at the earliest; then at the usual pace."""
    worker.join(RouterCore("tiny", "A", LIMITS), "b")
    worker.run(until=2.0)
    told = []
    on_message = core.on_message
    core.on_message = lambda peer, message, now: (told.append((now, message)), on_message(peer, message, now))[1]

    def send_by_the_other(request_id, now):
        message = Generate(request_id=request_id, prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=5), handoff=True)
        worker.deliver(worker.state.on_router_message("b", message, now), now)
        worker.run(until=now + 0.001, since=now)

    def heartbeats():
        return [
            (now, message.num_queued_prompts_of_others, message.num_queued_tokens_of_others)
            for now, message in told
            if isinstance(message, Heartbeat)
        ]

    send_by_the_other("r1", 2.1)
    assert heartbeats() == []
    worker.run(until=2.6, since=2.2)
    assert heartbeats() == [(pytest.approx(2.25), 1, 1000)]
    send_by_the_other("r2", 2.9)
    assert heartbeats()[1:] == [(2.9, 2, 2000)]
    worker.run(until=3.9, since=3.0)
    assert heartbeats()[2:] == [(3.0, 2, 2000)]
