"""A vLLM server's prefix cache under the names that routers compute: from vLLM's KV events to a ``ContentFeed``.

vLLM names blocks by hashes of its own, which a router cannot compute, but its events hold the tokens. ``RenamedBlocks`` chains
our hashes over them. Blocks with more than tokens in their hashes (adapters, images, salts) are left out, and so are blocks
after those, which is logged once for each reason. Of a model with several groups the first one with full attention is followed,
in GPU memory; that the others are not is logged only while there is none to follow. ``KVEventReader`` reads the events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq
import zmq.asyncio
from msgspec import Meta

from core.constants import HASH_BLOCK_SIZE
from core.errors import ProtocolError
from core.kv.content_feed import ContentFeed
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from core.kv.hashing import BlockHasher
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.contexts import started_context
from core.wire.kv_events import END_OF_REPLAY, MEDIUM_GPU, SEQUENCE_BYTES

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0  # for the first batch
REPLAY_PAUSE_S = 1.0  # between two batches of one answer
MAX_MESSAGE_BYTES = 64 << 20
_FULL_ATTENTION = frozenset({None, "full_attention", "mla_attention"})
_GPU = frozenset({None, MEDIUM_GPU})
_NUM_FRAMES = 3  # topic, number, batch

_TokenId = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
_EngineHash = bytes | int  # depends on the server's hash function


class _Stored(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    block_hashes: tuple[_EngineHash, ...]
    parent_block_hash: _EngineHash | None
    token_ids: tuple[_TokenId, ...]
    block_size: Annotated[int, Meta(ge=1)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[tuple[object, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _Removed(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: tuple[_EngineHash, ...]
    medium: str | None = None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: tuple[_Stored | _Removed | _Cleared, ...]
    data_parallel_rank: int | None = None


class RenamedBlocks:
    """The blocks of one server under our names."""

    def __init__(self, model_fingerprint: bytes, feed: ContentFeed) -> None:
        self._hasher = BlockHasher(model_fingerprint)
        self._feed = feed
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._names: dict[_EngineHash, list[bytes]] = {}  # of a block, our hash of each 16 tokens
        self._group: int | None = None  # the one that is followed; None before its first event
        self._left_out: set[str] = set()  # the reasons that were logged

    def __len__(self) -> int:
        return len(self._names)

    def apply(self, payload: bytes) -> None:
        """Take in one batch.

        Raises:
            ProtocolError: it is none of vLLM's.
        """
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the server's KV events cannot be read: {error}") from None
        events: list[KVCacheEvent] = []
        strange: _Stored | None = None
        for happened in batch.events:
            match happened:
                case _Stored() if self._is_followed(happened):
                    events += self._store(happened)
                case _Stored():
                    strange = strange or happened
                case _Removed():
                    events += self._remove(happened)
                case _:
                    self._names.clear()
                    events.append(AllBlocksCleared())
        if strange is not None and self._group is None:  # a step stores blocks of all groups, in any order
            is_elsewhere = strange.medium not in _GPU
            self._leave_out(strange, "not in GPU memory" if is_elsewhere else "not the group with full attention")
        self._feed.publish(events)

    def clear(self) -> None:
        """Forget all blocks, since events were lost."""
        self._names.clear()
        self._feed.publish([AllBlocksCleared()])

    def _store(self, stored: _Stored) -> list[KVCacheEvent]:
        chain = self._parent_chain(stored)
        has_more = stored.lora_id is not None or any(stored.extra_keys or ())
        size = stored.block_size
        if has_more:
            return self._leave_out(stored, "hashes of more than tokens")
        if size % HASH_BLOCK_SIZE or len(stored.token_ids) != size * len(stored.block_hashes):
            return self._leave_out(stored, f"no whole blocks of {HASH_BLOCK_SIZE} tokens")
        if chain is None:
            return self._leave_out(stored, "unknown beginning")
        num_before = len(chain)
        # Only the last value before these tokens enters the chain, so the tokens before it need not be known.
        padded = array("i", bytes(4 * HASH_BLOCK_SIZE * num_before)) + array("i", stored.token_ids)
        self._hasher.extend(chain, padded)
        new = chain[num_before:]
        step = size // HASH_BLOCK_SIZE
        for index, engine_hash in enumerate(stored.block_hashes):
            self._names[engine_hash] = new[index * step : (index + 1) * step]
        return [BlockStored(tuple(new), None, HASH_BLOCK_SIZE, 0)]

    def _parent_chain(self, stored: _Stored) -> list[bytes] | None:
        """Return a chain that ends before the blocks; None if what precedes them is unknown."""
        if stored.parent_block_hash is None:
            return []
        names = self._names.get(stored.parent_block_hash)
        return names[-1:] if names is not None else None

    def _remove(self, removed: _Removed) -> list[KVCacheEvent]:
        if removed.medium not in _GPU or (removed.group_idx or 0) != self._group:
            return []
        gone = [name for value in removed.block_hashes for name in self._names.pop(value, ())]
        return [BlockRemoved(tuple(gone), 0)] if gone else []

    def _is_followed(self, stored: _Stored) -> bool:
        """Return True for blocks of the followed group in GPU memory; the first with full attention there are of that group."""
        if stored.medium not in _GPU:
            return False
        number = stored.group_idx or 0
        if self._group is None and stored.kv_cache_spec_kind in _FULL_ATTENTION:
            self._group = number
        return number == self._group

    def _leave_out(self, stored: _Stored, reason: str) -> list[KVCacheEvent]:
        """Say once for each reason that routers do not learn of some blocks: their prompts are placed by wait and load."""
        if reason not in self._left_out:
            self._left_out.add(reason)
            fields = {"block_size": stored.block_size, "kind": stored.kv_cache_spec_kind or "", "lora": stored.lora_name or ""}
            logger.warning(event("kv_events_left_out", reason=reason, **fields))
        return []


class KVEventReader:
    """Reads a server's events until closed. Missed batches are requested from ``replay_address``; empty = there is none."""

    def __init__(self, address: str, replay_address: str, blocks: RenamedBlocks) -> None:
        self._address, self._replay_address, self._blocks = address, replay_address, blocks
        self._context = started_context(zmq.asyncio.Context)
        self._next_number = 0
        self._replayed: dict[int, bytes] = {}  # since the last batch that had not been replayed before
        self._task: asyncio.Task[None] | None = None
        self._limited_log = LimitedLog(logger, time.monotonic)

    def start(self) -> None:
        """Begin to read."""
        self._task = asyncio.create_task(self._read())
        self._task.add_done_callback(self._on_end)

    async def close(self) -> None:
        """End; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._context.destroy(linger=0)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """A task that was not cancelled has died by a bug of ours: nothing is known from now on."""
        if not task.cancelled():
            logger.error(event("kv_events_reader_died", error=repr(task.exception())))
            self._blocks.clear()

    async def _read(self) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.subscribe(b"")
        socket.connect(self._address)
        if self._replay_address:
            await self._read_past()
        while True:
            frames = await socket.recv_multipart()
            try:
                await self._on_frames(frames)
            except ProtocolError as error:
                self._lose(error.message)

    async def _on_frames(self, frames: Sequence[bytes]) -> None:
        if len(frames) != _NUM_FRAMES or len(frames[1]) != SEQUENCE_BYTES:
            raise ProtocolError(f"KV events of {len(frames)} frames")
        number = int.from_bytes(frames[1], "big")
        if self._replayed.get(number) == frames[2]:
            return
        self._replayed.clear()
        if number < self._next_number:  # the server began anew
            self._blocks.clear()
            self._next_number = 0
        if number > self._next_number:
            await self._catch_up(number)
        if number == self._next_number:
            self._take(number, frames[2])

    def _take(self, number: int, payload: bytes) -> None:
        """Apply a batch. One that cannot be read makes all that is known uncertain; those after it are applied all the same."""
        self._next_number = number + 1
        try:
            self._blocks.apply(payload)
        except ProtocolError as error:
            self._lose(error.message)

    async def _read_past(self) -> None:
        """Read what the server has published before now, if it still has all of it: it may publish nothing for long."""
        found = await self._replay(0)
        if found and found[0][0] == 0:
            self._take_replayed(found)
            await self._catch_up(found[-1][0] + 1)

    async def _replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return batches from a number on that the server still has, in order; none without an answer.

        There may be holes: a server drops what does not fit into its queue, and says nothing of it.
        """
        found = await replay(self._context, self._replay_address, first) if self._replay_address else []
        return [(number, payload) for number, payload in found if number >= first]

    async def _catch_up(self, number: int) -> None:
        """Read what was missed before a batch, again from each hole of an answer.

        What cannot be had again makes all that is known uncertain.
        """
        while (first := self._next_number) < number:
            found = await self._replay(first)
            self._next_number = found[0][0] if found else number
            if self._next_number != first:
                self._lose(f"batches {first} to {self._next_number - 1} are missing")
            self._take_replayed(found)

    def _take_replayed(self, found: list[tuple[int, bytes]]) -> None:
        """Apply what a replay has brought before its first hole, and remember it: it may come once more by subscription."""
        for number, payload in found:
            if number != self._next_number:
                return
            self._replayed[number] = payload
            self._take(number, payload)

    def _lose(self, why: str) -> None:
        self._limited_log.warning("kv_events_lost", address=self._address, reason=why)
        self._blocks.clear()


async def replay(context: zmq.asyncio.Context, address: str, first: int) -> list[tuple[int, bytes]]:
    """Ask a replay socket for the batches from a number on; return those that it still has, in order.

    A message that is no batch ends the answer, as its proper end does, and so does silence: that end may have been dropped.
    """
    found: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
        while True:
            try:
                async with asyncio.timeout(REPLAY_PAUSE_S if found else REPLAY_TIMEOUT_S):
                    frames = await socket.recv_multipart()
            except TimeoutError:
                return found
            number, payload = frames[-2:] if len(frames) > 1 else (END_OF_REPLAY, b"")
            if number == END_OF_REPLAY or len(number) != SEQUENCE_BYTES:
                return found
            found.append((int.from_bytes(number, "big"), payload))
