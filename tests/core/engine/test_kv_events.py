"""A real subscriber follows the prefix cache of a real engine; and the exact shape of what it gets."""

import itertools
import logging
import re

import msgspec
import pytest
import zmq

from core.config import load_config
from core.engine.kv_events import KVEventPublisher
from core.errors import ConfigError
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.kv.hashing import BlockHasher
from core.request import NewRequest, Request
from core.wire.kv_events import BlockRemovedMessage, BlockStoredMessage, KVEventBatch
from core.wire.sampling import SamplingParams

ANY = "tcp://127.0.0.1:0"
WAIT_MS = 20_000
A, B, C = bytes(16), bytes(15) + b"b", bytes(15) + b"c"


class Subscriber:
    """A SUB socket, as a router would have one."""

    def __init__(self, context):
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.subscribe(b"kv@")

    def join(self, address, say_something):
        """Connect and read until a message has arrived and none is left; from then on every message arrives."""
        self.socket.connect(address)
        for _ in range(WAIT_MS // 10):
            say_something()
            if self.socket.poll(10):
                break
        while self.socket.poll(50):
            _, self.last_number, _ = self.receive()

    def receive(self):
        assert self.socket.poll(WAIT_MS), "no batch came"
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload


@pytest.fixture
def subscriber():
    context = zmq.Context()
    yield Subscriber(context)
    context.destroy(linger=0)


@pytest.fixture
def publisher():
    publisher = KVEventPublisher(ANY, "kv@w0@tiny", wall_clock=lambda: 12.5)
    yield publisher
    publisher.close()


def test_events_have_the_field_s_shape_and_numbers_without_gaps(publisher, subscriber):
    subscriber.join(publisher.address, lambda: publisher.publish([AllBlocksCleared()]))
    publisher.publish([BlockStored((A, B), None, 16, 0, tuple(range(32))), BlockStored((C,), B, 16, 1)])
    publisher.publish([])
    publisher.publish([BlockRemoved((A,), 1), AllBlocksCleared()])
    topic, number, payload = subscriber.receive()
    assert (topic, number) == (b"kv@w0@tiny", subscriber.last_number + 1)
    common = {"type": "BlockStored", "block_size": 16, "lora_id": None, "medium": None, "lora_name": None}
    assert msgspec.msgpack.decode(payload) == {
        "ts": 12.5,
        "events": [
            common | {"block_hashes": [A, B], "parent_block_hash": None, "token_ids": list(range(32)), "group_idx": 0},
            common | {"block_hashes": [C], "parent_block_hash": B, "token_ids": [], "group_idx": 1},
        ],
        "data_parallel_rank": None,
    }
    _, number, payload = subscriber.receive()
    assert number == subscriber.last_number + 2
    assert msgspec.msgpack.decode(payload)["events"] == [
        {"type": "BlockRemoved", "block_hashes": [A], "medium": None, "group_idx": 1},
        {"type": "AllBlocksCleared"},
    ]


def test_nobody_listens_and_nobody_waits(publisher):
    for _ in range(100):
        publisher.publish([AllBlocksCleared()])


def test_taken_address_is_a_configuration_error(publisher):
    with pytest.raises(ConfigError, match="cannot bind") as refused:
        KVEventPublisher(publisher.address, "kv@w1@tiny")
    assert refused.value.param == "worker.kv_events_address"


def test_address_that_other_machines_reach_is_warned_about(caplog):
    KVEventPublisher("tcp://0.0.0.0:0", "kv@w0@tiny").close()
    assert "setting=worker.kv_events_address" in caplog.text


def test_events_without_prefix_caching_are_a_configuration_error():
    with pytest.raises(ConfigError, match=r"cache\.enable_prefix_caching"):
        load_config(assignments=["cache.kv_events=true", "cache.enable_prefix_caching=false"])


# ---- from the engine -----------------------------------------------------------------------------------------------------


class Server:
    """Runs requests on an engine, each with another prompt unless it is given."""

    def __init__(self, engine):
        self.engine = engine
        self.numbers = itertools.count()

    def serve(self, prompt=None):
        number = next(self.numbers)
        prompt = prompt or [10 + number % 190, 10 + number // 190] * 10
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        self.engine.add_request(NewRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling))
        while self.engine.has_requests():
            self.engine.step()


def test_subscriber_hears_of_every_hit_and_every_eviction(build_tiny, subscriber, caplog):
    caplog.set_level(logging.INFO)
    built = build_tiny(cache__kv_events=True, cache__num_blocks=8, worker__engine_id="w0", model__served_name="tiny")
    address = re.search(r"event=kv_events address=(\S+)", caplog.text)[1]
    server = Server(built.engine)
    subscriber.join(address, server.serve)

    prompt = list(range(50, 90))
    server.serve(prompt)
    topic, number, payload = subscriber.receive()
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    stored = [event for event in batch.events if isinstance(event, BlockStoredMessage)]
    request = Request(
        NewRequest(request_id="same", prompt_token_ids=prompt, sampling=SamplingParams()),
        BlockHasher(built.model_fingerprint, 16),
    )
    assert (topic, number) == (b"kv@w0@tiny", subscriber.last_number + 1)
    assert [token for event in stored for token in event.token_ids] == prompt[:32]
    hits = [block_hash for event in stored for block_hash in event.block_hashes]
    assert hits == [bytes(block_hash) for block_hash in request.block_hashes]

    for _ in range(8):
        server.serve()
    removed = set()
    while not removed.issuperset(hits):
        _, _, payload = subscriber.receive()
        batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
        for event in batch.events:
            if isinstance(event, BlockRemovedMessage):
                removed.update(event.block_hashes)
    assert built.engine.scheduler.take_events() == []


def test_nothing_is_collected_unless_asked_for(build_tiny, caplog):
    caplog.set_level(logging.INFO)
    engine = build_tiny().engine
    Server(engine).serve(list(range(50, 90)))
    assert engine.scheduler.take_events() == []
    assert "kv_events" not in caplog.text
