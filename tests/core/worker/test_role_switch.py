"""A worker that changes its role: who may order it, what routers learn, and requests of the former role."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from core.errors import RoleSwitchRefused
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.wire.messages import (
    Generate,
    Heartbeat,
    PrefillDone,
    Register,
    Registered,
    RegisterEncoder,
    SwitchRefused,
    SwitchRole,
    Tokens,
)
from core.wire.sampling import SamplingParams
from core.worker.actions import AdmissionLimits, EngineLoad, Send, SubmitAdd
from core.worker.role import EngineFacts
from core.worker.role_switch import RoleSwitch
from core.worker.state import WorkerState
from core.worker.switchable import SwitchableHandler
from decode.role import DecodeHandler
from prefill.role import PrefillHandler
from tests.support.registrations import REGISTRATION as PLAIN

REGISTRATION = msgspec.structs.replace(PLAIN, can_switch_role=True)
ENCODER = RegisterEncoder(
    engine_id="e0", incarnation=7, model="m", model_fingerprint=b"f", ec_connector="p2p", max_num_images=4
)


def new_state(registration=REGISTRATION):
    facts = EngineFacts(max_model_len=64, eos_token_ids=frozenset({2}))
    handler = SwitchableHandler(PrefillHandler(facts), DecodeHandler(facts))
    limits = AdmissionLimits(max_num_seqs=4, max_waiting_requests=4, drain_timeout_s=10.0)
    return WorkerState(registration, handler, limits, EngineLoad, WorkerMetrics(CollectorRegistry(), {}))


@pytest.fixture
def worker():
    """A worker that two routers with a planner have registered; the first one came first."""
    state = new_state()
    for number, link in enumerate("ab"):
        state.connect(link, 0.0)
        state.on_router_message(link, Registered(router_id=f"R{number}", plans_roles=True), 0.0)
    return state


def sent(actions, link, kind):
    return [
        action.message
        for action in actions
        if isinstance(action, Send) and action.link == link and isinstance(action.message, kind)
    ]


def beat(state, now):
    """Return the heartbeats at a time, by link."""
    actions = state.on_timer(now)
    return {link: sent(actions, link, Heartbeat)[0] for link in "ab"}


def order(by, role="prefill", **changes):
    known = SwitchRole(role=role, incarnation=7, num_switches=by.num_switches, heartbeat=by.number)
    return msgspec.structs.replace(known, **changes)


def generate(state, request_id, **fields):
    message = Generate(request_id=request_id, prompt_token_ids=(5, 6), sampling=SamplingParams(max_tokens=4), **fields)
    return state.on_router_message("a", message, 0.0)


# ---- what routers learn ------------------------------------------------------------------------------------------------


def test_every_router_learns_the_new_role_at_once(worker):
    actions = worker.switch_role("prefill", 0.5)
    for link in "ab":
        (registration,) = sent(actions, link, Register)
        assert (registration.role, registration.num_switches, registration.incarnation) == ("prefill", 1, 7)
        assert sent(actions, link, Heartbeat)


def test_the_registration_is_repeated_until_the_router_has_it(worker):
    worker.switch_role("prefill", 0.5)
    worker.on_router_message("a", Registered(router_id="R0"), 0.6)  # the answer to an earlier heartbeat
    worker.on_router_message("b", Registered(router_id="R1", num_switches=1), 0.6)
    actions = worker.on_timer(2.0)
    assert [len(sent(actions, link, Register)) for link in "ab"] == [1, 0]
    assert [len(sent(actions, link, Heartbeat)) for link in "ab"] == [1, 1]


def test_requests_of_the_former_role_end_as_they_began(worker):
    generate(worker, "old")
    worker.switch_role("prefill", 0.5)
    assert worker.num_of_former_role == 1
    assert beat(worker, 2.0)["a"].num_of_former_role == 1
    assert any(isinstance(action, SubmitAdd) for action in generate(worker, "new", handoff=True))
    outputs = [EngineCoreOutput(request_id=f"{name}/0", new_token_ids=[9], finish_reason="length") for name in ("old", "new")]
    actions = worker.on_outputs(outputs, 1.0)
    assert [[item.request_id for item in frame] for frame in sent(actions, "a", list)] == [["old"]]
    assert [reply.request_id for reply in sent(actions, "a", PrefillDone)] == ["new"]
    assert worker.num_requests == worker.num_of_former_role == 0


def test_a_router_that_does_not_know_the_switch_is_served(worker):
    worker.switch_role("prefill", 0.5)
    assert any(isinstance(action, SubmitAdd) for action in generate(worker, "late"))
    (frame,) = sent(worker.on_outputs([EngineCoreOutput(request_id="late/0", new_token_ids=[9])], 1.0), "a", list)
    assert isinstance(frame[0], Tokens)


# ---- by command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("registration", "reason"),
    [
        (msgspec.structs.replace(REGISTRATION, can_switch_role=False), "worker.can_switch_role = true"),
        (msgspec.structs.replace(REGISTRATION, can_switch_role=False, connector="vllm"), "vLLM"),
        (ENCODER, "embeds images"),
    ],
)
def test_a_worker_of_one_role_refuses(registration, reason):
    with pytest.raises(RoleSwitchRefused, match=reason):
        new_state(registration).switch_role("prefill", 0.0)


@pytest.mark.parametrize(
    ("role", "named", "reason"),
    [
        ("decode", {}, "is decode already"),
        ("encode", {}, "cannot become encode"),
        ("prefill", {"incarnation": 8}, "restarted since"),
        ("prefill", {"num_switches": 1}, "has switched to decode since"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(worker, role, named, reason):
    with pytest.raises(RoleSwitchRefused, match=reason):
        worker.switch_role(role, 0.0, **named)
    assert worker.roles.registration == REGISTRATION


def test_a_worker_that_leaves_keeps_its_role(worker):
    generate(worker, "r")
    worker.start_drain(0.0)
    with pytest.raises(RoleSwitchRefused, match="leaving"):
        worker.switch_role("prefill", 0.1)


# ---- by a planner ------------------------------------------------------------------------------------------------------


def test_one_of_two_planners_is_heeded(worker):
    heartbeats = beat(worker, 1.0)
    assert [heartbeats[link].is_planner for link in "ab"] == [True, False]
    (refused,) = sent(worker.on_router_message("b", order(heartbeats["b"]), 1.1), "b", SwitchRefused)
    assert "another router" in refused.error.message
    actions = worker.on_router_message("a", order(heartbeats["a"]), 1.2)
    assert sent(actions, "b", Register)[0].role == "prefill"


def test_the_right_passes_on_when_the_first_planner_is_silent(worker):
    for now in (2.0, 4.0, 6.0):
        worker.on_router_message("b", Registered(router_id="R1", plans_roles=True), now)
        worker.on_timer(now)
    heartbeats = {link: sent(worker.on_timer(7.0), link, Heartbeat) for link in "b"}
    assert heartbeats["b"][0].is_planner


def test_a_planner_that_is_switched_off_gives_its_right_back(worker):
    worker.on_router_message("a", Registered(router_id="R0"), 0.5)
    worker.on_router_message("b", Registered(router_id="R1", plans_roles=True), 0.6)
    assert beat(worker, 2.0)["b"].is_planner


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 8}, "restarted since"),
        ({"num_switches": 1}, "has switched to decode since"),
        ({"heartbeat": 0}, "too long ago"),
    ],
)
def test_an_order_that_was_overtaken_is_refused(worker, changes, reason):
    message = order(beat(worker, 1.0)["a"], **changes)
    (refused,) = sent(worker.on_router_message("a", message, 1.1), "a", SwitchRefused)
    assert reason in refused.error.message
    assert worker.roles.role == "decode"


def test_an_order_by_an_old_heartbeat_is_refused(worker):
    heartbeats = beat(worker, 1.0)
    worker.on_router_message("a", Registered(router_id="R0", plans_roles=True), 4.0)
    (refused,) = sent(worker.on_router_message("a", order(heartbeats["a"]), 4.1), "a", SwitchRefused)
    assert "too long ago" in refused.error.message


def test_a_second_order_by_the_same_heartbeat_is_refused(worker):
    heartbeat = beat(worker, 1.0)["a"]
    worker.on_router_message("a", order(heartbeat), 1.1)
    (refused,) = sent(worker.on_router_message("a", order(heartbeat, "aggregated"), 1.2), "a", SwitchRefused)
    assert "has switched to prefill since" in refused.error.message


def test_a_worker_that_cannot_switch_heeds_no_planner():
    roles = RoleSwitch(msgspec.structs.replace(REGISTRATION, can_switch_role=False))
    roles.on_registered("a", Registered(router_id="R0", plans_roles=True), 0.0)
    assert not roles.is_planner("a", 0.0)
    heartbeat = Heartbeat(engine_id="w0", incarnation=7)
    assert roles.sign(heartbeat, "a", 0, 0.0) == heartbeat
