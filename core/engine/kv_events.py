"""Publishes what changes in a worker's prefix cache, for routers and stores that follow it.

Owns one PUB socket. Knows nothing of its subscribers: one that is slow, late or gone loses messages, which it detects by
their sequence numbers, and the engine never waits. Events are published after each step, on the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from core.errors import ConfigError
from core.kv.events import BlockRemoved, BlockStored, KVCacheEvent
from core.log import event
from core.wire.kv_events import (
    SEQUENCE_BYTES,
    AllBlocksClearedMessage,
    BlockRemovedMessage,
    BlockStoredMessage,
    KVEventBatch,
    KVEventMessage,
)
from core.wire.sockets import CLOSE_LINGER_MS, binds_ipv6, warn_if_exposed

MAX_QUEUED_BATCHES = 10_000  # per subscriber

logger = logging.getLogger(__name__)


class KVEventPublisher:
    """Sends batches of events under one topic. One thread at a time.

    Raises: ConfigError if the address cannot be bound.
    """

    def __init__(self, address: str, topic: str, wall_clock: Callable[[], float] = time.time) -> None:
        self._topic = topic.encode()
        self._wall_clock = wall_clock
        self._encoder = msgspec.msgpack.Encoder()
        self._next_number = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.sndhwm = MAX_QUEUED_BATCHES
        self._socket.ipv6 = binds_ipv6(address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot bind {address}: {error}", param="worker.kv_events_address") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        warn_if_exposed("worker.kv_events_address", self.address)
        logger.info(event("kv_events", address=self.address, topic=topic))

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Send a batch; none if there is nothing to tell."""
        if not events:
            return
        batch = KVEventBatch(ts=self._wall_clock(), events=tuple([_message(happened) for happened in events]))
        number = self._next_number.to_bytes(SEQUENCE_BYTES, "big")
        self._next_number += 1
        self._socket.send_multipart([self._topic, number, self._encoder.encode(batch)], zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket and end its thread."""
        self._context.destroy(linger=CLOSE_LINGER_MS)


def _message(happened: KVCacheEvent) -> KVEventMessage:
    match happened:
        case BlockStored():
            return BlockStoredMessage(
                block_hashes=happened.block_hashes,
                parent_block_hash=happened.parent_hash,
                token_ids=happened.token_ids,
                block_size=happened.block_size,
                group_idx=happened.group_id,
            )
        case BlockRemoved():
            return BlockRemovedMessage(block_hashes=happened.block_hashes, group_idx=happened.group_id)
        case _:
            return AllBlocksClearedMessage()
