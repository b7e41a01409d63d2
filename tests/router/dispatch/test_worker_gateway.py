from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config_router import RouterSection
from core.errors import ConfigError, NoWorker, ProtocolError, VersionMismatch
from core.testing.clock import FakeClock
from core.wire.codec import WIRE_VERSION, encode_worker_message
from core.wire.engine_calls import EngineCall
from core.wire.messages import ErrorInfo, Generate, Goodbye, PrefillDone, Refused, Registered, Rejected, RequestFailed, Tokens
from core.wire.sampling import SamplingParams
from router.dispatch.core import Transmit
from router.dispatch.engine_api import CallFailed
from router.dispatch.frame_reader import FrameReader
from router.dispatch.types import Submission
from router.dispatch.worker_gateway import WorkerGateway
from router.metrics import RouterMetrics

WRONG = ErrorInfo.of(ProtocolError("?"))
BODY = {"prompt": "p", "max_tokens": 50}


async def complete(under_test):
    async with under_test.client() as client:
        return await client.post("/v1/completions", json=BODY)


async def refusal(worker, code: str) -> Refused:
    return await worker.wait_for(lambda message: isinstance(message, Refused) and message.error.code == code)


# ---- broken peers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frames",
    [
        (b"",),
        (b"\x02",),
        (b"\x02\x63\x80",),
        (b"\x02\x01\xc1",),
        (b"\x02\x02\xdd\xff\xff\xff\xff",),
        (b"two", b"frames"),
        (b"\x02\x01\x80", b""),
    ],
)
async def test_garbage_of_an_unregistered_worker_is_refused_and_the_router_serves_on(served, frames):
    unregistered = await served.unregistered()
    await unregistered.send_raw(*frames)
    await refusal(unregistered, "protocol_error")
    assert served.metric("kvferry_rejected_frames_total") == 1
    assert (await complete(served)).status_code == 200


async def test_garbage_of_a_member_moves_its_requests_at_once_and_it_may_come_back(start_router):
    under_test = await start_router(has_http=False)
    prefill = await under_test.add("prefill", script=under_test.script(is_silent=True))
    await under_test.add("decode")
    call = asyncio.create_task(complete(under_test))
    await prefill.generated()
    await prefill.send_raw(b"\x02garbage")
    assert (await call).status_code == 200
    await refusal(prefill, "protocol_error")
    await refusal(prefill, "not_registered")  # the answer to its next heartbeat
    await prefill.send(prefill.registration)
    await under_test.until(lambda: under_test.router.endpoints.not_ready_reason is None)


async def test_frames_of_another_version_are_refused_once_and_logged_once(served, caplog):
    unregistered = await served.unregistered()
    for _ in range(500):
        await unregistered.send_raw(encode_worker_message(Goodbye(engine_id="w", incarnation=1), version=9))
    await served.until(lambda: served.metric("kvferry_rejected_frames_total") == 500)
    refusal = await unregistered.wait_for(lambda message: isinstance(message, VersionMismatch))
    assert (refusal.is_refusal, refusal.theirs) == (True, WIRE_VERSION)
    assert (await complete(served)).status_code == 200
    assert len(unregistered.received) == 1
    (line,) = [record.getMessage() for record in caplog.records if "other_wire_version" in record.getMessage()]
    assert f"ours={WIRE_VERSION} theirs=9" in line


async def test_an_unregistered_worker_cannot_fill_the_log(served, caplog):
    unregistered = await served.unregistered()
    for number in range(500):
        await unregistered.send_raw(b"\x02\x01" + bytes((number % 256,)) * 9)
    await served.until(lambda: served.metric("kvferry_rejected_frames_total") == 500)
    assert (
        sum(record.name == "router.dispatch.worker_gateway" and record.levelname == "WARNING" for record in caplog.records) == 1
    )


class Flood:
    """A socket with always another message, and a clock that runs while they are read."""

    def __init__(self, clock):
        self._clock = clock

    def get(self, _option):
        self._clock.advance(0.01)
        return zmq.POLLIN


async def test_a_flood_of_messages_is_no_pause_of_the_router():
    clock = FakeClock()
    gateway = WorkerGateway(RouterSection(), "m", "router-0", clock, RouterMetrics(CollectorRegistry()))
    reader = FrameReader(Flood(clock), clock, lambda parts: None)
    pauses = gateway.core.membership.pauses
    pauses.on_tick(clock.now())
    clock.advance(gateway._tick_s)
    await gateway._do_what_is_due(reader)
    assert pauses.lateness_s == 0.0
    assert not pauses.is_settling(clock.now()), "else no worker would be judged while it lasts"


async def test_messages_of_workers_that_never_registered_are_refused(served):
    unregistered = await served.unregistered()
    await unregistered.send(PrefillDone(request_id="r", choices=()))
    await refusal(unregistered, "not_registered")
    await unregistered.send([Tokens("r", 0, 0, (1,))])
    await unregistered.send(RequestFailed(request_id="r", error=WRONG))
    await unregistered.send(Rejected(error=WRONG))
    await served.until(lambda: len(unregistered.messages(Refused)) == 4)
    assert (await complete(served)).status_code == 200


@pytest.mark.slow
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=3))
@settings(max_examples=200, deadline=None)
def test_no_bytes_of_a_worker_are_a_bug_of_ours(frames):
    gateway = WorkerGateway(RouterSection(), "tiny", "router-1", SystemClock(), RouterMetrics(CollectorRegistry()))
    gateway._guard = lambda handle, *args: handle(*args)  # without the net that catches bugs
    gateway._on_parts([b"peer", *frames])


async def test_a_bug_in_one_step_is_logged_and_the_router_lives_on(served, monkeypatch, caplog):
    def boom(*args):
        raise RuntimeError("bug")

    with monkeypatch.context() as patch:
        patch.setattr(served.router.gateway.core.membership, "on_heartbeat", boom)
        await served.until(lambda: "router_bug" in caplog.text)
    assert served.router.gateway.is_alive
    assert (await complete(served)).status_code == 200


@pytest.mark.parametrize("place", ["on_prefill_done", "on_tokens"])
async def test_a_bug_in_a_request_s_step_is_its_answer(served, monkeypatch, caplog, place):
    def boom(*args):
        raise RuntimeError("bug")

    gateway = served.router.gateway
    with monkeypatch.context() as patch:
        patch.setattr(gateway.core.dispatcher, place, boom)
        response = await complete(served)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "router_bug" in caplog.text
    assert (gateway.num_requests, len(gateway.core.dispatcher)) == (0, 0)
    assert (await complete(served)).status_code == 200


async def test_a_request_that_a_bug_has_cut_off_from_the_machine_is_answered_too(served, monkeypatch):
    gateway = served.router.gateway
    with monkeypatch.context() as patch:
        patch.setattr(gateway, "_on_ended", lambda *args: 1 / 0)
        assert (await complete(served)).status_code in (200, 500)  # the answer may be whole before the bug strikes
    await served.until(lambda: gateway.num_requests == 0)
    assert (await complete(served)).status_code == 200


# ---- workers that come and go ------------------------------------------------------------------------------------------------


async def test_workers_may_come_before_and_after_one_another(start_router):
    under_test = await start_router(has_http=False)
    assert (await complete(under_test)).status_code == 503
    await under_test.add("decode")
    assert "no prefill worker" in (await complete(under_test)).json()["error"]["message"]
    await under_test.add("prefill")
    assert (await complete(under_test)).status_code == 200


async def test_a_worker_that_says_goodbye_gets_no_more_requests(start_router):
    under_test = await start_router(has_http=False)
    first, second = await under_test.add("aggregated"), await under_test.add("aggregated")
    await first.leave()
    await under_test.until(lambda: len(list(under_test.router.gateway.core.membership.workers)) == 1)
    for _ in range(3):
        assert (await complete(under_test)).status_code == 200
    assert first.messages(Generate) == []
    assert len(second.messages(Generate)) == 3
    assert under_test.metric("kvferry_workers_lost_total", role="aggregated") == 0.0


@pytest.mark.slow
async def test_a_silent_worker_is_dropped_and_comes_back_with_its_next_registration(start_router):
    clock = FakeClock()
    under_test = await start_router(has_http=False, clock=clock)
    worker = await under_test.add("aggregated")
    worker.sends_heartbeats = False

    def is_dropped() -> bool:
        clock.advance(0.1)  # a heartbeat interval; the router counts no more as silence between two ticks
        return under_test.router.endpoints.not_ready_reason is not None

    await under_test.until(is_dropped)
    worker.sends_heartbeats = True
    await refusal(worker, "not_registered")
    await worker.send(worker.registration)
    await under_test.until(lambda: under_test.router.endpoints.not_ready_reason is None)
    assert (await complete(under_test)).status_code == 200


async def test_of_two_workers_with_one_name_the_later_serves_and_the_earlier_is_refused(start_router):
    under_test = await start_router(has_http=False)
    first = await under_test.add("aggregated", engine_id="twin")
    second = await under_test.add("aggregated", engine_id="twin")
    await refusal(first, "duplicate_engine_id")
    assert (await complete(under_test)).status_code == 200
    assert second.messages(Generate)


async def test_a_refused_worker_serves_again_once_the_later_one_has_left(start_router):
    under_test = await start_router(has_http=False)
    first = await under_test.add("aggregated", engine_id="twin")
    second = await under_test.add("aggregated", engine_id="twin")
    await refusal(first, "duplicate_engine_id")
    await second.leave()
    await under_test.until(lambda: not under_test.router.gateway.core.membership.workers)
    await first.send(first.registration)
    await under_test.until(lambda: under_test.router.endpoints.not_ready_reason is None)
    assert (await complete(under_test)).status_code == 200
    assert first.messages(Generate)


async def test_a_worker_of_another_model_is_refused(start_router):
    under_test = await start_router(has_http=False)
    unregistered = await under_test.unregistered("aggregated", model="huge")
    await unregistered.send(unregistered.registration)
    await refusal(unregistered, "model_mismatch")
    assert (await complete(under_test)).status_code == 503


async def test_a_worker_that_reconnects_keeps_its_membership_and_starts_its_requests_again(start_router):
    under_test = await start_router(has_http=False)
    worker = await under_test.add("aggregated")
    worker.script.is_silent = True
    call = asyncio.create_task(complete(under_test))
    request_id = (await worker.generated()).request_id
    worker.script.is_silent = False
    await under_test.reconnect(worker)
    assert (await call).status_code == 200
    await worker.aborts(request_id)
    assert [message.request_id for message in worker.messages(Generate)] == [request_id, f"{request_id}.2"]
    assert len(list(under_test.router.gateway.core.membership.workers)) == 1


async def test_a_message_that_cannot_be_sent_shows_that_a_worker_is_gone(start_router):
    under_test = await start_router(has_http=False)
    worker = await under_test.add("aggregated")
    gateway = under_test.router.gateway
    (member,) = gateway.core.membership.workers
    worker.disconnect()

    def is_noticed() -> bool:
        gateway._perform([Transmit(member.peer, Registered(router_id="probe"))])
        return not list(gateway.core.membership.workers)

    await under_test.until(is_noticed)
    assert "no worker has registered" in (await complete(under_test)).text


@pytest.mark.slow
async def test_a_worker_whose_process_dies_is_missed_at_once_not_by_its_silence(start_router):
    under_test = await start_router(has_http=False, heartbeat_timeout_s=600.0)
    prefill, _ = await under_test.pair()
    prefill.script.is_silent = True
    call = asyncio.create_task(complete(under_test))
    await prefill.generated()
    successor = await under_test.add("prefill")
    await prefill.kill()
    assert (await call).status_code == 200
    assert successor.messages(Generate)


async def test_spreads_requests_over_workers(start_router):
    under_test = await start_router(has_http=False)
    for _ in range(2):
        await under_test.pair()
    await asyncio.gather(*[complete(under_test) for _ in range(8)])
    assert [len(worker.messages(Generate)) for worker in under_test.workers] == [4, 4, 4, 4]


# ---- start and stop of the gateway ----------------------------------------------------------------------------------------


async def test_stopping_aborts_what_is_in_flight(start_router):
    under_test = await start_router(has_http=False)
    prefill, _ = await under_test.pair(is_silent=True)
    call = asyncio.create_task(complete(under_test))
    request_id = (await prefill.generated()).request_id
    await under_test.router.stop()
    response = await call
    assert response.status_code == 503
    await prefill.aborts(request_id)


async def test_a_taken_worker_port_is_a_configuration_error(start_router):
    under_test = await start_router(has_http=False)
    with pytest.raises(ConfigError, match="Address already in use"):
        await start_router(has_http=False, worker_address=under_test.router.worker_address)


@pytest.mark.slow
async def test_the_deadline_of_a_request_is_kept(start_router):
    under_test = await start_router(has_http=False, request_timeout_s=0.3)
    prefill, _ = await under_test.pair(is_silent=True)
    response = await complete(under_test)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    await prefill.aborts((await prefill.generated()).request_id)


# ---- the end of the router ---------------------------------------------------------------------------------------------------


async def test_a_stopped_gateway_refuses_requests_and_calls(served):
    gateway = served.router.gateway
    worker = gateway.core.membership.workers[0]
    await gateway.stop()
    submission = Submission(request_id="r", prompt_token_ids=(5,), sampling=SamplingParams(seed=7, max_tokens=2))
    with pytest.raises(NoWorker, match="shuts down"):
        await gateway.open("client", [submission], AsyncMock())
    with pytest.raises(CallFailed, match="shuts down"):
        async with gateway.engine_api.call(worker, EngineCall(request_id="c", path="/x", body=b"{}", deadline_ms=2000)):
            pass
