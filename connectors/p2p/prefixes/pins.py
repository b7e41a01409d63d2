"""The blocks that a source keeps for readers of prefixes. Runs on the engine thread, inside the scheduler.

A pin holds references of its own, like any user of blocks. Pins are a favour: they are bounded, they are refused under memory
pressure, and freed as soon as a request of this worker lacks blocks. That is safe at any moment, because a reader verifies the
seals after it has read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.handoff_blocks import describe_blocks, describe_group
from connectors.p2p.prefixes.messages import PinsFreed, PrefixAsked, PrefixFound, PrefixNotFound, PrefixRefusal
from connectors.p2p.producer.handshake import WorkerIdentity
from core.ids import IdSource, new_hex_id
from core.kv.block import KVCacheBlock
from core.kv.hashing import BLOCK_HASH_BYTES
from core.kv.manager import KVCacheManager
from core.wire.kv import KVHandoff

MAX_PINNED_SHARE = 0.25  # of the pool, by all readers
MIN_FREE_SHARE = 0.1  # of the pool, that must stay free beside new pins


@dataclass(frozen=True, slots=True)
class PinTerms:
    """How long a pin is promised, and where readers reach this worker."""

    lease_ms: int
    control_address: Callable[[], str]


class PrefixPins:
    """Pinned blocks by transfer id, and the questions that wait for the next step. ``post`` sends to the event loop."""

    def __init__(self, identity: WorkerIdentity, terms: PinTerms, ids: IdSource, post: Callable[[object], None]) -> None:
        self._identity = identity
        self._terms = terms
        self._ids = ids
        self._post = post
        self._asked: list[PrefixAsked] = []
        self._pins: dict[str, list[KVCacheBlock]] = {}
        self.num_blocks = 0  # that are pinned, once for each reference

    @property
    def has_questions(self) -> bool:
        """True if questions wait to be answered."""
        return bool(self._asked)

    @property
    def pinned(self) -> list[int]:
        """Return the pinned blocks, once for each reference."""
        return [block.block_id for blocks in self._pins.values() for block in blocks]

    def on_asked(self, asked: PrefixAsked) -> None:
        """Keep a question until the blocks of the present step are sealed."""
        self._asked.append(asked)

    def answer_all(self, manager: KVCacheManager) -> None:
        """Answer the questions so far."""
        asked_before, self._asked = self._asked, []
        for asked in asked_before:
            answer = self._pin(asked, manager)
            self._post(answer if isinstance(answer, PrefixFound) else PrefixNotFound(asked, answer))

    def on_ended(self, transfer_id: str, manager: KVCacheManager) -> None:
        """Free a pin whose lease is over. One that was freed early is ignored."""
        blocks = self._pins.pop(transfer_id, None)
        if blocks is not None:
            self.num_blocks -= len(blocks)
            manager.block_pool.free_blocks(reversed(blocks))

    def free_all(self, manager: KVCacheManager) -> None:
        """Free all pins early."""
        if not self._pins:
            return
        self._post(PinsFreed(tuple(self._pins)))
        for transfer_id in list(self._pins):
            self.on_ended(transfer_id, manager)

    def _pin(self, asked: PrefixAsked, manager: KVCacheManager) -> PrefixFound | PrefixRefusal:
        """Keep what is held of a prefix, or return why not."""
        question, pool = asked.question, manager.block_pool
        if question.block_size != self._identity.layout.block_size and _has_windows(manager):
            return "layout"  # the reader's first block of a window would lack tokens, and could not be handed on
        chain = _chain_of(question.chain, manager.max_model_len // manager.hash_block_size)
        tables, num_tokens = _find_sealed(
            manager, chain, math.lcm(manager.coordinator.scheduler_block_size, question.block_size)
        )
        if not num_tokens:
            return "missing"
        blocks = [block for table in tables for block in table if not block.is_null]
        num_taken = sum(block.ref_cnt == 0 for block in blocks)
        if pool.num_free_blocks - num_taken < MIN_FREE_SHARE * pool.num_usable_blocks:
            return "pressure"
        if self.num_blocks + len(blocks) > MAX_PINNED_SHARE * pool.num_usable_blocks:
            return "limit"
        handoff = self._describe(manager, chain, tables, num_tokens)
        pool.touch(blocks)
        self._pins[handoff.transfer_id] = blocks
        self.num_blocks += len(blocks)
        return PrefixFound(asked, handoff, len(blocks))

    def _describe(
        self, manager: KVCacheManager, chain: Sequence[bytes], tables: Sequence[Sequence[KVCacheBlock]], num_tokens: int
    ) -> KVHandoff:
        owner, per_block = self._identity, self._identity.layout.block_size // manager.hash_block_size
        hashes = chain[per_block - 1 : num_tokens // manager.hash_block_size : per_block]
        return describe_blocks(
            owner,
            [describe_group(group_id, table, hashes) for group_id, table in enumerate(tables)],
            transfer_id=new_hex_id(self._ids, "px-"),
            control_address=self._terms.control_address(),
            num_tokens=num_tokens,
            lease_ms=self._terms.lease_ms,
        )


def _chain_of(chain: bytes, most: int) -> list[bytes]:
    """Return the values of a question's chain, at most so many: a reader may send more than this worker can ever hold."""
    size = BLOCK_HASH_BYTES
    return [chain[size * index : size * (index + 1)] for index in range(min(len(chain) // size, most))]


def _has_windows(manager: KVCacheManager) -> bool:
    return any(group.spec.recycles for group in manager.kv_cache_config.groups)


def _find_sealed(manager: KVCacheManager, chain: Sequence[bytes], unit: int) -> tuple[Sequence[Sequence[KVCacheBlock]], int]:
    """Return the tables of the longest cached prefix that ends at a multiple of ``unit`` and whose blocks are all sealed.

    Blocks are hits from the moment they are scheduled, and sealed once their KV is computed.
    """
    seals = manager.block_pool.seals
    assert seals is not None, "nothing is served without seals"
    length = len(chain) * manager.hash_block_size
    while length := length - length % unit:
        tables, num_tokens = manager.coordinator.find_longest_cache_hit(chain, length)
        unsealed = [
            index * manager.kv_cache_config.groups[group_id].spec.block_size
            for group_id, table in enumerate(tables)
            for index, block in enumerate(table)
            if not block.is_null and seals.sealed_generation(block.block_id) != block.generation
        ]
        if not unsealed and num_tokens == length:
            return tables, num_tokens
        length = min([num_tokens, *unsealed])
    return (), 0
