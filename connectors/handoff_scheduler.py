"""The scheduler side of connectors that transfer the KV of a prompt from a prefill to a decode worker.

Producer: a request that was computed for a reader keeps its blocks when it ends successfully, and a ``KVHandoff`` describes
them. Consumer: a request with a handoff is offered its tokens once; blocks that are local hits already are not loaded.
Runs on the engine thread, inside the scheduler; knows no sockets and no memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from connectors.handoff_blocks import HandoffOwner, describe_blocks, describe_group
from core.connector import KVConnectorScheduler
from core.errors import KVFerryError, StaleBlock
from core.ids import IdSource, new_hex_id
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.pairing import check_compatible

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)

StepT = TypeVar("StepT", bound=KVConnectorMetadata)


@dataclass(frozen=True, slots=True)
class Offer:
    """A handoff that has not been used yet. ``refusal`` is why it must not be loaded.

    ``block_hashes`` are this worker's own, of its own prompt, at the ends of the owner's blocks that the handoff covers.
    """

    handoff: KVHandoff
    block_hashes: tuple[bytes, ...] = ()
    refusal: KVFerryError | None = None


class HandoffScheduler(KVConnectorScheduler, Generic[StepT]):
    """Both halves; each request uses one of them. A connector derives from it and implements the abstract methods.

    They write orders into ``step``, the next message to the worker side: a dataclass, empty when ``new_step`` makes it. Orders
    leave with the next engine step.
    """

    makes_handoffs = True
    converts_blocks = False  # True if the worker side loads blocks of another size than its own
    control_address = ""  # in every handoff: where readers reach this worker, if they connect to it

    def __init__(self, owner: HandoffOwner, new_step: Callable[[], StepT], *, lease_ms: int, ids: IdSource) -> None:
        self.step = new_step()
        self._new_step = new_step
        self._owner = owner
        self._lease_ms = lease_ms
        self._ids = ids
        self._hasher = BlockHasher(owner.model_fingerprint)
        self._manager: KVCacheManager | None = None
        self._offers: dict[str, Offer] = {}  # by request id, until they are used or dropped
        self._loading: set[str] = set()

    # ---- implemented by a connector ----------------------------------------------------------------------------------

    @abstractmethod
    def start_save(self, request_id: str, handoff: KVHandoff) -> None:
        """Make the blocks of a handoff readable. They are kept until ``finished_sending`` has the request."""

    @abstractmethod
    def start_load(self, request: Request, offer: Offer, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Load the last ``num_tokens`` tokens of a handoff into the request's blocks.

        Raises:
            StaleBlock: the handoff lacks a block that is needed; ``refuse_load`` follows.
        """

    @abstractmethod
    def refuse_load(self, request_id: str, error: KVFerryError) -> None:
        """Report a load as failed without trying it."""

    @abstractmethod
    def abort_load(self, request_id: str) -> None:
        """End a load that is no longer wanted. Its blocks are kept until ``finished_recving`` has the request."""

    def end_use(self, request_id: str) -> None:
        """The request no longer needs its handoff: it was loaded, is not needed, or the request has ended."""

    # ---- both halves -------------------------------------------------------------------------------------------------

    @property
    def manager(self) -> KVCacheManager:
        """The engine's block tables."""
        assert self._manager is not None, "bind_kv_cache_manager comes before any request"
        return self._manager

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Keep the manager, for the generations of blocks."""
        self._manager = manager

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Ship the orders since the last step."""
        step, self.step = self.step, self._new_step()
        return step

    def has_pending_push_work(self) -> bool:
        """True while an order waits for the next step."""
        return self.step != self._new_step()

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """Keep and describe the prompt's blocks if they were computed for a reader; end the request's own load."""
        if self._offers.pop(request.request_id, None) is not None:
            self.end_use(request.request_id)
        elif request.request_id in self._loading:
            self.abort_load(request.request_id)
        is_computed = request.num_computed_tokens >= request.num_prompt_tokens and any(block_ids)
        if not request.needs_handoff or request.status not in _ENDED_WELL or not is_computed:
            return False, None
        handoff = self._describe(request)
        self.start_save(request.request_id, handoff)
        return True, handoff

    # ---- consumer ----------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Check the request's handoff, if it has one."""
        if request.kv_handoff is not None:
            self._offers[request.request_id] = self._check_offer(request, request.kv_handoff)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the rest of the handoff, once. A refused handoff is offered too: its load fails like any failed load."""
        offer = self._offers.get(request.request_id)
        if offer is None:
            return 0, False
        num_tokens = request.num_prompt_tokens if offer.refusal else offer.handoff.num_tokens
        count = max(0, num_tokens - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Load the blocks that are not local hits; without any, release the handoff."""
        offer = self._offers.pop(request.request_id, None)
        if offer is None:
            return
        if not num_external_tokens:
            self.end_use(request.request_id)
            return
        self._loading.add(request.request_id)
        try:
            if offer.refusal is not None:
                raise offer.refusal
            self.start_load(request, offer, blocks, num_external_tokens)
        except KVFerryError as error:
            self.refuse_load(request.request_id, error)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Release the handoffs of loads that have ended."""
        for request_id in sorted(output.finished_recving & self._loading):
            self._loading.discard(request_id)
            self.end_use(request_id)

    def _check_offer(self, request: Request, handoff: KVHandoff) -> Offer:
        """Compare a handoff with what this worker knows itself, before any request to its owner.

        Of a request that has asked for it, a handoff may cover output tokens too.
        """
        layout = self._owner.layout
        try:
            check_compatible(self._owner, handoff.model_fingerprint, handoff.layout, converts_blocks=self.converts_blocks)
            most = request.num_prompt_tokens if handoff is request.kv_handoff else request.num_tokens
            if not 0 < handoff.num_tokens <= most:
                raise StaleBlock(f"the handoff covers {handoff.num_tokens} of {most} tokens")
            if len(handoff.groups) != layout.num_groups:
                raise StaleBlock(f"the handoff has {len(handoff.groups)} groups, not {layout.num_groups}")
            hashes = self._block_end_hashes(request, handoff.num_tokens, handoff.layout.block_size)
            for group_id, group in enumerate(handoff.groups):
                if group.block_hashes != hashes[group.first_block :]:
                    raise StaleBlock(f"the handoff's block hashes in group {group_id} are not those of the prompt")
        except KVFerryError as error:
            return Offer(handoff, refusal=error)
        return Offer(handoff, hashes)

    # ---- producer ----------------------------------------------------------------------------------------------------

    def _describe(self, request: Request) -> KVHandoff:
        """Describe the blocks that the token after the prompt attends to; exactly these are kept until they are saved."""
        num_tokens = request.num_prompt_tokens
        self.manager.remove_skipped_blocks(request)
        block_ids = self.manager.get_block_ids_for_computed_tokens(request.request_id, num_tokens)
        hashes = self._block_end_hashes(request, num_tokens, self._owner.layout.block_size)
        self.manager.seal_partial_block(request, num_tokens, hashes[-1])
        groups = tuple(self._describe_group(group_id, ids, hashes) for group_id, ids in enumerate(block_ids))
        return self._handoff(groups, num_tokens, self._lease_ms)

    def _handoff(self, groups: Sequence[GroupBlocks], num_tokens: int, lease_ms: int) -> KVHandoff:
        return describe_blocks(
            self._owner,
            groups,
            transfer_id=new_hex_id(self._ids, "kv-"),
            control_address=self.control_address,
            num_tokens=num_tokens,
            lease_ms=lease_ms,
        )

    def describe_prefix(self, request: Request, start: int, end: int) -> KVHandoff | None:
        """Describe these blocks without a lease."""
        block_size = self._owner.layout.block_size
        first = start // block_size
        block_ids = self.manager.get_block_ids_for_computed_tokens(request.request_id, end)
        hashes = self._block_end_hashes(request, end, block_size, first)
        groups = tuple(self._describe_group(group_id, ids, hashes, first) for group_id, ids in enumerate(block_ids))
        return self._handoff(groups, end, lease_ms=0)

    def _describe_group(self, group_id: int, ids: Sequence[int], hashes: tuple[bytes, ...], start: int = 0) -> GroupBlocks:
        """Name the group's blocks from the first one that it still holds. ``hashes`` are those from position ``start`` on."""
        blocks = self.manager.block_pool.blocks
        return describe_group(group_id, [blocks[block_id] for block_id in ids[start : start + len(hashes)]], hashes, start)

    def _block_end_hashes(self, request: Request, num_tokens: int, block_size: int, first: int = 0) -> tuple[bytes, ...]:
        """Return the chain value at the end of each block of the first ``num_tokens`` tokens, from block ``first`` on."""
        ends = [min(end, num_tokens) for end in range((first + 1) * block_size, num_tokens + block_size, block_size)]
        return tuple(
            self._hasher.prefix_hash(request.block_hashes, request.all_token_ids, end, request.extra_keys) for end in ends
        )
