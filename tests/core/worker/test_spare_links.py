"""Several links of a worker that lead to one router: one is in use, the others are spare."""

from __future__ import annotations

import math

import msgspec
import pytest

from core.request import EngineCoreOutput
from core.wire.contents import ContentReport
from core.wire.messages import Abort, ErrorInfo, Goodbye, Heartbeat, Refused, Registered, RequestFailed, Tokens
from core.worker.actions import SubmitAbort
from core.worker.router_membership import REGISTER_INTERVAL_S
from tests.core.worker.conftest import Harness, ended_unanswered, sent
from tests.core.worker.test_content_reports import Reporting
from tests.support.registrations import REGISTRATION

R = Registered(router_id="R", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000)
REBORN = Registered(router_id="reborn", heartbeat_interval_ms=1000, heartbeat_timeout_ms=5000)
UNKNOWN = Refused(error=ErrorInfo(code="not_registered", message="unknown worker"))


def took_over(number):
    return msgspec.structs.replace(REGISTRATION, takeover=number)


@pytest.fixture
def worker():
    """Return a worker whose links a and b lead to one router; both have registered at once, and a was answered first."""
    harness = Harness()
    for link in ("a", "b"):
        harness.state.connect(link, 0.0)
    for link in ("a", "b"):
        harness.state.on_router_message(link, R, 0.0)
    return harness


def test_the_second_link_to_a_router_is_spare(worker, caplog):
    assert worker.state.num_registered_routers == 1
    actions = []
    for now in range(1, 9):
        worker.state.on_router_message("a", R, now)
        actions += worker.state.on_timer(now)
    assert {type(message) for message in sent(actions, "a")} == {Heartbeat}
    assert sent(actions, "b") == []
    assert not math.isinf(worker.state.next_timer(9.0))


def test_the_router_hears_which_link_is_in_use(worker):
    """It takes the connection that has registered last for the newest one."""
    assert sent(worker.state.on_router_message("b", R, 0.1), "a") == [REGISTRATION]
    worker.state.start_drain(0.2)
    assert sent(worker.state.on_router_message("b", R, 0.3)) == []


def test_a_spare_link_is_logged_once(caplog):
    caplog.set_level("INFO")
    harness = Harness()
    for link in ("a", "b"):
        harness.state.connect(link, 0.0)
        for _ in range(3):
            harness.state.on_router_message(link, R, 0.0)
    assert caplog.text.count("event=spare_router_link") == 1
    assert "router=b in_use=a router_id=R" in caplog.text


def test_what_comes_by_a_spare_link_is_of_the_link_in_use(worker):
    worker.generate("r", "b")
    assert worker.state.on_router_message("a", Abort(request_ids=("r",), reason="stop"), 0.1) == [SubmitAbort(["r/0"])]
    worker.generate("s", "a")
    assert worker.state.on_router_message("b", Abort(request_ids=("s",), reason="stop"), 0.1) == [SubmitAbort(["s/0"])]


def test_requests_move_to_the_link_in_use(worker):
    worker.state.connect("c", 1.0)
    worker.generate("r", "c", 1.0)  # before the answer to its registration
    worker.state.on_router_message("c", R, 1.1)
    assert worker.state.serving.requests.of_link("a") == ["r"]
    assert worker.state.disconnect("c", 1.0) == []
    assert worker.state.num_requests == 1


def test_a_spare_link_s_loss_costs_nothing(worker):
    worker.generate("r", "a")
    assert worker.state.disconnect("b", 1.0) == []
    assert worker.state.num_requests == worker.state.num_registered_routers == 1


def test_a_spare_link_is_used_when_the_name_service_drops_the_other(worker):
    worker.generate("r", "a")
    register, failed = sent(worker.state.disconnect("a", 1.0), "b")
    assert register == took_over(1)
    assert (failed.request_id, failed.error.code, failed.error.retryable) == ("r", "router_silent", True)
    assert [type(message) for message in sent(worker.state.on_timer(worker.state.next_timer(1.0)), "b")] == [Heartbeat]
    worker.state.on_router_message("b", R, 1.1)
    assert worker.state.num_registered_routers == 1
    assert [type(message) for message in sent(worker.state.on_timer(2.2), "b")] == [Heartbeat]


def test_a_spare_link_is_used_when_the_other_is_silent(worker):
    worker.generate("r", "a")
    actions = [action for now in range(1, 6) for action in worker.state.on_timer(now)]
    register, failed, heartbeat = sent(actions, "b")
    assert (type(failed), failed.request_id) == (RequestFailed, "r")
    assert (register, type(heartbeat)) == (took_over(1), Heartbeat)
    assert not [message for message in sent(actions, "a") if isinstance(message, RequestFailed)]
    worker.state.on_router_message("b", R, 5.1)
    worker.state.on_router_message("a", R, 5.2)  # the first link is back: now it is the spare one
    assert [type(message) for message in sent(worker.state.on_timer(6.5))] == [Heartbeat]
    assert sent(worker.state.on_timer(7.5), "a") == []


def test_a_router_that_forgot_the_worker_hears_of_both_links_at_once(worker):
    """A registration over a second link costs the requests that came over the first one."""
    worker.state.on_router_message("a", UNKNOWN, 1.0)
    actions = worker.state.on_timer(1.0 + REGISTER_INTERVAL_S)
    assert sent(actions, "a") == [REGISTRATION]
    assert sent(actions, "b")[0] == took_over(1)
    worker.state.on_router_message("b", REBORN, 1.3)
    worker.state.on_router_message("a", REBORN, 1.3)
    assert worker.state.num_registered_routers == 1
    assert [type(message) for message in sent(worker.state.on_timer(2.4), "b")] == [Heartbeat]


def test_a_link_whose_new_router_is_in_use_elsewhere_becomes_spare(worker):
    """The router was restarted, and the spare link was answered first."""
    worker.generate("old", "a")
    worker.state.connect("c", 1.0)
    worker.state.on_router_message("c", REBORN, 1.1)
    worker.generate("new", "c", 1.1)
    actions = worker.state.on_router_message("a", REBORN, 1.2)
    assert actions[:2] == ended_unanswered("old")
    assert sent(actions, "c") == [REGISTRATION]
    assert worker.state.num_requests == worker.state.num_registered_routers == 1
    assert sent(worker.state.on_timer(1.3), "b")[0] == took_over(1), "where it leads now is not known"


def test_a_refused_spare_link_registers_again(worker):
    worker.state.on_router_message("b", UNKNOWN, 0.1)
    assert sent(worker.state.on_timer(0.1 + REGISTER_INTERVAL_S), "b") == [REGISTRATION]
    assert worker.state.num_registered_routers == 1


def test_a_spare_link_registers_now_and_then(worker):
    """Its address may lead to another router by then."""
    messages = []
    for now in range(1, 31):
        worker.state.on_router_message("a", R, now)
        messages += sent(worker.state.on_timer(now), "b")
        worker.state.on_router_message("b", R, now) if len(messages) == 1 else None
    assert messages
    assert set(messages) == {msgspec.structs.replace(REGISTRATION, is_spare=True)}
    assert len(messages) <= 3
    actions = worker.state.on_router_message("b", REBORN, 31.0)
    assert sent(actions, "b") == [took_over(1)]
    assert worker.state.num_registered_routers == 2


def test_a_lost_link_without_requests_is_replaced_at_once(worker):
    assert sent(worker.state.disconnect("a", 1.0), "b") == [took_over(1)]
    assert worker.state.num_registered_routers == 1


def test_the_spare_link_heard_last_takes_over(worker):
    worker.state.connect("c", 1.0)
    worker.state.on_router_message("c", R, 1.1)
    assert sent(worker.state.disconnect("a", 2.0)) == [took_over(1)]
    assert sent(worker.state.disconnect("c", 2.0), "b") == [took_over(2)]


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_leaving_worker_says_goodbye_by_the_spare_link(worker, is_dropped):
    worker.generate("r", "a")
    worker.state.start_drain(1.0, 60.0)
    actions = worker.state.disconnect("a", 1.0) if is_dropped else []
    now = 1.0
    while not worker.state.is_stopped:
        now = round(now + 0.1, 1)
        actions += worker.state.on_timer(now)
    assert [type(message) for message in sent(actions, "b")][-1] is Goodbye


def test_only_the_link_in_use_hears_that_the_worker_leaves(worker):
    actions = worker.state.start_drain(1.0)
    assert [type(message) for message in sent(actions, "a")] == [Heartbeat, Goodbye]
    assert sent(actions, "b") == []


def test_contents_are_reported_by_the_link_in_use():
    worker = Reporting()
    takes = Registered(router_id="R", takes_contents=True)
    for link in ("a", "b"):
        worker.state.connect(link, 0.0)
    worker.store(1)
    assert [report.number for report in worker.hear(takes)] == [0]
    assert worker.hear(takes, link="b") == []
    worker.store(2)
    actions = worker.state.on_timer(1.0)
    assert [message.number for message in sent(actions, "a") if isinstance(message, ContentReport)] == [1]
    assert sent(actions, "b") == []
    assert [message.num_reports for message in sent(actions, "a") if isinstance(message, Heartbeat)] == [2]


def test_links_to_two_routers_are_both_in_use(worker):
    worker.state.connect("c", 0.0)
    worker.state.on_router_message("c", Registered(router_id="other"), 0.0)
    assert worker.state.num_registered_routers == 2
    (to_a,) = sent(worker.state.on_timer(1.0), "a")
    assert (to_a.router_rank, to_a.num_other_routers) == (0, 1)


def test_replies_go_by_the_link_in_use(worker):
    worker.generate("r", "b")
    (tokens,) = sent(worker.state.on_outputs([EngineCoreOutput("r/0", [7])], 0.2), "a")
    assert [type(item) for item in tokens] == [Tokens]
