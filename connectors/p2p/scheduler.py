"""The scheduler side of the p2p connector: what is offered to readers, and what is asked of owners.

Producer: a request that was computed to be handed over keeps its blocks when it ends well, and is described by a ``KVHandoff``.
Consumer: a request that carries a handoff is offered its tokens once; blocks that are local hits already are not read.
Several requests may share a handoff (the choices of one prompt): its lease is released after the last of them.
Runs on the engine thread, inside the scheduler; knows no sockets and no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.p2p.actions import HandoffRef, LeaseGrant, PullRequest, ReadUnit, Refusal
from connectors.p2p.consumer.block_mapping import Extent, map_group
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.producer.handshake import WorkerIdentity
from core.connector import KVConnectorScheduler
from core.errors import KVFerryError, StaleBlock
from core.ids import IdSource, new_hex_id
from core.kv.block import NULL_BLOCK_ID
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, RequestStatus, SchedulerOutput
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.pairing import check_compatible

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(slots=True)
class _Offer:
    """A handoff that has not been used yet. ``refusal`` is why it must not be.

    ``block_hashes`` are our own, of our own prompt, at the ends of the owner's blocks that it covers.
    """

    handoff: KVHandoff
    block_hashes: tuple[bytes, ...] = ()
    refusal: KVFerryError | None = None


class P2PConnectorScheduler(KVConnectorScheduler):
    """Both halves; which one works depends on the requests.

    ``grant`` starts a lease in the event loop: it must take effect before anything the engine puts out afterwards is sent.
    """

    def __init__(self, identity: WorkerIdentity, *, lease_ms: int, ids: IdSource, grant: Callable[[LeaseGrant], None]) -> None:
        self._identity = identity
        self._lease_ms = lease_ms
        self._ids = ids
        self._grant = grant
        self._hasher = BlockHasher(identity.model_fingerprint)
        self._manager: KVCacheManager | None = None
        self.control_address = ""  # set when the control socket is bound
        self._offers: dict[str, _Offer] = {}  # by request id, until they are used or dropped
        self._loading: set[str] = set()
        self._refs: dict[str, HandoffRef] = {}  # by request id, until it needs the handoff no more
        self._readers: dict[HandoffRef, set[str]] = {}
        self._next = P2PConnectorMetadata()

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Keep the manager, for the generations of blocks."""
        self._manager = manager

    # ---- consumer --------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Check the request's handoff, if it has one, and keep its lease alive from now on."""
        handoff = request.kv_handoff
        if handoff is None:
            return
        ref = HandoffRef.of(handoff)
        self._offers[request.request_id] = self._check_offer(request, handoff)
        self._refs[request.request_id] = ref
        readers = self._readers.setdefault(ref, set())
        if not readers:
            self._next.holds.append(ref)
            if ref in self._next.releases:  # by a reader that left in this very step; releases come last
                self._next.releases.remove(ref)
        readers.add(request.request_id)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the rest of the handoff, once. A refused one is offered too: its load fails and is treated as such."""
        offer = self._offers.get(request.request_id)
        if offer is None:
            return 0, False
        num_tokens = request.num_prompt_tokens if offer.refusal else offer.handoff.num_tokens
        count = max(0, num_tokens - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Ask for the blocks that are not local hits; without any, the handoff is of no more use."""
        offer = self._offers.pop(request.request_id, None)
        if offer is None:
            return
        if not num_external_tokens:
            self._drop_reader(request.request_id)
            return
        self._loading.add(request.request_id)
        if offer.refusal is None:
            try:
                self._next.pulls.append(self._pull_request(request, offer, blocks, num_external_tokens))
                return
            except StaleBlock as error:
                offer.refusal = error
        self._next.refused[request.request_id] = Refusal(offer.refusal, self._refs[request.request_id].owner)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Let go of the handoffs of loads that have ended."""
        for request_id in sorted(output.finished_recving & self._loading):
            self._loading.discard(request_id)
            self._drop_reader(request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Ship what has gathered since the last step."""
        metadata, self._next = self._next, P2PConnectorMetadata()
        return metadata

    def has_pending_push_work(self) -> bool:
        """True while a message waits for a step to take it along."""
        return not self._next.is_empty()

    # ---- producer --------------------------------------------------------------------------------------------------

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """Keep and describe the prompt's blocks, if they were computed for a reader; end what the request loads itself."""
        self._end_consumer(request.request_id)
        if not request.needs_handoff or request.status not in _ENDED_WELL:
            return False, None
        num_tokens = request.num_prompt_tokens
        if request.num_computed_tokens < num_tokens or not any(block_ids):
            return False, None
        handoff = self._describe(request)
        num_blocks = sum(len(group.block_ids) for group in handoff.groups)
        self._grant(LeaseGrant(handoff.transfer_id, request.request_id, num_blocks))
        return True, handoff

    def _describe(self, request: Request) -> KVHandoff:
        """Describe what the token behind the prompt attends to; the request keeps that until its lease ends, and no more."""
        assert self._manager is not None
        num_tokens = request.num_prompt_tokens
        self._manager.remove_skipped_blocks(request)
        block_ids = self._manager.get_block_ids_for_computed_tokens(request.request_id, num_tokens)
        hashes = self._block_end_hashes(request, num_tokens, self._identity.layout.block_size)
        self._manager.seal_partial_block(request, num_tokens, hashes[-1])
        groups = tuple(self._describe_group(group_id, ids, hashes) for group_id, ids in enumerate(block_ids))
        return KVHandoff(
            transfer_id=new_hex_id(self._ids, "kv-"),
            engine_id=self._identity.engine_id,
            incarnation=self._identity.incarnation,
            control_address=self.control_address,
            model_fingerprint=self._identity.model_fingerprint,
            layout=self._identity.layout,
            groups=groups,
            num_tokens=num_tokens,
            lease_ms=self._lease_ms,
        )

    def _describe_group(self, group_id: int, ids: Sequence[int], hashes: tuple[bytes, ...]) -> GroupBlocks:
        """Name the blocks from the first one on that the group has not given up."""
        assert self._manager is not None
        blocks, end = self._manager.block_pool.blocks, len(hashes)
        first = next((position for position in range(end) if ids[position] != NULL_BLOCK_ID), end)
        return GroupBlocks(
            group_id=group_id,
            first_block=first,
            block_ids=tuple(ids[first:end]),
            generations=tuple(blocks[block_id].generation for block_id in ids[first:end]),
            block_hashes=hashes[first:],
        )

    def _block_end_hashes(self, request: Request, num_tokens: int, block_size: int) -> tuple[bytes, ...]:
        """Return the chain value at the end of each block that holds the first ``num_tokens`` tokens."""
        ends = [min(end, num_tokens) for end in range(block_size, num_tokens + block_size, block_size)]
        return tuple(
            self._hasher.prefix_hash(request.block_hashes, request.all_token_ids, end, request.extra_keys) for end in ends
        )

    # ---- consumer's details ----------------------------------------------------------------------------------------

    def _check_offer(self, request: Request, handoff: KVHandoff) -> _Offer:
        """Compare what a handoff says with what we know ourselves, before anything is asked of its owner."""
        try:
            check_compatible(self._identity, handoff.model_fingerprint, handoff.layout)
            if not 0 < handoff.num_tokens <= request.num_prompt_tokens:
                raise StaleBlock(f"the handoff covers {handoff.num_tokens} of {request.num_prompt_tokens} prompt tokens")
            if len(handoff.groups) != self._identity.layout.num_groups:
                raise StaleBlock(f"the handoff has {len(handoff.groups)} groups, not {self._identity.layout.num_groups}")
            hashes = self._block_end_hashes(request, handoff.num_tokens, handoff.layout.block_size)
            for group_id, group in enumerate(handoff.groups):
                if group.block_hashes != hashes[group.first_block :]:
                    raise StaleBlock(f"the handoff's block hashes in group {group_id} are not those of the prompt")
        except KVFerryError as error:
            return _Offer(handoff, refusal=error)
        return _Offer(handoff, hashes)

    def _pull_request(self, request: Request, offer: _Offer, blocks: KVCacheBlocks, num_external_tokens: int) -> PullRequest:
        """Pair our blocks that are no hits with the owner's that hold the same tokens.

        Raises:
            StaleBlock: the owner does not hold a block that is needed here.
        """
        assert self._manager is not None
        handoff, layout = offer.handoff, self._identity.layout
        num_processed = min(handoff.num_tokens, request.num_tokens - 1)  # the last token is computed here in any case
        units: list[ReadUnit] = []
        for group_id, (group, local_ids) in enumerate(zip(handoff.groups, blocks.get_block_ids(), strict=True)):
            extent = Extent(
                group_id=group_id,
                start=handoff.num_tokens - num_external_tokens,
                end=handoff.num_tokens,
                local_block_size=layout.block_size,
                remote_block_size=handoff.layout.block_size,
                num_skipped_tokens=self._manager.kv_cache_config.groups[group_id].spec.num_skipped_tokens(num_processed),
            )
            found = map_group(extent, group, local_ids, offer.block_hashes)
            units += found.units
            if found.is_partial:
                self._manager.withhold_first_block(request.request_id, group_id)
        return PullRequest(
            request.request_id,
            self._refs[request.request_id],
            tuple(units),
            num_external_tokens,
            request.deadline,
            handoff.layout,
        )

    def _end_consumer(self, request_id: str) -> None:
        if self._offers.pop(request_id, None) is not None:
            self._drop_reader(request_id)
        elif request_id in self._loading:
            self._next.aborts.append(request_id)

    def _drop_reader(self, request_id: str) -> None:
        """The request needs its handoff no more; the last one lets it go."""
        ref = self._refs.pop(request_id)
        readers = self._readers[ref]
        readers.discard(request_id)
        if not readers:
            del self._readers[ref]
            self._next.releases.append(ref)
