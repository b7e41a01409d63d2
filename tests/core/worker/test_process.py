"""The worker process around its state machine: real sockets, real engine thread, real signals; a scripted engine and router."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from connectors.testing.contexts import worker_context
from core.clock import SystemClock
from core.config import load_config
from core.engine.step_watch import StepSize
from core.errors import ConfigError
from core.release import package_version
from core.tracing import TraceContext
from core.wire.codec import WIRE_VERSION, encode_router_message
from core.wire.early import MeetProducer
from core.wire.kv import KVLayoutInfo
from core.wire.messages import (
    Abort,
    ChoiceStart,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    Refused,
    Register,
    Rejected,
    Release,
    Renew,
    RequestFailed,
    Tokens,
)
from core.wire.sampling import SamplingParams
from core.worker import router_watch
from core.worker.builder import Assembled
from core.worker.engine_worker import EngineWorker
from core.worker.process import WorkerProcess
from core.worker.role import EngineFacts
from core.worker.state import WorkerState
from decode.role import DecodeHandler
from tests.core.worker.scripted_parts import WAIT_S, RecordingConnector, ScriptedEngine, ScriptedRouter
from tests.support.trace_collector import memory_tracer

pytestmark = pytest.mark.slow

LAYOUT = KVLayoutInfo(dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=8, block_bytes=1024)
LEG = TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01")


@pytest.fixture
def router():
    context = zmq.asyncio.Context()
    router = ScriptedRouter(context)
    yield router
    router.socket.close()
    context.term()


@pytest.fixture
def journal():
    return []


@pytest.fixture
def make_worker(router, journal):
    def make(assemble=None, settings=(), gate=None, known_step=None, tracer=None):
        address = f"worker.router_addresses=['{router.address}']"
        config = load_config(assignments=[address, "worker.drain_timeout_s=5", "worker.pin_cpus=false", *settings])
        context = replace(worker_context("decode", engine_id="w0", incarnation=7), config=config, tracer=tracer)
        built = SimpleNamespace(
            grammars=None,
            contents=None,
            engine=ScriptedEngine(journal, gate),
            model_fingerprint=b"f",
            layout=LAYOUT,
            max_model_len=64,
            num_blocks=8,
            known_step=known_step,
            image_decode_thread=SimpleNamespace(start=lambda wakeup: journal.append("images started"), num_bytes=5),
        )
        handler = DecodeHandler(EngineFacts(max_model_len=64, eos_token_ids=frozenset()))
        assemble = assemble or (lambda: Assembled(built, RecordingConnector(journal), handler))
        return WorkerProcess(context, EngineWorker(context, assemble))

    return make


@pytest.fixture
async def running(make_worker):
    """A worker in this event loop: its operations address and the task that ends with its exit code."""
    addresses = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(make_worker().run(addresses.set_result))
    async with asyncio.timeout(WAIT_S):
        yield SimpleNamespace(task=task, ops_address=(await addresses)["ops_address"])
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def generate(request_id, *, first_token=1, max_tokens=3):
    return Generate(request_id=request_id, prompt_token_ids=(first_token, 2), sampling=SamplingParams(max_tokens=max_tokens))


async def get(url):
    async with httpx.AsyncClient() as client:
        return await client.get(url)


async def test_registers_serves_and_leaves_in_order_on_sigterm(running, router, journal):
    registration = await router.expect(Register)
    assert registration.version == package_version()
    assert (registration.engine_id, registration.incarnation, registration.transports) == ("w0", 7, ("shm",))
    assert (registration.control_address, registration.meets_producers) == ("tcp://10.0.0.1:5600", True)
    assert (registration.host_id, registration.has_digests, registration.kv_verify) == ("here", True, "auto")
    assert registration.ops_address == running.ops_address
    await router.expect(Heartbeat)
    await router.send(generate("r"))
    tokens = [(await router.expect(list))[0] for _ in range(3)]
    assert [token.token_ids for token in tokens] == [(0,), (1,), (2,)]
    assert tokens[-1].finish_reason == "length"
    os.kill(os.getpid(), signal.SIGTERM)
    await router.expect(Goodbye)
    assert await running.task == 0
    assert journal == ["wakeup set", "connector started", "images started", "engine stopped", "connector stopped"]


async def test_log_says_where_operations_are(make_worker, router, caplog):
    """The port is any free one by default, and ``kvferry drain`` needs it."""
    caplog.set_level("INFO")
    addresses = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(make_worker().run(addresses.set_result))
    url = (await addresses)["ops_address"]
    assert f"event=ops_port_open address={url}" in caplog.text
    await router.expect(Heartbeat)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def until_text(caplog, text):
    async with asyncio.timeout(WAIT_S):
        while True:
            if text in caplog.text:
                return
            await asyncio.sleep(0.01)


async def test_worker_without_a_router_says_why_and_when_it_has_one(make_worker, router, caplog, monkeypatch):
    monkeypatch.setattr(router_watch, "PATIENCE_S", 0.0)
    caplog.set_level("INFO")
    router.socket.close()
    addresses = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(make_worker().run(addresses.set_result))
    url = (await addresses)["ops_address"]
    await until_text(caplog, "event=router_unreachable")
    assert f'event=router_unreachable router={router.address} reason="no connection: ' in caplog.text
    found = (await get(f"{url}/ready")).json()
    assert found["status"] == "not registered"
    assert found["routers"][router.address].startswith("no connection: ")
    assert "event=registered" not in caplog.text
    router.open()
    await router.expect(Heartbeat)
    assert f"event=registered router={router.address}" in caplog.text
    assert (await get(f"{url}/ready")).json() == {"status": "ready"}
    assert caplog.text.count("event=router_unreachable") == 1
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_probes_name_the_reason_of_a_router_that_refuses_or_does_not_answer(running, router, caplog):
    frame = (await router.socket.recv_multipart())[0]
    assert (await get(f"{running.ops_address}/ready")).json()["routers"] == {router.address: "it does not answer"}
    router.peer = frame
    await router.send(Refused(error=ErrorInfo(code="x", message="it serves another model", http_status=400)))
    await until_text(caplog, "event=refused_by_router")
    found = (await get(f"{running.ops_address}/ready")).json()
    assert found == {"status": "not registered", "routers": {router.address: "it serves another model"}}
    health = await get(f"{running.ops_address}/health")
    assert health.status_code == 200
    assert health.json()["refused_by"] == {router.address: "it serves another model"}


async def test_health_names_no_refusal_of_a_router_that_has_gone(running, router, caplog):
    router.peer = (await router.socket.recv_multipart())[0]
    await router.send(Refused(error=ErrorInfo(code="x", message="it serves another model", http_status=400)))
    await until_text(caplog, "event=refused_by_router")
    router.socket.close()
    async with asyncio.timeout(WAIT_S):
        while True:
            health = (await get(f"{running.ops_address}/health")).json()
            if "refused_by" not in health:
                break
            await asyncio.sleep(0.01)
    assert health == {"status": "ok", "engine_id": "w0"}
    assert (await get(f"{running.ops_address}/ready")).json()["routers"][router.address].startswith("no connection: ")


async def test_ready_only_while_registered_and_not_draining(running, router):
    assert (await get(f"{running.ops_address}/health")).status_code == 200
    assert (await get(f"{running.ops_address}/ready")).status_code == 503
    await router.expect(Heartbeat)
    assert (await get(f"{running.ops_address}/started")).status_code == 200
    assert (await get(f"{running.ops_address}/ready")).status_code == 200
    versions = (await get(f"{running.ops_address}/version")).json()
    assert versions == {"version": package_version(), "wire_version": WIRE_VERSION}
    await router.send(generate("endless", first_token=7))
    async with httpx.AsyncClient() as client:
        drained = await client.post(f"{running.ops_address}/drain")
    assert (drained.status_code, drained.json()["status"]) == (202, "draining")
    ready = await get(f"{running.ops_address}/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "draining")
    os.kill(os.getpid(), signal.SIGTERM)  # the second request to leave is in a hurry
    assert (await router.expect(RequestFailed)).error.code == "no_worker"
    assert await running.task == 0


async def test_health_fails_while_a_step_takes_too_long_and_recovers_with_it(make_worker, router):
    gate, addresses = threading.Event(), asyncio.get_running_loop().create_future()
    worker = make_worker(settings=["worker.stuck_step_s=0.05"], gate=gate)
    task = asyncio.create_task(worker.run(addresses.set_result))
    url = (await addresses)["ops_address"]
    await router.expect(Heartbeat)

    async def until(status):
        async with asyncio.timeout(WAIT_S):
            while True:
                found = await get(f"{url}/health")
                if found.status_code == status:
                    return found.json()["status"]

    assert await until(200) == "ok"
    await router.send(generate("r"))
    assert (await until(503)).startswith("engine stuck")
    assert (await get(f"{url}/ready")).status_code == 503
    gate.set()
    assert await until(200) == "ok"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


@pytest.mark.parametrize("known_step", [None, (StepSize(num_tokens=64, num_requests=1), 0.01)])
async def test_the_very_first_step_is_excused_only_if_no_step_was_timed_before(make_worker, router, known_step):
    gate, addresses = threading.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        make_worker(settings=["model.device=cpu"], gate=gate, known_step=known_step).run(addresses.set_result)
    )
    await router.expect(Heartbeat)
    await router.send(generate("r"))
    async with asyncio.timeout(WAIT_S):
        while (heartbeat := await router.expect(Heartbeat)).stalled_ms < 100:
            pass
    assert heartbeat.is_warming_up is (known_step is None)
    gate.set()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_health_does_not_depend_on_routers(running):
    assert (await get(f"{running.ops_address}/ready")).status_code == 503  # its registration gets no answer
    assert (await get(f"{running.ops_address}/health")).status_code == 200


async def test_metrics_tell_what_was_served(running, router):
    await router.expect(Heartbeat)
    await router.send(generate("r", max_tokens=2))
    await router.expect(list)
    await router.expect(list)
    text = (await get(f"{running.ops_address}/metrics")).text
    assert "kvferry_generation_tokens_total 2.0" in text
    assert 'kvferry_request_success_total{finished_reason="length"} 1.0' in text
    assert "kvferry_registered_routers 1.0" in text
    assert "kvferry_encoder_prepared_bytes 5.0" in text
    assert "kvferry_external_prefix_cache_queries_total 44.0" in text
    assert "kvferry_external_prefix_cache_hits_total 32.0" in text


async def test_malformed_frame_is_answered_and_does_no_harm(running, router):
    await router.expect(Heartbeat)
    await router.send(b"\x02\x03garbage")
    assert (await router.expect(Rejected)).error.code == "protocol_error"
    frame = encode_router_message(msgspec.structs.replace(generate("absurd", max_tokens=1), deadline_ms=10**13))
    await router.send(frame)
    failed = await router.expect(RequestFailed)
    assert (failed.request_id, failed.error.code) == ("absurd", "protocol_error")
    await router.send(generate("r", max_tokens=1))
    assert isinstance((await router.expect(list))[0], Tokens)


async def test_a_reply_too_large_for_a_frame_ends_no_other_request(make_worker, router, journal, monkeypatch):
    monkeypatch.setattr("core.wire.codec.MAX_WORKER_FRAME_BYTES", 4096)
    gate = threading.Event()
    task = asyncio.create_task(make_worker(gate=gate).run(lambda announcement: None))
    await router.expect(Heartbeat)
    await router.send(generate("r", max_tokens=20))
    await router.send(generate("big", first_token=9, max_tokens=20))
    await router.expect(Heartbeat)
    await router.expect(Heartbeat)
    gate.set()
    failed = await router.expect(RequestFailed)
    assert (failed.request_id, failed.error.code) == ("big", "protocol_error")
    assert "prompt_logprobs" in failed.error.message
    async with asyncio.timeout(WAIT_S):
        while not any(tokens.finish_reason for tokens in await router.expect(list)):
            pass
    assert "abort r/0" not in journal
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_a_last_reply_too_large_for_a_frame_is_a_failure_in_trace_and_log(make_worker, router, monkeypatch, caplog):
    monkeypatch.setattr("core.wire.codec.MAX_WORKER_FRAME_BYTES", 4096)
    tracer, spans = memory_tracer(SystemClock())
    task = asyncio.create_task(make_worker(tracer=tracer).run(lambda announcement: None))
    await router.expect(Heartbeat)
    await router.send(msgspec.structs.replace(generate("big", first_token=9, max_tokens=1), trace=LEG))
    assert (await router.expect(RequestFailed)).error.code == "protocol_error"
    assert spans()["kvferry.decode"].status.description == "protocol_error"
    (line,) = [record.getMessage() for record in caplog.records if "request_failed" in record.getMessage()]
    assert "code=protocol_error" in line
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_messages_of_handoffs_reach_the_connector(running, router, journal):
    await router.expect(Heartbeat)
    await router.send(MeetProducer(engine_id="p0", incarnation=1, control_address="tcp://10.0.0.2:5600"))
    await router.send(Renew(transfer_ids=("t",)))
    await router.send(Release(transfer_ids=("t",)))
    await router.send(generate("r", max_tokens=1))
    await router.expect(list)
    assert journal[-3:] == ["meet p0", "renew ('t',)", "release ('t',)"]


async def test_handoff_of_a_request_is_expected_by_the_connector(running, router, journal, handoff):
    await router.expect(Heartbeat)
    first = ChoiceStart(index=0, output_token_ids=(1,))
    await router.send(msgspec.structs.replace(generate("r"), kv_handoff=handoff, choices=(first,)))
    await router.expect(list)
    assert "expect t" in journal


async def test_abort_reaches_the_engine(running, router, journal):
    await router.expect(Heartbeat)
    await router.send(generate("endless", first_token=7))
    await router.send(Abort(request_ids=("endless",)))
    await router.send(generate("next", max_tokens=1))
    await router.expect(list)
    assert journal[-1] == "abort endless/0"


async def test_engine_death_answers_everyone_and_is_an_exit_code(running, router, journal):
    await router.expect(Heartbeat)
    await router.send(generate("waiting", first_token=7))
    await router.send(generate("deadly", first_token=666))
    failures = [await router.expect(RequestFailed) for _ in range(2)]
    assert {failure.request_id for failure in failures} == {"waiting", "deadly"}
    assert {(failure.error.code, failure.error.retryable) for failure in failures} == {("engine_dead", True)}
    assert await running.task == 1
    assert journal[-1] == "connector stopped"


async def test_worker_that_has_become_deaf_answers_everyone_and_is_an_exit_code(make_worker, router):
    worker = make_worker()
    running = asyncio.create_task(worker.run(lambda announcement: None))
    await router.expect(Heartbeat)
    await router.send(generate("waiting", first_token=7))
    await router.send(generate("served"))
    await router.expect(list)
    worker.on_links_death(ValueError("no ears"))
    assert (await router.expect(RequestFailed)).error.code == "engine_dead"
    async with asyncio.timeout(WAIT_S):
        assert await running == 1


def broken(*args):
    raise ValueError("a bug")


@pytest.mark.parametrize("step", ["on_timer", "on_outputs"])
@pytest.mark.parametrize("is_all_broken", [False, True])
async def test_bug_in_a_step_without_waiting_requests_is_an_exit_code(make_worker, router, monkeypatch, step, is_all_broken):
    real, is_broken = getattr(WorkerState, step), asyncio.Event()
    monkeypatch.setattr(WorkerState, step, lambda *args: broken() if is_broken.is_set() else real(*args))
    worker = make_worker()
    running = asyncio.create_task(worker.run(lambda announcement: None))
    await router.expect(Heartbeat)
    await router.send(generate("waiting", first_token=7))
    await router.send(generate("served", max_tokens=1))
    await router.expect(list)
    is_broken.set()
    if is_all_broken:
        monkeypatch.setattr(worker._state, "on_engine_death", broken)
    await router.send(generate("next"))
    async with asyncio.timeout(WAIT_S):
        assert await running == 1
    if not is_all_broken:
        assert (await router.expect(RequestFailed)).error.code == "engine_dead"


async def test_restarted_router_gets_a_fresh_worker(running, router, journal):
    await router.expect(Heartbeat)
    await router.send(generate("orphan", first_token=7))
    await router.send(generate("marker", max_tokens=1))
    await router.expect(list)
    router.socket.close()
    router.router_id = "reborn"
    router.open()
    await router.expect(Register | Heartbeat)
    await router.send(generate("next", max_tokens=1))
    while (await router.expect(list))[0].request_id != "next":
        pass
    assert "abort orphan/0" in journal


async def test_request_of_a_lost_router_ends_in_its_trace(make_worker, router):
    tracer, spans = memory_tracer(SystemClock())
    task = asyncio.create_task(make_worker(tracer=tracer).run(lambda announcement: None))
    await router.expect(Heartbeat)
    await router.send(msgspec.structs.replace(generate("orphan", first_token=7), trace=LEG))
    await router.send(Refused(error=ErrorInfo(code="not_registered", message="unknown worker")))
    await router.send(generate("next", max_tokens=1))
    await router.expect(list)
    assert spans()["kvferry.decode"].status.description == "aborted:router_lost"
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_request_that_comes_after_its_router_was_lost_opens_no_span(make_worker, router):
    tracer, _ = memory_tracer(SystemClock())
    worker = make_worker(tracer=tracer)
    task = asyncio.create_task(worker.run(lambda announcement: None))
    await router.expect(Heartbeat)
    (link,) = worker._state._links
    worker.on_disconnect(link)
    worker.on_frame(link, [encode_router_message(msgspec.structs.replace(generate("late", first_token=7), trace=LEG))])
    assert not worker._traces._open
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0


async def test_signal_during_the_load_ends_the_worker_at_once(make_worker):
    is_loading, may_end = threading.Event(), threading.Event()

    def assemble():
        is_loading.set()
        may_end.wait(WAIT_S)
        raise AssertionError("nobody waits for this")

    task = asyncio.create_task(make_worker(assemble).run(lambda addresses: None))
    await asyncio.to_thread(is_loading.wait, WAIT_S)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    may_end.set()


async def test_failed_load_is_raised_and_leaves_nothing_open(make_worker):
    def assemble():
        raise ConfigError("no such model")

    addresses = {}
    with pytest.raises(ConfigError, match="no such model"):
        await make_worker(assemble).run(addresses.update)
    with pytest.raises(httpx.TransportError):
        await get(f"{addresses['ops_address']}/health")
