"""The driver's reports: failed loads and fences in the log, dropped messages in the counters."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from prometheus_client import CollectorRegistry

from connectors.p2p.actions import (
    ControlLost,
    ControlReceived,
    HandoffRef,
    LeaseGrant,
    PeerFenced,
    PullRequest,
    Refusal,
    SendControl,
    row_units,
)
from connectors.p2p.connector import P2PConnector
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.prefixes.messages import AskPrefix, PrefixExpired
from connectors.p2p.transport.factory import create_transport
from connectors.p2p.transport.interface import PeerId
from connectors.p2p.transport.tcp_server import FORMAT_VERSION, ChunkRequest, TcpMetadata
from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.testing.connector_pair import LAYOUT
from connectors.testing.contexts import connector_context
from connectors.testing.memory_pool import MemoryPool
from core.config_workers import ConnectorSection
from core.errors import CorruptBlock, LayoutMismatch, LeaseExpired
from core.ids import RandomIds, new_hex_id
from core.kv.seals import ExpectedSeal
from core.wire.codec import decode_control_frame, encode_control_message
from core.wire.kv import KVHandoff, KVSource, LeaseRenew, PrefixHeld
from core.wire.messages import ErrorInfo, TransferUsage
from core.wire.sockets import AsyncContext
from core.worker.role import choice_id
from router.dispatch.request_state import Attempt, RequestState

WAIT_S = 20.0
NOBODY = PeerId("tcp://127.0.0.1:1", 1)
ROUTER_ID = "ab" * 16


class Started:
    """A connector that serves, and what it has logged."""

    def __init__(self, role, caplog):
        self.metrics = CollectorRegistry()
        self.caplog = caplog
        self.transports = []
        self.woken = asyncio.Event()
        self.pool = MemoryPool(8, LAYOUT)
        context = connector_context(role, incarnation=1, connector=ConnectorSection(transports=("tcp",)), metrics=self.metrics)
        self.connector = P2PConnector(context, self._create)
        self.connector.worker.register_kv_caches(self.pool.region)
        self.connector.worker.set_wakeup(self.woken.set)

    def _create(self, name, settings):
        self.transports.append(create_transport(name, settings))
        return self.transports[-1]

    async def end(self, metadata):
        """Give a step's orders and return the reports of the loads that have ended by them."""
        self.connector.worker.start_load_kv(metadata)
        async with asyncio.timeout(WAIT_S):
            await self.woken.wait()
        return self.connector.worker.get_transfer_results(set())

    def told(self, *actions):
        driver = self.connector.driver
        driver.agent.consumer.handlers[ControlLost] = lambda event, now: actions
        driver.handle(ControlLost(NOBODY.address))

    def lines(self, name):
        found = [record for record in self.caplog.records if getattr(record.msg, "name", "") == name]
        assert all(record.levelname == "WARNING" for record in found)
        return [record.msg.fields for record in found]

    @property
    def is_transport_used(self):
        return self.metrics.get_sample_value("kvferry_kv_transport_info", {"transport": "tcp"})

    def count(self, happened):
        return self.metrics.get_sample_value("kvferry_kv_handoff_events_total", {"event": happened})


@pytest.fixture
async def start(caplog):
    started = []

    async def start(role="decode"):
        started.append(Started(role, caplog))
        await started[-1].connector.start()
        return started[-1]

    yield start
    for each in started:
        await each.connector.stop()
        each.pool.close()


@pytest.fixture
async def reader(start):
    return await start()


def pull(request_id, num_blocks=3, peer=NOBODY):
    rows = range(num_blocks)
    units = row_units(rows, rows, [ExpectedSeal(1, 0, bytes(16), 32)] * num_blocks)
    return PullRequest(request_id, HandoffRef("t", peer), units, 32 * num_blocks)


# ---- failed loads


async def test_failed_load_is_one_line_with_its_peer_reason_and_the_routers_request(reader):
    told = await reader.end(P2PConnectorMetadata(pulls=[pull(f"{ROUTER_ID}/0")]))
    (error,) = told.failed_recving.values()
    assert reader.lines("kv_load_failed") == [
        {
            "request_id": ROUTER_ID,
            "peer": NOBODY.address,
            "transport": "-",
            "reason": "peer_lost",
            "message": error.message,
            "verified_blocks": 0,
            "quarantined_blocks": 0,
        }
    ]


async def test_load_that_fails_in_part_is_one_line_however_many_blocks_were_wrong(reader):
    usage = TransferUsage(transport="tcp", verified_blocks=5)
    error = ErrorInfo.of(CorruptBlock("the owner's block 7: another digest"))
    reader.told(LoadEnded("r/0", usage, error, (1, 2, 3), quarantined_block_ids=(2, 3), peer=NOBODY.address))
    (line,) = reader.lines("kv_load_failed")
    assert (line["reason"], line["transport"], line["message"]) == ("digest", "tcp", error.message)
    assert (line["verified_blocks"], line["quarantined_blocks"]) == (5, 2)


async def test_load_that_is_refused_untried_names_the_peer_too(reader):
    refusal = Refusal(LayoutMismatch("float16 here, float32 there"), NOBODY)
    await reader.end(P2PConnectorMetadata(refused={"r/0": refusal}))
    (line,) = reader.lines("kv_load_failed")
    assert (line["peer"], line["reason"]) == (NOBODY.address, "layout")


async def test_loads_that_go_well_or_are_aborted_say_nothing(reader):
    told = await reader.end(P2PConnectorMetadata(pulls=[pull("aborted/0")], aborts=["aborted/0"]))
    assert told.finished_recving == {"aborted/0"}
    reader.told(LoadEnded("good/0", TransferUsage(transport="tcp", verified_blocks=5), peer=NOBODY.address))
    assert reader.lines("kv_load_failed") == []


async def test_loads_that_fail_alike_are_one_line_per_peer_and_reason(reader):
    peers, errors = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2"), (LeaseExpired("too late"), CorruptBlock("another digest"))
    for number in range(100):
        for peer in peers:
            for error in errors:
                usage, info = TransferUsage(transport="tcp"), ErrorInfo.of(error)
                reader.told(LoadEnded(f"r{number}/0", usage, info, ALL_BLOCKS, peer=peer))
    found = [(line["peer"], line["reason"]) for line in reader.lines("kv_load_failed")]
    assert found == [(peer, reason) for peer in peers for reason in ("stale", "digest")]


@pytest.mark.parametrize("number", [1, 2, 12])
async def test_failed_load_has_the_id_of_the_routers_log_in_every_attempt(reader, number):
    request_id = new_hex_id(RandomIds())
    on_the_wire = RequestState.wire_id.fget(SimpleNamespace(request_id=request_id, attempt=Attempt(number)))
    usage, error = TransferUsage(), ErrorInfo.of(LeaseExpired("too late"))
    reader.told(LoadEnded(choice_id(on_the_wire, 3), usage, error, ALL_BLOCKS, peer=NOBODY.address))
    (line,) = reader.lines("kv_load_failed")
    assert (line["request_id"], line["reason"]) == (request_id, "stale")


# ---- fences


async def test_fence_is_one_line_that_names_the_peer(reader):
    reader.told(PeerFenced(NOBODY, 17))
    assert reader.lines("kv_peer_fenced") == [{"peer": NOBODY.address, "quarantined_blocks": 17}]


# ---- transports in use


async def test_transport_is_in_use_from_the_first_handshake_until_its_peer_is_lost(start):
    owner, reader = await start("prefill"), await start()
    assert (owner.is_transport_used, reader.is_transport_used) == (0, 0)
    await reader.end(P2PConnectorMetadata(pulls=[pull("r/0", peer=PeerId(owner.connector.control_address, 1))]))
    assert (owner.is_transport_used, reader.is_transport_used) == (1, 1)
    await owner.connector.stop()
    async with asyncio.timeout(WAIT_S):
        while reader.is_transport_used:  # noqa: ASYNC110  polls a gauge
            await asyncio.sleep(0.01)


# ---- counters


async def test_control_messages_that_cannot_be_sent_are_counted(reader):
    assert reader.count("dropped_control_messages") == 0
    for address in ("driver://pigeon", ""):
        reader.told(SendControl(address, LeaseRenew(transfer_ids=("t",))))
    assert reader.count("dropped_control_messages") == 2


async def test_a_question_is_answered_by_what_other_threads_have_told_before(start):
    """The loop takes a question from its socket before it comes to what was posted for it: no reader is told of no lease."""
    owner = await start("prefill")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(owner.connector.control_address)
        socket.send(encode_control_message(LeaseRenew(transfer_ids=("t",), number=1)))
        time.sleep(0.2)  # noqa: ASYNC251 - the question lies in the socket when the loop goes on
        owner.connector.driver.post(LeaseGrant("t", "request", 1))
        assert await asyncio.to_thread(socket.poll, int(1000 * WAIT_S))
        assert decode_control_frame(socket.recv()).left_ms["t"] > 0


async def test_frames_of_strangers_are_counted_on_either_socket(start):
    owner = await start("prefill")
    (transport,) = owner.transports
    described = msgspec.msgpack.decode(transport.describe(), type=TcpMetadata)
    request = msgspec.msgpack.encode(ChunkRequest(FORMAT_VERSION, described.token + 1, 9, 0, (1,)))
    names = ("bad_control_frames", "bad_data_requests", "dropped_data_answers")
    assert [owner.count(name) for name in names] == [0, 0, 0]
    for address, frame in ((owner.connector.control_address, b"garbage"), (described.address, request)):
        with AsyncContext() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(address)
            await socket.send(frame)
            async with asyncio.timeout(WAIT_S):
                await socket.recv_multipart()
    assert [owner.count(name) for name in names] == [1, 1, 0]


async def test_events_of_other_threads_after_the_stop_are_ignored(start):
    owner = await start("prefill")
    await owner.connector.stop()
    await asyncio.to_thread(owner.connector.driver.post, LeaseGrant("t", "r", 1))
    assert owner.connector.driver.agent is None


# ---- beginnings of prompts


async def test_answer_that_is_not_used_in_time_wakes_the_engine(reader):
    driver, identity = reader.connector.driver, reader.connector.driver._host.identity
    source = KVSource(engine_id="p", incarnation=1, control_address=NOBODY.address, num_tokens=32)
    driver.handle(AskPrefix("r", source, 32, bytes(32), patience_s=0.05))
    handoff = KVHandoff(
        transfer_id="px-1",
        engine_id="p",
        incarnation=1,
        control_address=NOBODY.address,
        model_fingerprint=identity.model_fingerprint,
        layout=identity.layout,
        groups=(),
        num_tokens=32,
        lease_ms=1000,
    )
    driver.handle(ControlReceived(NOBODY.address, PrefixHeld(number=1, kv_handoff=handoff)))
    (answer,) = reader.connector.worker.get_transfer_results(set()).worker_meta.reports
    assert answer.handoff is not None
    reader.woken.clear()
    async with asyncio.timeout(WAIT_S):
        await reader.woken.wait()
    assert reader.connector.worker.get_transfer_results(set()).worker_meta.reports == [PrefixExpired("r")]
