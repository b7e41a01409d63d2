"""A model whose KV cache is a hash of what it has read, so that any wrong block changes the tokens.

Takes the place of ``core.engine.runner.ModelRunner``: it obeys ``SchedulerOutput``, keeps its "KV" in a block-major pool that
connectors can register and copy, and runs the worker side of a connector. It has no weights and no torch. Used by the tests of
the scheduler and by the simulation.

One slot holds 8 bytes. Like attention, the entry of a token depends on *all* entries before it, as they are in the blocks:

    kv[p]      = H(kv[0] .. kv[p-1], token[p])        written to the slot of position p
    next token = H(kv[0] .. kv[p], "next") mod vocab  if p is the last token known

A block that was never written, reused, mixed up, or copied wrongly therefore changes every later entry and token.
``expected_tokens`` computes the same without blocks: the oracle. Sampling parameters play no part.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.connector import KVConnectorWorker, KVPoolRegion
from core.kv.seals import SealTable, layout_fingerprint, map_seal_memory, num_landing_rows
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import KVConnectorOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from core.wire.kv import KVLayoutInfo

SLOT_BYTES = 8  # of the layout below: a key and a value of one float32 each
DEFAULT_VOCAB_SIZE = 50_000
_NEVER_WRITTEN = 0xEE


class _Prefix:
    """The entries of positions 0..p-1, folded into a running hash."""

    def __init__(self, kv: bytes) -> None:
        self._state = hashlib.blake2b(kv, digest_size=SLOT_BYTES)

    def append(self, token_id: int) -> bytes:
        """Return the entry of the next position, which holds ``token_id``, and fold it in."""
        state = self._state.copy()
        state.update(token_id.to_bytes(8, "little", signed=True))
        kv = state.digest()
        self._state.update(kv)
        return kv

    def next_token(self, vocab_size: int) -> int:
        """Return the token that follows."""
        state = self._state.copy()
        state.update(b"next")
        return int.from_bytes(state.digest(), "little") % vocab_size


def expected_tokens(token_ids: Sequence[int], num_tokens: int, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """Return the ``num_tokens`` tokens that a ``HashModel`` with an intact KV cache puts out after ``token_ids``."""
    prefix = _Prefix(b"")
    for token_id in token_ids:
        prefix.append(token_id)
    output: list[int] = []
    for _ in range(num_tokens):
        output.append(prefix.next_token(vocab_size))
        prefix.append(output[-1])
    return output


def expected_kv(token_ids: Sequence[int]) -> bytes:
    """Return the entries of these tokens as an intact KV cache holds them, ``SLOT_BYTES`` each."""
    prefix = _Prefix(b"")
    return b"".join(prefix.append(token_id) for token_id in token_ids)


def hash_model_kv_config(num_blocks: int, block_size: int) -> KVCacheConfig:
    """Return the cache configuration that matches the pool of a ``HashModel``; block 0 is the null block."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=1, dtype_bytes=SLOT_BYTES // 2)
    return KVCacheConfig(num_blocks, (KVCacheGroup((0,), spec),))


def hash_model_layout(block_size: int) -> KVLayoutInfo:
    """Return what a block of a ``HashModel`` looks like."""
    return KVLayoutInfo(
        dtype="float32",
        order="NHD",
        block_size=block_size,
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_bytes=block_size * SLOT_BYTES,
    )


def hash_model_region(
    num_blocks: int, block_size: int, incarnation: int = 0, digest: Callable[[memoryview], int] | None = None
) -> KVPoolRegion:
    """Return memory of this process for a ``HashModel``. ``digest`` goes into the seals; None = they have none."""
    layout = hash_model_layout(block_size)
    rows = np.zeros(num_blocks * layout.block_bytes, dtype=np.uint8)
    buffer, size = rows.data, layout.block_bytes
    digest_block = (lambda block_id: digest(buffer[block_id * size : (block_id + 1) * size])) if digest is not None else None
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
            digest_block,
        ),
    )


@dataclass(slots=True)
class _Row:
    """A request in the running batch."""

    token_ids: array[int]
    block_ids: list[int]
    num_computed_tokens: int


class HashModel:
    """A runner without a model. One KV cache group.

    ``rows`` is the pool, [num_blocks, block_size * SLOT_BYTES] uint8; connectors see it as ``region``, tests and in-process
    transports copy it by ``read_block`` and ``write_block``. ``seals`` is for the KV cache manager that goes with the model;
    ``incarnation`` is what they say of this life. ``region`` is memory for both that somebody else has made: in memory files,
    or with digests in its seals.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        connector_worker: KVConnectorWorker | None = None,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        incarnation: int = 0,
        region: KVPoolRegion | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.region = region if region is not None else hash_model_region(num_blocks, block_size, incarnation)
        assert self.region.buffer is not None
        assert self.region.seals is not None
        self.seals = self.region.seals
        self.rows: npt.NDArray[np.uint8] = np.frombuffer(self.region.buffer, dtype=np.uint8).reshape(num_blocks, -1)
        self.rows[:] = _NEVER_WRITTEN
        self._batch: dict[str, _Row] = {}
        self._connector_worker = connector_worker
        if connector_worker is not None:
            connector_worker.register_kv_caches(self.region)

    @property
    def failure(self) -> Exception | None:
        """None: this runner keeps no failure for later."""
        return None

    def shutdown(self) -> None:
        """Stop the connector's worker side."""
        if self._connector_worker is not None:
            self._connector_worker.shutdown()

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
        self._update_batch(scheduler_output)
        output = ModelRunnerOutput()
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            token_id = self._compute(self._batch[request_id], num_tokens)
            if token_id is not None:
                output.sampled_token_ids[request_id] = [token_id]
        output.kv_connector_output = self._finish_connector_step(scheduler_output)
        return output

    def _update_batch(self, scheduler_output: SchedulerOutput) -> None:
        for request_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._batch.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._batch[new.request_id] = _new_row(new)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._batch[request_id]
            row.num_computed_tokens = num_computed_tokens
            if new_block_ids is not None:
                row.block_ids += new_block_ids[0]

    def _compute(self, row: _Row, num_tokens: int) -> int | None:
        """Fill the slots of the next tokens; return the token that follows if the last one known was among them."""
        start, end = row.num_computed_tokens, row.num_computed_tokens + num_tokens
        kv = self.rows[row.block_ids].tobytes()[: start * SLOT_BYTES]
        prefix = _Prefix(kv)
        for position in range(start, end):
            block, slot = divmod(position, self.block_size)
            entry = np.frombuffer(prefix.append(row.token_ids[position]), dtype=np.uint8)
            self.rows[row.block_ids[block], slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = entry
        row.num_computed_tokens = end
        if end < len(row.token_ids):
            return None
        token_id = prefix.next_token(self.vocab_size)
        row.token_ids.append(token_id)
        return token_id

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


def _new_row(new: NewRequestData) -> _Row:
    assert len(new.block_ids) == 1, "HashModel knows one KV cache group"
    return _Row(new.token_ids[:], list(new.block_ids[0]), new.num_computed_tokens)
