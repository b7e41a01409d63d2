"""A model whose KV cache is a hash of what it has read, so that any wrong block changes the tokens.

Takes the place of ``core.engine.runner.ModelRunner``: it obeys ``SchedulerOutput``, keeps its "KV" in a block-major pool that
connectors can register and copy, and runs the worker side of a connector. It has no weights and no torch.

Each KV cache group has an attention and a block table of its own; a slot holds the 8 bytes of one token in one group. Like
attention, the entry of a token depends on *all* entries that it attends to, in every group, as they are in the blocks:

    kv[g][p]   = H(g, token[p], entries of group 0 visible before p, .. of group 1, ..)   written to the slot of position p
    next token = H("next", entries of group 0 visible up to p, .. of group 1, ..) mod vocab   if p is the last token known

A block that was never written, reused, mixed up, or copied wrongly therefore changes every later entry and token that attends
to it, and a table that lacks a block that is read or written is an error at once. In an image, token[p] is its embedding
(``core.testing.hash_encoder``). ``expected_tokens`` computes the same without blocks: the oracle. Sampling parameters are
ignored.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.connector import KVConnectorWorker
from core.kv.block import NULL_BLOCK_ID
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import SealTable, each_by_itself, layout_fingerprint, map_seal_memory, num_landing_rows
from core.kv.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from core.request import KVConnectorOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from core.testing.hash_encoder import HashEncoder
from core.wire.kv import HNC, KVLayoutInfo

SLOT_BYTES = 8  # of the layout below: a key and a value of one float32 each
DEFAULT_VOCAB_SIZE = 50_000
_NEVER_WRITTEN = 0xEE


@dataclass(frozen=True, slots=True)
class HashAttention:
    """The tokens visible in a group: all before them, or the last ``window`` with their own, or those of their ``chunk``."""

    window: int = 0
    chunk: int = 0

    @property
    def sees_all(self) -> bool:
        """True for full attention."""
        return not self.window and not self.chunk

    def first_seen(self, position: int) -> int:
        """Return the first position that a token attends to."""
        if self.chunk:
            return position - position % self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def spec(self, block_size: int) -> KVCacheSpec:
        """Return its specification for the KV cache manager."""
        heads = {"block_size": block_size, "num_kv_heads": 1, "head_dim": 1, "dtype_bytes": SLOT_BYTES // 2}
        if self.chunk:
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.chunk, **heads)
        return SlidingWindowSpec(sliding_window=self.window, **heads) if self.window else FullAttentionSpec(**heads)


FULL = (HashAttention(),)


class _Seen:
    """The entries of one group that later tokens attend to. ``entries`` are those from position ``first`` on."""

    def __init__(self, attention: HashAttention, first: int, entries: bytes) -> None:
        self.attention = attention
        self.all = hashlib.blake2b(entries, digest_size=SLOT_BYTES)  # of full attention
        self._first = first
        self._entries = bytearray() if attention.sees_all else bytearray(entries)

    def append(self, entry: bytes) -> None:
        """Add the entry of the next position."""
        if self.attention.sees_all:
            self.all.update(entry)
        else:
            self._entries += entry

    def digest(self, position: int) -> bytes:
        """Return the digest of the entries that a token at this position attends to."""
        if self.attention.sees_all:
            return self.all.digest()
        start = self.attention.first_seen(position) - self._first
        return hashlib.blake2b(self._entries[start * SLOT_BYTES :], digest_size=SLOT_BYTES).digest()


class _Prefix:
    """The state before the next position: ``seen`` of each group. One group of full attention takes one hash per token."""

    def __init__(self, seen: Sequence[_Seen], position: int) -> None:
        self._seen = seen
        self._position = position
        self._only = seen[0].all if len(seen) == 1 and seen[0].attention.sees_all else None

    def append(self, token_id: int) -> list[bytes]:
        """Return the entries of the next position, which holds ``token_id``, one per group, and add them."""
        if self._only is not None:
            state = self._only.copy()
            state.update(token_id.to_bytes(8, "little", signed=True))
            entry = state.digest()
            self._only.update(entry)
            return [entry]
        base = hashlib.blake2b(token_id.to_bytes(8, "little", signed=True), digest_size=SLOT_BYTES)
        for seen in self._seen:
            base.update(seen.digest(self._position))
        entries = []
        for group_id, seen in enumerate(self._seen):
            state = base.copy()
            state.update(bytes([group_id]))
            entries.append(state.digest())
            seen.append(entries[-1])
        self._position += 1
        return entries

    def next_token(self, vocab_size: int) -> int:
        """Return the token that follows."""
        state = hashlib.blake2b(b"next", digest_size=SLOT_BYTES)
        for seen in self._seen:
            state.update(seen.digest(self._position - 1))
        return int.from_bytes(state.digest(), "little") % vocab_size


def _empty_prefix(attentions: Sequence[HashAttention]) -> _Prefix:
    return _Prefix([_Seen(attention, 0, b"") for attention in attentions], 0)


def expected_tokens(
    token_ids: Sequence[int],
    num_tokens: int,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    attentions: Sequence[HashAttention] = FULL,
) -> list[int]:
    """Return the ``num_tokens`` tokens that a ``HashModel`` with an intact KV cache generates after ``token_ids``."""
    prefix = _empty_prefix(attentions)
    for token_id in token_ids:
        prefix.append(token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(prefix.next_token(vocab_size))
        prefix.append(output[-1])
    return output


def expected_kv(token_ids: Sequence[int], attentions: Sequence[HashAttention] = FULL, group_id: int = 0) -> bytes:
    """Return the entries of these tokens in an intact KV cache, for a group, ``SLOT_BYTES`` each."""
    prefix = _empty_prefix(attentions)
    return b"".join(prefix.append(token_id)[group_id] for token_id in token_ids)


def hash_model_kv_config(num_blocks: int, block_size: int, attentions: Sequence[HashAttention] = FULL) -> KVCacheConfig:
    """Return the cache configuration that matches the pool of a ``HashModel``; block 0 is the null block."""
    groups = tuple(KVCacheGroup((group_id,), attention.spec(block_size)) for group_id, attention in enumerate(attentions))
    return KVCacheConfig(num_blocks, groups)


def hash_model_layout(block_size: int, num_groups: int = 1, dtype: str = "float32") -> KVLayoutInfo:
    """Return the layout of a ``HashModel``'s block. With another ``dtype`` only the name differs."""
    return KVLayoutInfo(
        dtype=dtype,
        order=HNC,
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_bytes=block_size * SLOT_BYTES,
        num_groups=num_groups,
    )


def hash_model_region(
    num_blocks: int,
    block_size: int,
    incarnation: int = 0,
    digest: Callable[[memoryview], int] | None = None,
    num_groups: int = 1,
    dtype: str = "float32",
) -> KVPoolRegion:
    """Return memory of this process for a ``HashModel``. ``digest`` is written into the seals; None = they have none."""
    layout = hash_model_layout(block_size, num_groups, dtype)
    rows = np.zeros(num_blocks * layout.block_bytes, dtype=np.uint8)
    buffer, size = rows.data, layout.block_bytes
    digest_blocks = None
    if digest is not None:
        digest_blocks = each_by_itself(lambda block_id: digest(buffer[block_id * size : (block_id + 1) * size]))
    return KVPoolRegion(
        base_address=rows.ctypes.data,
        num_blocks=num_blocks,
        block_bytes=size,
        layout=layout,
        buffer=buffer,
        seals=SealTable(
            map_seal_memory(num_blocks, num_landing=num_landing_rows(block_size)),
            incarnation,
            layout_fingerprint(layout),
            digest_blocks,
        ),
    )


@dataclass(slots=True)
class _Row:
    """A request in the running batch. ``block_ids`` has a table per group."""

    token_ids: array[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


class HashModel:
    """A runner without a model, with one KV cache group for each of its ``attentions``.

    ``rows`` is the pool, [num_blocks, block_size * SLOT_BYTES] uint8; connectors see it as ``region``, tests and in-process
    transports copy it by ``read_block`` and ``write_block``. ``seals`` is for the model's KV cache manager; ``incarnation`` is
    the one in the seals. ``region`` is memory for both, made by the caller: in memory files, or with digests in its seals.
    ``encoder`` embeds images.
    """

    def __init__(  # noqa: PLR0913
        self,
        num_blocks: int,
        block_size: int,
        connector_worker: KVConnectorWorker | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        incarnation: int = 0,
        region: KVPoolRegion | None = None,
        *,
        attentions: Sequence[HashAttention] = FULL,
        encoder: HashEncoder | None = None,
    ) -> None:
        self.block_size = block_size
        self.encoder = encoder if encoder is not None else HashEncoder()
        self.vocab_size = vocab_size
        self.attentions = tuple(attentions)
        if region is None:
            region = hash_model_region(num_blocks, block_size, incarnation, num_groups=len(self.attentions))
        assert region.buffer is not None
        assert region.seals is not None
        self.region = region
        self.seals = region.seals
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(region.buffer, dtype=np.uint8).reshape(num_blocks, -1)
        self.rows[:] = _NEVER_WRITTEN
        self._batch: dict[str, _Row] = {}
        self._connector_worker = connector_worker
        if connector_worker is not None:
            connector_worker.register_kv_caches(self.region)

    @property
    def failure(self) -> Exception | None:
        """Return None: this runner keeps no failure for later."""
        return None

    def shutdown(self) -> None:
        """Stop the connectors' worker sides."""
        if self._connector_worker is not None:
            self._connector_worker.shutdown()
        self.encoder.shutdown()

    @property
    def request_ids(self) -> list[str]:
        """Requests in the running batch."""
        return list(self._batch)

    def read_block(self, block_id: int) -> bytes:
        """Return a copy of a block."""
        return bytes(self.rows[block_id])

    def write_block(self, block_id: int, content: bytes) -> None:
        """Overwrite a block, as a transfer does."""
        self.rows[block_id] = np.frombuffer(content, dtype=np.uint8)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; an empty one only takes the connector through its sequence.

        Requests are computed in scheduling order, so one may hit blocks that an earlier one fills in the same step.
        """
        self._start_connector_step(scheduler_output)
        self.encoder.start_step(scheduler_output)
        self._update_batch(scheduler_output)
        output = ModelRunnerOutput()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            row = self._batch[request_id]
            token_id = self._compute(request_id, row, row.num_computed_tokens, num_tokens)
            if token_id is not None:
                output.sampled_token_ids[request_id] = [token_id]
        output.kv_connector_output = self._finish_connector_step(scheduler_output)
        output.ec_connector_output, output.failed_embeddings = self.encoder.finish_step(scheduler_output)
        return output

    def launch_model(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Run a step; return a function for its result, to be called before the step after the next is launched."""
        output = self.execute_model(scheduler_output)
        return lambda: output

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._batch.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._batch[new.request_id] = self._new_row(new)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._batch[request_id]
            row.num_computed_tokens = num_computed_tokens
            if new_block_ids is not None:
                for table, new_ids in zip(row.block_ids, new_block_ids, strict=True):
                    table.extend(new_ids)

    def _new_row(self, new: NewRequestData) -> _Row:
        assert len(new.block_ids) == len(self.attentions), "a table for each group"
        return _Row(new.token_ids[:], tuple(map(list, new.block_ids)), new.num_computed_tokens)

    def _compute(self, request_id: str, row: _Row, start: int, num_tokens: int) -> int | None:
        """Fill the slots of the next tokens; return the next token if the last known one was among them."""
        end = start + num_tokens
        inputs = self.encoder.merge(request_id, row.token_ids, start, end)
        tables = list(zip(self.attentions, row.block_ids, strict=True))
        prefix = _Prefix([self._read_seen(attention, table, start) for attention, table in tables], start)
        for position in range(start, end):
            entries = prefix.append(inputs[position])
            for table, entry in zip(row.block_ids, entries, strict=True):
                self._write(table, position, entry)
        row.num_computed_tokens = end
        if end < len(row.token_ids):
            return None
        token_id = prefix.next_token(self.vocab_size)
        row.token_ids.append(token_id)
        return token_id

    def _read_seen(self, attention: HashAttention, table: list[int], position: int) -> _Seen:
        """Read the entries of a group that a token at this position attends to: no block of them may be missing."""
        first = attention.first_seen(position)
        first_block, end_block = first // self.block_size, -(-position // self.block_size)
        block_ids = table[first_block:end_block]
        assert len(block_ids) == end_block - first_block, "a token sees more than the table holds"
        assert NULL_BLOCK_ID not in block_ids, f"the token at {position} sees a block that is gone: {table}"
        skipped = (first - first_block * self.block_size) * SLOT_BYTES
        entries = self.rows[block_ids].tobytes()[skipped : skipped + (position - first) * SLOT_BYTES]
        return _Seen(attention, first, entries)

    def _write(self, table: list[int], position: int, entry: bytes) -> None:
        block, slot = divmod(position, self.block_size)
        assert table[block] != NULL_BLOCK_ID, f"the token at {position} is written into no block: {table}"
        self.rows[table[block], slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = np.frombuffer(entry, dtype=np.uint8)

    def _start_connector_step(self, scheduler_output: SchedulerOutput) -> None:
        metadata = scheduler_output.kv_connector_metadata
        if self._connector_worker is not None and metadata is not None:
            self._connector_worker.handle_preemptions(metadata)
            self._connector_worker.start_load_kv(metadata)

    def _finish_connector_step(self, scheduler_output: SchedulerOutput) -> KVConnectorOutput | None:
        worker = self._connector_worker
        if worker is None:
            return None
        worker.wait_for_save()
        output = worker.get_transfer_results(scheduler_output.finished_req_ids)
        output.invalid_block_ids |= worker.get_block_ids_with_load_errors()
        return None if output.is_empty() else output
