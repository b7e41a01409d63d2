"""The KV cache as the scheduler sees it: prefix hits, slots for tokens, and freeing them.

Decides whether a request may have blocks; owns no block itself (``core.kv.coordinator`` does) and knows no queue, budget or
priority. One thread only.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from core.kv.block import NULL_BLOCK_ID
from core.kv.coordinator import BlocksPerGroup, get_kv_cache_coordinator
from core.kv.events import KVCacheEvent
from core.kv.hashing import ExtraKey
from core.kv.seals import SealTable
from core.kv.spec import KVCacheConfig, KVCacheSizes, ceil_div
from core.kv.stats import PrefixCacheStats


class KVCacheRequest(Protocol):
    """What the KV cache reads of a request.

    ``num_tokens`` = prompt and output so far; ``num_computed_tokens`` have KV, or will have after the steps already scheduled;
    ``num_in_flight_tokens`` of them are in steps whose output is not processed; ``block_hashes`` has one value per 16 tokens.
    """

    @property
    def request_id(self) -> str:
        """Key of the block tables."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with KV."""

    @property
    def num_in_flight_tokens(self) -> int:
        """Scheduled tokens whose step has not been processed."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens, for events."""

    @property
    def extra_keys(self) -> Sequence[ExtraKey]:
        """What enters the hash chain besides tokens, for events."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hash chain."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True if every token must be computed here."""


@dataclass(slots=True, frozen=True)
class KVCacheBlocks:
    """Blocks of one request, one sequence per KV cache group, in token order."""

    blocks: BlocksPerGroup

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Ids per group."""
        return tuple([block.block_id for block in group] for group in self.blocks)


class KVCacheManager:
    """Allocates KV slots and finds cached prefixes.

    ``max_in_flight_tokens`` bounds the tokens scheduled but not yet processed, over all concurrent steps (default:
    ``max_model_len``, the safe upper bound). ``watermark`` is the share of the pool that the admission of a request must leave
    free while others run, so that they are not preempted at once. ``enable_kv_cache_events`` collects events without bound
    until ``take_events``, so the caller must drain them.
    ``seals`` is the pool's seal table; without one nothing is sealed.
    Raises: ValueError for sizes that do not fit together.
    """

    def __init__(  # noqa: PLR0913  the signature is vLLM's
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        *,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        enable_kv_cache_events: bool = False,
        watermark: float = 0.0,
        seals: SealTable | None = None,
    ) -> None:
        if max_model_len < 1:
            raise ValueError(f"max_model_len must be positive, not {max_model_len}")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is a share of the pool from 0 to below 1, not {watermark}")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.max_in_flight_tokens = max_model_len if max_in_flight_tokens is None else max_in_flight_tokens
        self.enable_caching = enable_caching
        sizes = KVCacheSizes(
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_model_len=max_model_len,
        )
        self.coordinator = get_kv_cache_coordinator(kv_cache_config, sizes, enable_caching, enable_kv_cache_events, seals)
        self.block_pool = self.coordinator.block_pool
        self.empty_kv_cache_blocks = KVCacheBlocks(self.coordinator.no_blocks)
        self.prefix_cache_stats = PrefixCacheStats()
        self._watermark_blocks = int(watermark * kv_cache_config.num_blocks)

    @property
    def hash_block_size(self) -> int:
        """Tokens per value of the hash chain; every block size is a multiple."""
        return self.coordinator.hash_block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced, 0 to 1."""
        return self.block_pool.usage

    def get_computed_blocks(self, request: KVCacheRequest) -> tuple[KVCacheBlocks, int]:
        """Return the cached blocks of the longest known prefix and its length in tokens. Takes no reference.

        At most ``num_tokens - 1`` tokens, since at least one must be computed to sample from.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        blocks, num_tokens = self.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        if not num_tokens:
            return self.empty_kv_cache_blocks, 0
        return KVCacheBlocks(blocks), num_tokens

    def allocate_slots(  # noqa: PLR0913  the signature is vLLM's; a parameter object would cost more than the call
        self,
        request: KVCacheRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Give the request slots for its next ``num_new_tokens`` tokens; return the blocks allocated now.

            | computed | new computed | external |      new       |
            |  in KV   |  local hits  |  loaded  | to compute now |

        ``new_computed_blocks``, the hits of ``get_computed_blocks``, are adopted and not among the blocks returned. With
        ``delay_cache_blocks`` (a load that has only begun) nothing is hashed; ``cache_blocks`` does it when the data is there.
        ``full_sequence_must_fit`` demands room for all ``num_tokens``; ``reserved_blocks`` must stay free. The watermark
        applies when a request without blocks joins others that run.

        Returns None if free blocks do not suffice; then nothing has changed except that skipped blocks are freed, as always.
        Raises: ValueError if there is nothing to do.
        """
        if num_new_tokens < 0 or not (num_new_tokens or num_new_computed_tokens or num_external_computed_tokens):
            raise ValueError(f"{request.request_id}: nothing to allocate for {num_new_tokens} new tokens")
        request_id, coordinator = request.request_id, self.coordinator
        is_admission = not coordinator.has_request(request_id)
        hits = coordinator.no_blocks if new_computed_blocks is None else new_computed_blocks.blocks
        assert is_admission or not any(hits), f"{request_id} adopts hits although it has blocks already"

        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        num_computed = min(num_computed, self.max_model_len)
        num_slots = min(num_computed + num_new_tokens, self.max_model_len)
        num_processed = _num_processed_tokens(request, num_computed)
        coordinator.remove_skipped_blocks(request_id, num_processed)
        num_free = self.block_pool.num_free_blocks - (self._watermark_blocks if is_admission and has_scheduled_reqs else 0)
        if full_sequence_must_fit and self._num_blocks_of_sequence(request, hits, num_processed) > num_free:
            return None
        num_needed = coordinator.get_num_blocks_to_allocate(request_id, num_slots, hits, num_processed)
        if num_needed > num_free - reserved_blocks:
            return None

        new_blocks = coordinator.no_blocks
        if is_admission:
            external = coordinator.allocate_new_computed_blocks(request_id, hits, num_computed, num_processed)
            fresh = coordinator.allocate_new_blocks(request_id, num_slots)
            new_blocks = tuple([*first, *rest] for first, rest in zip(external, fresh, strict=True))
        elif num_needed:
            new_blocks = coordinator.allocate_new_blocks(request_id, num_slots)
        if num_new_tokens:
            coordinator.rewrite_sealed(request_id, num_computed)  # a loaded last token is computed again, in a sealed block
        if not delay_cache_blocks:
            num_known = min(num_computed + num_new_tokens, request.num_tokens)
            coordinator.cache_blocks(request_id, request.block_hashes, num_known, request.all_token_ids, request.extra_keys)
        return KVCacheBlocks(new_blocks)

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Make the full blocks of the first ``num_computed_tokens`` tokens hits. Nothing, with caching off."""
        coordinator = self.coordinator
        coordinator.cache_blocks(
            request.request_id, request.block_hashes, num_computed_tokens, request.all_token_ids, request.extra_keys
        )

    def seal_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Seal the full blocks of the first ``num_computed_tokens`` tokens: their KV is in the pool, complete and good.

        Hits are left out, even if the same step fills them: the request that fills a block seals it.
        """
        if self.block_pool.seals is not None:
            self.coordinator.seal_blocks(request.request_id, request.block_hashes, num_computed_tokens)

    def seal_partial_block(self, request: KVCacheRequest, num_tokens: int, block_hash: bytes) -> None:
        """Seal the last block of the first ``num_tokens`` tokens, if they do not fill it, for a reader of just these tokens.

        ``block_hash`` identifies the ``num_tokens`` tokens (``BlockHasher.prefix_hash``). The request must not write any more.
        """
        if self.block_pool.seals is not None:
            self.coordinator.seal_partial_block(request.request_id, num_tokens, block_hash)

    def remove_skipped_blocks(self, request: KVCacheRequest) -> None:
        """Free the request's blocks that no unprocessed token attends to."""
        num_processed = _num_processed_tokens(request, request.num_computed_tokens)
        self.coordinator.remove_skipped_blocks(request.request_id, num_processed)

    def withhold_first_block(self, request_id: str, group_id: int) -> None:
        """Never hash or seal the first block of a group's table that is not null: its first tokens are missing.

        For a window that begins within a block of which only the end was loaded.
        """
        self.coordinator.managers[group_id].withhold_first_block(request_id)

    def free(self, request: KVCacheRequest) -> None:
        """Drop the request's references, last block first, so that its head stays cached longest. Idempotent."""
        self.block_pool.free_blocks(self.coordinator.pop_blocks(request.request_id))

    def truncate(self, request: KVCacheRequest, num_tokens: int) -> KVCacheBlocks:
        """Prepare to recompute everything from token ``num_tokens`` on in place; return the blocks concerned.

        They lose their hashes, so they are no longer hits, and get a new generation, so that a reader that knows the old one
        rejects them. They are hashed again by ``cache_blocks`` as usual.
        """
        return KVCacheBlocks(self.coordinator.truncate(request.request_id, num_tokens))

    def drop_shared_tail(self, request: KVCacheRequest, num_tokens: int, kept: Container[int] = ()) -> None:
        """Drop the request's blocks after ``num_tokens``, from the first shared one on.

        For a request that will write there again: a transfer may still write a shared block, or another request may read it.
        ``kept`` are shared blocks that may be rewritten in place. The next allocation replaces the dropped blocks.
        """
        self.block_pool.free_blocks(self.coordinator.drop_shared_tail(request.request_id, num_tokens, kept))

    def find_boundary(self, request_id: str, num_tokens: int) -> int:
        """Return where the request can continue, at most ``num_tokens``: every group holds what the next token needs."""
        return self.coordinator.find_boundary(request_id, num_tokens)

    def floor_to_boundary(self, num_tokens: int) -> int:
        """Round down to where a prefix hit may end."""
        return self.coordinator.floor_to_boundary(num_tokens)

    def num_cached_tokens(self, request_id: str) -> int:
        """Return how many leading tokens of the request are hits by now; of one that loads, its local hits."""
        return self.coordinator.num_cached_tokens(request_id)

    @cached_property
    def max_tokens_that_fit(self) -> int:
        """Length of the longest request that could run if it were alone."""
        return self.kv_cache_config.max_tokens_of_sequence(self.max_in_flight_tokens, self.max_model_len)

    def get_num_missing_blocks(
        self, request: KVCacheRequest, new_computed_blocks: KVCacheBlocks | None = None, num_computed_tokens: int = 0
    ) -> int:
        """Return how many free blocks the request takes at most until all its tokens have slots.

        Of one without blocks: if it adopts these hits, and has so many computed tokens, hits and loaded ones included.
        """
        hits = self.coordinator.no_blocks if new_computed_blocks is None else new_computed_blocks.blocks
        num_computed = min(num_computed_tokens, self.max_model_len)
        return self._num_blocks_of_sequence(request, hits, _num_processed_tokens(request, num_computed))

    def _num_blocks_of_sequence(self, request: KVCacheRequest, hits: BlocksPerGroup, num_processed_tokens: int) -> int:
        """Most blocks that all known tokens of the request still take at a time; the only place where the cap counts."""
        num_tokens = min(request.num_tokens, self.max_model_len)
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id, num_tokens, hits, num_processed_tokens, apply_admission_cap=True
        )

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """Return all blocks of the request, none for an unknown one. The sequences are live views."""
        return KVCacheBlocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return the ids of all blocks of the request, per group."""
        return self.get_blocks(request_id).get_block_ids()

    def get_complete_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Return ``get_block_ids`` with the null block in place of each block whose first tokens are missing."""
        tables = self.get_block_ids(request_id)
        for ids, manager in zip(tables, self.coordinator.managers, strict=True):
            num_lacking = min(manager.num_lacking_blocks(request_id), len(ids))
            ids[:num_lacking] = [NULL_BLOCK_ID] * num_lacking
        return tables

    def get_block_ids_for_computed_tokens(self, request_id: str, num_computed_tokens: int) -> tuple[list[int], ...]:
        """Return the ids of the blocks that hold the first ``num_computed_tokens`` tokens, without those of later ones."""
        return tuple(
            ids[: ceil_div(num_computed_tokens, group.spec.block_size)]
            for ids, group in zip(self.get_block_ids(request_id), self.kv_cache_config.groups, strict=True)
        )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Drop the hashes and seals of these blocks; their references stay.

        Raises: ValueError for an id outside the pool.
        """
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """As ``BlockPool.reset_prefix_cache``: for tests and benchmarks."""
        return self.block_pool.reset_prefix_cache()

    def take_events(self) -> list[KVCacheEvent]:
        """Return the prefix cache events since the last call, oldest first."""
        return self.block_pool.take_events()

    def record_prefix_cache_stats(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count the lookup of an admitted request. The scheduler calls it once per successful admission."""
        if self.enable_caching:
            self.prefix_cache_stats.record(num_tokens, num_hits, preempted)


def _num_processed_tokens(request: KVCacheRequest, num_computed_tokens: int) -> int:
    """Return how many tokens no step attends from any more.

    The last token is computed here even if its KV was loaded, and it sees one token more than the next one will.
    """
    return max(0, min(num_computed_tokens, request.num_tokens - 1) - request.num_in_flight_tokens)
