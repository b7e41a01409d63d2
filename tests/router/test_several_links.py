"""A worker whose links lead to one router by several addresses: the router's core and the worker's state, linked by queues."""

from __future__ import annotations

from collections import deque

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.kv.content_feed import ContentFeed
from core.kv.events import BlockStored
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.wire.contents import ContentReport
from core.wire.messages import Generate, Refused
from core.wire.sampling import SamplingParams
from core.worker.actions import AdmissionLimits, EngineLoad, Send, SubmitAbort
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from router.dispatch.core import RouterCore, RouterLimits, Transmit
from router.dispatch.members import WorkerKey
from router.dispatch.membership import Left
from router.dispatch.types import Submission
from tests.support.registrations import REGISTRATION

LINKS = ("v4", "v6", "other", "fourth")
KEY = WorkerKey("w0", 7)


class Linked:
    """One worker and one router; each link is a connection, and messages of a link keep their order."""

    def __init__(self, num_links: int) -> None:
        self.now = 0.0
        limits = RouterLimits(
            heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=900.0, max_requests=9, routing="predicted"
        )
        self.router = RouterCore("m", "R", limits)
        self.feed = ContentFeed("w0", 7)
        self.num_keys = self.num_refused = 0
        self.aborted: list[str] = []
        self.left: list[Left] = []
        self.num_generates = 0
        self.connections = {link: link.encode() for link in LINKS[:num_links]}
        self.to_router: deque[tuple[bytes, object]] = deque()
        self.to_worker: deque[tuple[bytes, object]] = deque()
        self.worker = WorkerState(
            msgspec.structs.replace(REGISTRATION, role="aggregated", num_blocks=64),
            DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset())),
            AdmissionLimits(max_num_seqs=8, max_waiting_requests=0, drain_timeout_s=5.0),
            EngineLoad,
            WorkerMetrics(CollectorRegistry(), {}),
            self.feed,
        )
        for link in self.connections:
            self.of_worker(self.worker.connect(link, 0.0))
        self.deliver()

    def reconnect(self, link: str) -> None:
        """A connection breaks, and is made again without the worker's knowledge."""
        self.connections[link] += b"+"

    def of_worker(self, actions) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.to_router.append((self.connections[action.link], action.message))
            elif isinstance(action, SubmitAbort):
                self.aborted += action.engine_request_ids

    def of_router(self, actions) -> None:
        self.left += [action for action in actions if isinstance(action, Left)]
        self.to_worker += [(action.peer, action.message) for action in actions if isinstance(action, Transmit)]

    def deliver(self) -> None:
        while self.to_router or self.to_worker:
            while self.to_router:
                peer, message = self.to_router.popleft()
                self.num_keys += len(message.stored) // 8 if isinstance(message, ContentReport) else 0
                self.of_router(self.router.on_message(peer, message, self.now))
            while self.to_worker:
                peer, message = self.to_worker.popleft()
                link = next((link for link, connection in self.connections.items() if connection == peer), None)
                self.num_generates += isinstance(message, Generate)
                self.num_refused += isinstance(message, Refused)
                if link is not None:
                    self.of_worker(self.worker.on_router_message(link, message, self.now))

    def submit(self, request_id: str) -> None:
        wanted = Submission(request_id=request_id, prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=40))
        self.of_router(self.router.submit(wanted, self.now))
        self.deliver()

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.of_worker(self.worker.on_timer(self.now))
            self.of_router(self.router.on_timer(self.now))
            self.deliver()

    def step(self, request_id: str) -> None:
        self.of_worker(self.worker.on_outputs([EngineCoreOutput(f"{request_id}/0", [7])], self.now))
        self.deliver()


@pytest.mark.parametrize("num_links", [2, 3, 4])
def test_requests_run_on_and_contents_are_known(num_links):
    linked = Linked(num_links)
    assert linked.num_refused == 0
    linked.submit("r")
    for number in range(10):
        linked.feed.publish([BlockStored((bytes([number]) * 32,), None, 16, 0)])
        linked.wait(1)
        linked.step("r")
        assert linked.router.route_costs.contents.reports.is_known(KEY)
    assert (linked.left, linked.num_generates) == ([], 1)
    assert linked.num_keys == 10


def test_a_spare_link_that_breaks_costs_nothing():
    linked = Linked(2)
    linked.submit("r")
    linked.step("r")
    linked.reconnect("v6")
    linked.wait(10)
    assert (linked.left, linked.num_generates) == ([], 1)
    linked.of_router(linked.router.abort("r", "client disconnected", linked.now))
    linked.deliver()
    assert linked.aborted == ["r/0"]


def test_a_link_that_appears_later_costs_one_retry_at_most():
    linked = Linked(1)
    linked.submit("r")
    linked.step("r")
    linked.connections["v6"] = b"v6"
    linked.of_worker(linked.worker.connect("v6", linked.now))
    linked.deliver()
    linked.wait(10)
    assert (len(linked.left), linked.num_generates) == (1, 2)
    assert all(left.is_back for left in linked.left)


def test_the_spare_link_takes_over_from_a_lost_one():
    linked = Linked(2)
    linked.submit("r")
    linked.step("r")
    linked.of_worker(linked.worker.disconnect("v4", linked.now))
    del linked.connections["v4"]
    linked.wait(3)
    assert linked.worker.num_registered_routers == 1
    assert linked.worker.num_requests == 1
    assert linked.num_generates == 2


def test_what_was_under_way_on_a_lost_link_is_sent_again():
    linked = Linked(2)
    wanted = Submission(request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingParams(seed=1, max_tokens=40))
    linked.of_router(linked.router.submit(wanted, linked.now))
    linked.of_worker(linked.worker.disconnect("v4", linked.now))
    del linked.connections["v4"]
    linked.wait(3)
    assert linked.worker.num_requests == 1
    assert [left.is_back for left in linked.left] == [True]


def test_the_last_frame_lost_with_its_link_costs_a_retry():
    linked = Linked(2)
    linked.submit("r")
    linked.worker.on_outputs([EngineCoreOutput("r/0", [7], finish_reason="stop")], linked.now)
    linked.of_worker(linked.worker.disconnect("v4", linked.now))
    del linked.connections["v4"]
    linked.wait(3)
    assert (linked.worker.num_requests, linked.num_generates) == (1, 2)


def test_a_spare_link_that_is_made_again_and_again_costs_nothing():
    linked = Linked(2)
    linked.submit("r")
    for _ in range(6):
        linked.reconnect("v6")
        linked.wait(12)
        linked.step("r")
    assert (linked.left, linked.num_generates, linked.num_refused) == ([], 1, 0)
    assert linked.router.membership.workers[0].peer == b"v4"
