"""The scheduler side of the p2p connector: leases of blocks for consumers, and pulls of other workers' blocks.

Several requests may share a handoff (the choices of one prompt): its lease is released after the last of them.
Runs on the engine thread, inside the scheduler; knows no sockets and no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from connectors.handoff_scheduler import HandoffScheduler, Offer
from connectors.p2p.actions import HandoffRef, LeaseGrant, PullRequest, ReadUnit, Refusal
from connectors.p2p.consumer.block_mapping import Extent, map_group
from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.p2p.producer.handshake import WorkerIdentity
from core.errors import KVFerryError
from core.ids import IdSource
from core.kv.manager import KVCacheBlocks
from core.request import Request
from core.wire.kv import KVHandoff


class P2PConnectorScheduler(HandoffScheduler[P2PConnectorMetadata]):
    """``grant`` starts a lease in the event loop; it must take effect before the engine's later outputs are sent.

    ``control_address`` is set when the control socket is bound.
    """

    converts_blocks = True
    reads_early = True

    def __init__(self, identity: WorkerIdentity, *, lease_ms: int, ids: IdSource, grant: Callable[[LeaseGrant], None]) -> None:
        super().__init__(identity, P2PConnectorMetadata, lease_ms=lease_ms, ids=ids)
        self._layout = identity.layout
        self._grant = grant
        self._refs: dict[str, HandoffRef] = {}  # by request id, as long as the request needs the handoff
        self._readers: dict[HandoffRef, set[str]] = {}

    def on_new_request(self, request: Request) -> None:
        """Check the request's handoff, if it has one, and keep its lease alive from now on."""
        super().on_new_request(request)
        if request.kv_handoff is None:
            return
        ref = self._refs[request.request_id] = HandoffRef.of(request.kv_handoff)
        if request.is_early:  # nothing is leased yet
            return
        readers = self._readers.setdefault(ref, set())
        if not readers:
            self.step.holds.append(ref)
            if ref in self.step.releases:  # of a request that ended in this same step; releases come last
                self.step.releases.remove(ref)
        readers.add(request.request_id)

    def start_save(self, request_id: str, handoff: KVHandoff) -> None:
        """Lease the blocks to readers."""
        num_blocks = sum(len(group.block_ids) for group in handoff.groups)
        self._grant(LeaseGrant(handoff.transfer_id, request_id, num_blocks))

    def start_load(self, request: Request, offer: Offer, blocks: KVCacheBlocks, num_tokens: int) -> None:
        """Pull the blocks.

        Raises:
            StaleBlock: the owner does not hold a block that is needed here.
        """
        self.step.pulls.append(self._pull_request(request, offer, blocks, num_tokens))

    def refuse_load(self, request_id: str, error: KVFerryError) -> None:
        """Report the load as failed, with its owner."""
        self.step.refused[request_id] = Refusal(error, self._refs[request_id].producer)

    def abort_load(self, request_id: str) -> None:
        """Abort the pull."""
        self.step.aborts.append(request_id)

    def end_use(self, request_id: str) -> None:
        """Release the lease after its last reader."""
        ref = self._refs.pop(request_id)
        readers = self._readers.get(ref)
        if readers is None:  # an early pull has no lease
            return
        readers.discard(request_id)
        if not readers:
            del self._readers[ref]
            self.step.releases.append(ref)

    def _pull_request(self, request: Request, offer: Offer, blocks: KVCacheBlocks, num_tokens: int) -> PullRequest:
        """Pair those of our blocks that are not cached here with the producer's blocks that hold the same tokens.

        Raises:
            StaleBlock: the owner does not hold a block that is needed here.
        """
        handoff = offer.handoff
        num_processed = min(handoff.num_tokens, request.num_tokens - 1)  # the last token is computed here in any case
        units: list[ReadUnit] = []
        for group_id, (group, local_ids) in enumerate(zip(handoff.groups, blocks.get_block_ids(), strict=True)):
            extent = Extent(
                group_id=group_id,
                start=handoff.num_tokens - num_tokens,
                end=handoff.num_tokens,
                local_block_size=self._layout.block_size,
                remote_block_size=handoff.layout.block_size,
                num_skipped_tokens=self.manager.kv_cache_config.groups[group_id].spec.num_skipped_tokens(num_processed),
            )
            found = map_group(extent, group, local_ids, offer.block_hashes)
            units += found.units
            if found.is_partial:
                self.manager.withhold_first_block(request.request_id, group_id)
        return PullRequest(
            request.request_id,
            self._refs[request.request_id],
            tuple(units),
            num_tokens,
            request.deadline,
            handoff.layout,
            is_leased=not request.is_early,
        )
