"""Publishes what changes in a worker's prefix cache, for routers and stores that follow it.

Owns one PUB socket, and a ROUTER socket that repeats past batches, with a thread. Knows nothing of its subscribers: one that is
slow, late or gone loses messages, which it detects by their sequence numbers, and the engine never waits. Events are published
after each step, on the engine's thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import zmq

from core.errors import ConfigError
from core.kv.events import BlockRemoved, BlockStored, KVCacheEvent
from core.kv.hashing import ExtraKey
from core.kv.spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec
from core.log import event
from core.wire.contexts import started_context
from core.wire.kv_events import (
    END_OF_REPLAY,
    MEDIUM_GPU,
    SEQUENCE_BYTES,
    AllBlocksClearedMessage,
    BlockRemovedMessage,
    BlockStoredMessage,
    EventKey,
    KVEventBatch,
    KVEventMessage,
)
from core.wire.sockets import CLOSE_LINGER_MS, binds_ipv6, warn_if_exposed

MAX_QUEUED_BATCHES = 10_000  # per subscriber
MAX_REPLAYED_BATCHES = 10_000  # vLLM's default; older ones are forgotten
_REPLAY_FRAMES = 3  # of a request: identity, empty, number of the first batch
_STOP_ADDRESS = "inproc://stop"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EventGroup:
    """What consumers learn of one KV cache group: vLLM's name of its attention type, and its window in tokens."""

    kind: str
    sliding_window: int | None = None


def event_group(spec: KVCacheSpec) -> EventGroup:
    """Return the description of a group with this spec."""
    match spec:
        case SlidingWindowSpec():
            return EventGroup("sliding_window", spec.sliding_window)
        case ChunkedLocalAttentionSpec():
            return EventGroup("chunked_local_attention")
        case _:
            return EventGroup("full_attention")


class KVEventPublisher:
    """Sends batches of events under one topic. One thread at a time.

    ``groups`` are those of the KV cache, by group id. With ``replay_address`` a subscriber that lacks batches asks a ROUTER
    socket there, as in vLLM: frames empty and the first number wanted (8 bytes, big-endian). It gets each batch from there on
    as empty, topic, number and payload, then the number -1.
    Raises: ConfigError if an address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        topic: str,
        wall_clock: Callable[[], float] = time.time,
        groups: Sequence[EventGroup] = (),
        replay_address: str = "",
    ) -> None:
        self._topic = topic.encode()
        self._wall_clock = wall_clock
        self._groups = tuple(groups)
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = started_context(zmq.Context)
        self._replay: _Replay | None = None
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = MAX_QUEUED_BATCHES
        self.address = self._bind(self._socket, address, "worker.kv_events_address")
        self.replay_address = ""
        if replay_address:
            router = self._context.socket(zmq.ROUTER)
            router.sndhwm = MAX_REPLAYED_BATCHES + 1
            self.replay_address = self._bind(router, replay_address, "worker.kv_events_replay_address")
            self._replay = _Replay(self._context, router, self._topic)
        logger.info(event("kv_events", address=self.address, replay_address=self.replay_address, topic=topic))

    def _bind(self, socket: zmq.Socket[bytes], address: str, setting: str) -> str:
        socket.ipv6 = binds_ipv6(address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind {address}: {error}", param=setting) from None
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        warn_if_exposed(setting, bound)
        return bound

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch; none if there is nothing to tell."""
        if not events:
            return
        messages = tuple([self._message(happened) for happened in events])
        batch = KVEventBatch(ts=self._wall_clock(), events=messages, data_parallel_rank=0)
        number = self._next_number.to_bytes(SEQUENCE_BYTES, "big")
        payload = self._encoder.encode(batch)
        if self._replay is not None:
            self._replay.keep(self._next_number, payload)
        self._next_number += 1
        self._socket.send_multipart([self._topic, number, payload], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets and end the thread."""
        if self._replay is not None:
            self._replay.close()
            self._replay = None
        self._context.destroy(linger=CLOSE_LINGER_MS)

    def _message(self, happened: KVCacheEvent) -> KVEventMessage:
        match happened:
            case BlockStored():
                return self._stored(happened)
            case BlockRemoved():
                return BlockRemovedMessage(happened.block_hashes, MEDIUM_GPU, happened.group_id)
            case _:
                return AllBlocksClearedMessage()

    def _stored(self, happened: BlockStored) -> BlockStoredMessage:
        is_known = happened.group_id < len(self._groups)
        group = self._groups[happened.group_id] if is_known else EventGroup("full_attention")
        num_blocks = len(happened.block_hashes)
        return BlockStoredMessage(
            block_hashes=happened.block_hashes,
            parent_block_hash=happened.parent_hash,
            token_ids=happened.token_ids,
            block_size=happened.block_size,
            lora_id=None,
            medium=MEDIUM_GPU,
            lora_name=next((str(key[1]) for keys in happened.extra_keys for key in keys if key[0] == "lora"), None),
            extra_keys=tuple(tuple(map(_event_key, keys)) or None for keys in happened.extra_keys or ((),) * num_blocks),
            group_idx=happened.group_id,
            kv_cache_spec_kind=group.kind,
            kv_cache_spec_sliding_window=group.sliding_window,
        )


class _Replay:
    """Answers requests for past batches on a thread of its own, which owns the ROUTER socket. vLLM calls it replay."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router: zmq.Socket[bytes], topic: bytes) -> None:
        self._topic = topic
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_REPLAYED_BATCHES)
        self._lock = threading.Lock()
        self._stop = context.socket(zmq.PAIR)
        self._stop.bind(_STOP_ADDRESS)
        stopped = context.socket(zmq.PAIR)
        stopped.connect(_STOP_ADDRESS)
        self._thread = threading.Thread(target=self._run, args=(router, stopped), name="kv-events-replay", daemon=True)
        self._thread.start()

    def keep(self, number: int, payload: bytes) -> None:
        """Remember a batch. Any thread."""
        with self._lock:
            self._kept.append((number, payload))

    def close(self) -> None:
        """End the thread; it closes its sockets."""
        self._stop.send(b"")
        self._thread.join()

    def _run(self, router: zmq.Socket[bytes], stopped: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stopped, zmq.POLLIN)
        while stopped not in dict(poller.poll()):
            self._answer(router, router.recv_multipart())
        router.close(linger=CLOSE_LINGER_MS)
        stopped.close(linger=0)

    def _answer(self, router: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Send what a subscriber asks for; a queue that is full drops the rest, so the subscriber asks again."""
        if len(frames) != _REPLAY_FRAMES or frames[1] or len(frames[2]) != SEQUENCE_BYTES:
            return
        first = int.from_bytes(frames[2], "big")
        with self._lock:
            wanted = [entry for entry in self._kept if entry[0] >= first]
        for number, payload in wanted:
            router.send_multipart([frames[0], b"", self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload])
        router.send_multipart([frames[0], b"", b"", END_OF_REPLAY, b""])


def _event_key(key: ExtraKey) -> EventKey:
    """Return an extra key as vLLM publishes it: without its tag."""
    match key:
        case ("mm", bytes(identifier), int(offset)):
            return identifier.hex(), offset
        case (_, str(name)):
            return name
        case _:
            raise ValueError(f"unknown extra key {key!r}")
