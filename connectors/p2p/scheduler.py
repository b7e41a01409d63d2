"""The scheduler side of the p2p connector: leases of blocks for consumers, and pulls of other workers' blocks.

With ``post``, requests may also load the beginning of their prompt from any worker (``connectors.p2p.prefixes``), and this
worker serves those that ask it.

Several requests may share a handoff (the choices of one prompt): its lease is released after the last of them.
Runs on the engine thread, inside the scheduler; knows no sockets and no memory.
"""

from __future__ import annotations

from collections.abc import Callable

from connectors.handoff_scheduler import HandoffScheduler, Offer
from connectors.p2p.actions import HandoffRef, LeaseGrant, PullRequest, ReadUnit, Refusal
from connectors.p2p.consumer.block_mapping import TokenExtent, map_group
from connectors.p2p.metadata import P2PConnectorMetadata, P2PConnectorWorkerMetadata
from connectors.p2p.prefixes.messages import PinEnded, PrefixAnswered, PrefixAsked, PrefixExpired
from connectors.p2p.prefixes.pins import PinTerms, PrefixPins
from connectors.p2p.prefixes.pulls import PrefixPulls, is_answer_to
from connectors.p2p.producer.handshake import WorkerIdentity
from core.constants import HASH_BLOCK_SIZE
from core.errors import KVFerryError
from core.ids import IdSource
from core.kv.manager import KVCacheBlocks
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, SchedulerOutput
from core.wire.kv import KVHandoff


class P2PConnectorScheduler(HandoffScheduler[P2PConnectorMetadata]):
    """``grant`` starts a lease in the event loop; it must take effect before the engine's later outputs are sent.

    ``control_address`` is set when the control socket is bound. ``now`` is the clock of the event loop.
    """

    converts_blocks = True
    reads_early = True

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        lease_ms: int,
        ids: IdSource,
        grant: Callable[[LeaseGrant], None],
        now: Callable[[], float],
        post: Callable[[object], None] | None = None,
    ) -> None:
        super().__init__(identity, P2PConnectorMetadata, lease_ms=lease_ms, ids=ids)
        self._layout = identity.layout
        self._grant = grant
        self._refs: dict[str, HandoffRef] = {}  # by request id, as long as the request needs the handoff
        self._readers: dict[HandoffRef, set[str]] = {}
        self.pulls: PrefixPulls | None = None
        self.pins: PrefixPins | None = None
        if post is not None:
            self.pulls = PrefixPulls(self._layout.block_size, HASH_BLOCK_SIZE, post, now)
            self.pins = PrefixPins(identity, PinTerms(lease_ms, lambda: self.control_address), ids, post)

    def on_new_request(self, request: Request) -> None:
        """Check the request's handoff, if it has one, and keep its lease alive from now on."""
        super().on_new_request(request)
        if request.kv_handoff is not None:
            self._hold(request, request.kv_handoff)

    def _hold(self, request: Request, handoff: KVHandoff) -> None:
        ref = self._refs[request.request_id] = HandoffRef.of(handoff)
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
        request.has_optional_load = self._answer_of(request.request_id) is not None
        self.step.pulls.append(self._pull_request(request, offer, blocks, num_tokens))

    def refuse_load(self, request_id: str, error: KVFerryError) -> None:
        """Report the load as failed, with its owner."""
        self.step.refused[request_id] = Refusal(error, self._refs[request_id].producer)

    def abort_load(self, request_id: str) -> None:
        """Abort the pull."""
        self.step.aborts.append(request_id)

    def end_use(self, request_id: str) -> None:
        """Release the lease after its last reader."""
        if self.pulls is not None:
            self.pulls.drop_answer(request_id)
        ref = self._refs.pop(request_id)
        readers = self._readers.get(ref)
        if readers is None:  # an early pull has no lease
            return
        readers.discard(request_id)
        if not readers:
            del self._readers[ref]
            self.step.releases.append(ref)

    # ---- beginnings of prompts -----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Offer the rest of a handoff, or first ask the request's source for one."""
        pulls = self.pulls
        if pulls is not None:
            self._give_up_if_late(pulls, request.request_id)
            has_no_offer = request.request_id not in self._offers
            if has_no_offer and (pulls.is_waiting(request) or pulls.ask_if_worthwhile(request, num_computed_tokens)):
                return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As for every handoff; a request that has its blocks waits for no answer any more."""
        if self.pulls is not None:
            self.pulls.stop_waiting(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Release the handoffs of loads that have ended; take in answers and their ends, questions, and ends of pins."""
        if self.pulls is not None:
            self.pulls.add_time_asked(output.transfer_usage)
        super().update_connector_output(output)
        meta = output.worker_meta
        if self.pulls is None or self.pins is None or not isinstance(meta, P2PConnectorWorkerMetadata):
            return
        for report in meta.reports:
            match report:
                case PrefixAnswered():
                    self._take_answer(self.pulls, report)
                case PrefixExpired():
                    self._give_up_if_late(self.pulls, report.request_id)
                case PrefixAsked():
                    self.pins.on_asked(report)
                case PinEnded():
                    self.pins.on_ended(report.transfer_id, self.manager)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Ship the orders since the last step, and answer questions by what is sealed now."""
        if self.pins is not None and self.pins.has_questions:
            self.pins.answer_all(self.manager)
        return super().build_connector_meta(scheduler_output)

    def has_pending_push_work(self) -> bool:
        """True while an order or a question waits for the next step."""
        return super().has_pending_push_work() or (self.pins is not None and self.pins.has_questions)

    def free_spare_blocks(self) -> None:
        """Free the blocks that are kept for readers of prefixes."""
        if self.pins is not None:
            self.pins.free_all(self.manager)

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """As every handoff; the request waits for no answer any more."""
        kept = super().request_finished(request, block_ids)
        if self.pulls is not None:
            self.pulls.forget(request.request_id)
        return kept

    def _take_answer(self, pulls: PrefixPulls, answer: PrefixAnswered) -> None:
        """Offer what an answer holds for its request; release what no request can use."""
        request, handoff = pulls.take_answer(answer), answer.handoff
        if handoff is None:
            return
        if request is not None and is_answer_to(handoff, request, self._layout.block_size):
            offer = self._check_offer(request, handoff)
            if offer.refusal is None:
                self._offers[request.request_id] = offer
                self._hold(request, handoff)
                return
        pulls.drop_answer(answer.request_id)
        self.step.releases.append(HandoffRef.of(handoff))

    def _give_up_if_late(self, pulls: PrefixPulls, request_id: str) -> None:
        """Release the handoff of an answer if its request has waited for blocks for so long that a load could only fail."""
        if pulls.is_late(request_id) and self._offers.pop(request_id, None) is not None:  # else its load is in progress
            pulls.give_up_answer(request_id)
            self.end_use(request_id)

    def _answer_of(self, request_id: str) -> PrefixAnswered | None:
        return self.pulls.answer_of(request_id) if self.pulls is not None else None

    def _deadline_of(self, request: Request) -> float | None:
        """Return when the load of a request must end, on this worker's clock."""
        answer = self._answer_of(request.request_id)
        if answer is None or request.deadline is None:
            return request.deadline if answer is None else answer.deadline
        return min(request.deadline, answer.deadline)

    def _pull_request(self, request: Request, offer: Offer, blocks: KVCacheBlocks, num_tokens: int) -> PullRequest:
        """Pair those of our blocks that are not cached here with the producer's blocks that hold the same tokens.

        Raises:
            StaleBlock: the owner does not hold a block that is needed here.
        """
        handoff = offer.handoff
        num_processed = min(handoff.num_tokens, request.num_tokens - 1)  # the last token is computed here in any case
        units: list[ReadUnit] = []
        for group_id, (group, local_ids) in enumerate(zip(handoff.groups, blocks.get_block_ids(), strict=True)):
            extent = TokenExtent(
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
            self._deadline_of(request),
            handoff.layout,
            is_leased=not request.is_early,
        )
