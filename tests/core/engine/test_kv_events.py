"""A real subscriber follows the prefix cache of a real engine; and the exact shape of what it gets."""

import itertools
import json
import logging
import re
from pathlib import Path

import msgspec
import pytest
import zmq

from core.config import load_config
from core.engine.kv_events import MAX_REPLAYED_BATCHES, EventGroup, KVEventPublisher, event_group
from core.errors import ConfigError
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.kv.hashing import BlockHasher
from core.kv.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from core.request import NewRequest, Request
from core.wire.kv_events import END_OF_REPLAY, BlockRemovedMessage, BlockStoredMessage, KVEventBatch
from core.wire.sampling import SamplingParams

ANY = "tcp://127.0.0.1:0"
WAIT_MS = 20_000
GROUPS = (EventGroup("full_attention"), EventGroup("sliding_window", 512))
GOLDEN = Path(__file__).parents[1] / "wire" / "golden_kv_events.json"  # made by tests/support/vllm_kv_events.py
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
    publisher = KVEventPublisher(ANY, "kv@w0@tiny", wall_clock=lambda: 12.5, groups=GROUPS)
    yield publisher
    publisher.close()


ALL = tuple(range(48))
IMAGE = bytes.fromhex("ab" * 16)
EXTRA_KEYS = (
    (("lora", "french"), ("mm", IMAGE, 4), ("cache_salt", "tenant")),
    (("lora", "french"), ("mm", IMAGE, -12)),
    (("lora", "french"),),
)
EVENTS = {  # those of tests/support/vllm_kv_events.py, as our pool tells them
    "stored": [BlockStored((A, B), None, 16, 0, ALL[:32])],
    "window": [BlockStored((C,), B, 16, 1, (70000,) * 16)],
    "extra_keys": [BlockStored((A, B, C), None, 16, 0, ALL, EXTRA_KEYS)],
    "removed": [BlockRemoved((A,), 1), AllBlocksCleared()],
}


@pytest.mark.parametrize("name", EVENTS)
def test_published_bytes_are_those_of_vllm_s_own_structs(name, publisher, subscriber):
    subscriber.join(publisher.address, lambda: publisher.publish([AllBlocksCleared()]))
    publisher.publish(EVENTS[name])
    _, _, payload = subscriber.receive()
    assert payload.hex() == json.loads(GOLDEN.read_text())[name]


def test_batches_are_numbered_without_gaps(publisher, subscriber):
    subscriber.join(publisher.address, lambda: publisher.publish([AllBlocksCleared()]))
    for events in ([AllBlocksCleared()], [], [AllBlocksCleared()]):
        publisher.publish(events)
    assert [subscriber.receive()[:2] for _ in range(2)] == [
        (b"kv@w0@tiny", subscriber.last_number + 1),
        (b"kv@w0@tiny", subscriber.last_number + 2),
    ]


class Replayer:
    """A REQ-like client of the replay socket, as vLLM's subscribers are."""

    def __init__(self, context, address):
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)

    def ask(self, first):
        self.socket.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while True:
            assert self.socket.poll(WAIT_MS), "the replay has no end"
            empty, topic, number, payload = self.socket.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert (topic, payload) == (b"", b"")
                return batches
            batches.append((topic, int.from_bytes(number, "big"), payload))


@pytest.fixture
def replaying():
    publisher = KVEventPublisher(ANY, "kv@w0@tiny", wall_clock=lambda: 12.5, groups=GROUPS, replay_address=ANY)
    context = zmq.Context()
    yield publisher, Replayer(context, publisher.replay_address)
    context.destroy(linger=0)
    publisher.close()


def test_lost_batches_are_replayed_from_the_number_asked_for(replaying):
    publisher, replayer = replaying
    for events in EVENTS.values():
        publisher.publish(events)
    golden = [bytes.fromhex(payload) for payload in json.loads(GOLDEN.read_text()).values()]
    assert replayer.ask(0) == [(b"kv@w0@tiny", number, payload) for number, payload in enumerate(golden)]
    assert replayer.ask(2) == [(b"kv@w0@tiny", number, golden[number]) for number in (2, 3)]
    assert replayer.ask(4) == []


def test_malformed_replay_request_has_no_answer_and_does_no_harm(replaying):
    publisher, replayer = replaying
    publisher.publish([AllBlocksCleared()])
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b""]):
        replayer.socket.send_multipart(frames)
    assert len(replayer.ask(0)) == 1
    assert not replayer.socket.poll(0)


@pytest.mark.slow
def test_only_the_newest_batches_are_kept_for_a_replay(replaying):
    publisher, replayer = replaying
    for _ in range(MAX_REPLAYED_BATCHES + 3):
        publisher.publish([AllBlocksCleared()])
    numbers = [number for _, number, _ in replayer.ask(0)]
    assert numbers == list(range(3, MAX_REPLAYED_BATCHES + 3))


def test_taken_replay_address_is_a_configuration_error(publisher):
    with pytest.raises(ConfigError, match="cannot bind") as refused:
        KVEventPublisher(ANY, "kv@w1@tiny", replay_address=publisher.address)
    assert refused.value.param == "worker.kv_events_replay_address"


def test_groups_are_described_by_attention_type_and_window():
    sizes = {"block_size": 16, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 4}
    assert event_group(FullAttentionSpec(**sizes)) == EventGroup("full_attention")
    assert event_group(SlidingWindowSpec(**sizes, sliding_window=512)) == EventGroup("sliding_window", 512)
    assert event_group(ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=64)) == EventGroup("chunked_local_attention")


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
    assert {event.kv_cache_spec_kind for event in stored} == {"full_attention"}
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
