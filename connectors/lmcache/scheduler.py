"""The scheduler side of the LMCache connector: decides what is looked up, loaded and saved for every request.

A request is looked up once, without blocking: the scheduler polls until the answer arrives. The chunks that the server has
beyond the local hits are loaded once; after a failed load the request computes its prompt. Chunks that a step completes are
copied after the step (``connectors.lmcache.worker``) and sent when the engine has sealed their blocks. A seal means that the KV
is complete and valid, and identifies it. Runs on the engine thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from connectors.lmcache.messages import (
    BlockMove,
    LMCacheMPConnectorMetadata,
    LoadPages,
    LookupPages,
    PageTransfer,
    SavePages,
    ServerSession,
    moves_of,
)
from connectors.lmcache.tracker import LMCacheMPRequestMetadata, LMCacheMPRequestState, LMCacheMPRequestTracker
from connectors.lmcache.wire import TokenSpan, wire_salt
from core.clock import Clock
from core.connector import KVConnectorScheduler
from core.constants import HASH_BLOCK_SIZE
from core.ids import IdSource, new_hex_id
from core.kv.block import NULL_BLOCK_ID
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.seals import decode_seal
from core.kv.spec import KVCacheGroup
from core.request import KVConnectorMetadata, KVConnectorOutput, Request, RequestStatus, SchedulerOutput, extra_keys_of
from core.wire.kv import KVHandoff

_SESSION_PREFIX = "kvferry-"


class LMCacheMPConnectorScheduler(KVConnectorScheduler):
    """Tracks every request. Looks up, loads and saves nothing while ``server`` is None.

    The event loop sets ``server`` and the answers to lookups, at any time; each method reads ``server`` once. With
    ``saves_output`` False only prompts are saved.
    """

    def __init__(self, ids: IdSource, clock: Clock, *, saves_output: bool, handoff_wait_s: float) -> None:
        self._ids = ids
        self._clock = clock
        self._handoff_wait_s = handoff_wait_s
        self._saves_output = saves_output
        self._manager: KVCacheManager | None = None
        self.server: ServerSession | None = None
        self._arrived: deque[tuple[str, int]] = deque()  # answers to lookups from the event loop
        self._answers: dict[str, int] = {}  # by session
        self._trackers: dict[str, LMCacheMPRequestTracker] = {}  # by request id
        self._servers: dict[str, ServerSession] = {}  # by session: the server it belongs to
        self._waiting_since: dict[str, float] = {}  # by request id: for chunks that a prefill worker may still be saving
        self._loading: set[str] = set()
        self._unproven: dict[str, list[SavePages]] = {}  # by request id: copied, but not sealed yet
        self._num_saves = 0
        self.num_saves_without_room = 0
        self._next = LMCacheMPConnectorMetadata()

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Keep the manager, for block tables and seals."""
        self._manager = manager

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """The KV cache groups, known once the manager is bound."""
        return self._bound_manager.kv_cache_config.groups

    def on_lookup_answer(self, session_id: str, num_tokens: int) -> None:
        """Queue the answer to a lookup until the scheduler polls. Any thread."""
        self._arrived.append((session_id, num_tokens))

    # ---- lookups and loads -----------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens that the server has beyond the local hits; None while the lookup is pending."""
        tracker = self._tracker_of(request)
        if tracker.state is not LMCacheMPRequestState.PREFETCHING:
            return 0, False
        num_tokens = self._answer_of(tracker)
        if num_tokens is None:
            return None, False
        if self._is_being_saved(request, tracker, num_tokens):
            self._end_session(tracker)
            is_pending = self._look_up(request).state is LMCacheMPRequestState.PREFETCHING
            return (None if is_pending else 0), False
        tracker.found(num_tokens, num_computed_tokens)
        count = max(0, num_tokens - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Load the offered tokens, or release their locks if another connector loads or no load is needed.

        If an earlier connector had a hit, the request was not looked up here. It is tracked from now on, so that the chunks it
        computes are saved.
        """
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            self._track(request, LMCacheMPRequestState.READY, self.server)
            return
        if tracker.state is not LMCacheMPRequestState.PREFETCHING:
            return
        self._answers.pop(tracker.session_id, None)
        self._waiting_since.pop(request.request_id, None)
        if num_external_tokens and tracker.needs_retrieve():
            tracker.state = LMCacheMPRequestState.WAITING_FOR_LOAD
            self._load(request, tracker, num_external_tokens)
        tracker.state = LMCacheMPRequestState.READY
        self._next.unclaimed.append(tracker.session_id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Record the ends of loads."""
        self._loading -= output.finished_recving

    def _tracker_of(self, request: Request) -> LMCacheMPRequestTracker:
        """Return the request's tracker; a new one, with a lookup, if it has none or was preempted."""
        tracker = self._trackers.get(request.request_id)
        if tracker is None:
            return self._look_up(request)
        if request.status is RequestStatus.PREEMPTED and tracker.state is LMCacheMPRequestState.READY:
            self._end_session(tracker)
            return self._look_up(request)
        return tracker

    def _answer_of(self, tracker: LMCacheMPRequestTracker) -> int | None:
        """Return the number of tokens that the server has; None while pending. Answers for ended sessions are dropped."""
        while self._arrived:
            session_id, num_tokens = self._arrived.popleft()
            if session_id in self._servers:
                self._answers[session_id] = num_tokens
        return self._answers.get(tracker.session_id)

    def _is_being_saved(self, request: Request, tracker: LMCacheMPRequestTracker, num_tokens: int) -> bool:
        """Return whether the prefill worker may still be saving chunks of this prompt.

        True only for a request that arrives with its first token and without a handoff: the server is its only source of KV.
        The save of its last chunks can take longer than the message from the prefill worker.
        """
        server = self._servers.get(tracker.session_id)
        is_first_try = request.num_preemptions == 0 and request.kv_handoff is None
        if server is None or server is not self.server or not is_first_try or request.num_output_tokens == 0:
            return False
        num_expected = min(server.geometry.floor(request.num_prompt_tokens), self._num_loadable(server))
        now = self._clock.now()
        return (
            num_tokens < num_expected and now < self._waiting_since.setdefault(request.request_id, now) + self._handoff_wait_s
        )

    @staticmethod
    def _num_loadable(server: ServerSession) -> int:
        """Return the largest number of tokens for one load."""
        geometry = server.geometry
        return server.staging.load_capacity // geometry.pages_per_chunk * geometry.chunk_size

    def _look_up(self, request: Request) -> LMCacheMPRequestTracker:
        server = self.server
        if server is None:
            return self._bypass(request)
        num_tokens = server.geometry.floor(min(request.num_tokens, self._num_loadable(server)))
        if not num_tokens:
            return self._bypass(request)
        tracker = self._track(request, LMCacheMPRequestState.PREFETCHING, server)
        self._next.lookups.append(LookupPages(self._span(request, tracker, num_tokens), num_tokens, server))
        return tracker

    def _bypass(self, request: Request) -> LMCacheMPRequestTracker:
        return self._track(request, LMCacheMPRequestState.BYPASS_LMCACHE, self.server)

    def _track(self, request: Request, state: LMCacheMPRequestState, server: ServerSession | None) -> LMCacheMPRequestTracker:
        """Track a request in a session with a new name: the server assumes that equal names mean equal tokens."""
        tracker = LMCacheMPRequestTracker(request, new_hex_id(self._ids, _SESSION_PREFIX), state)
        self._trackers[request.request_id] = tracker
        if server is not None:
            self._servers[tracker.session_id] = server
        return tracker

    def _load(self, request: Request, tracker: LMCacheMPRequestTracker, num_external_tokens: int) -> None:
        server = self._servers[tracker.session_id]
        block_ids = self._bound_manager.get_block_ids(request.request_id)
        span = self._span(request, tracker, tracker.num_lmcache_hit_tokens)
        chunks = LMCacheMPRequestMetadata.GetRetrieveMetadata(tracker, server.geometry, block_ids, span)
        assert chunks is not None, f"{request.request_id} waits for its load"
        self._loading.add(request.request_id)
        self._next.loads.append(LoadPages(self._transfer(request, chunks, server), num_external_tokens, request.deadline))

    # ---- steps and saves -------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Check the saves of the last step, count the tokens of this one, and return the queued work."""
        for request_id in list(self._unproven):
            self._judge(request_id)
        num_scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(new.request_id, new.num_computed_tokens)
        for request_id in num_scheduled:
            self._count(request_id, num_scheduled)
        metadata, self._next = self._next, LMCacheMPConnectorMetadata()
        return metadata

    def has_pending_push_work(self) -> bool:
        """True while work is queued, or copied blocks wait for their seals, until the next step."""
        return bool(self._unproven) or not self._next.is_empty()

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """End the request's session and its load. Its blocks can be freed: saves use copies of them."""
        self._judge(request.request_id)
        tracker = self._trackers.pop(request.request_id, None)
        self._waiting_since.pop(request.request_id, None)
        if request.request_id in self._loading:
            self._next.aborts.append(request.request_id)
        if tracker is not None:
            self._end_session(tracker)
        return False, None

    def _begin(self, request_id: str, num_computed_tokens: int) -> None:
        """Reset the counts of a request that starts or restarts."""
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        tracker.begin(num_computed_tokens)
        server = self._servers.get(tracker.session_id)
        if server is not None:
            tracker.forget_stored(num_computed_tokens, server.geometry.chunk_size)

    def _count(self, request_id: str, num_scheduled: Mapping[str, int]) -> None:
        """Add the tokens that the step computes for a request, and save the chunks that it completes."""
        tracker = self._trackers.get(request_id)
        if tracker is None:
            return
        tracker.num_scheduled_tokens += num_scheduled[request_id]
        server = self._servers.get(tracker.session_id)
        if server is None or server is not self.server:
            return  # a new server has none of the earlier chunks
        request, num_stored = tracker.request, tracker.num_stored_tokens
        if server.geometry.floor(tracker.num_computed_tokens) > num_stored:
            self._save(request, tracker, server)

    def _save(self, request: Request, tracker: LMCacheMPRequestTracker, server: ServerSession) -> None:
        """Save the unsaved chunks for which there are pages; the next steps save the rest, until the request ends."""
        block_ids = self._bound_manager.get_complete_block_ids(request.request_id)
        num_stored = tracker.num_stored_tokens
        max_tokens = None if self._saves_output else request.num_prompt_tokens
        span = self._span(request, tracker, request.num_tokens)
        geometry, num_free = server.geometry, server.staging.num_free_to_save
        num_chunks = (geometry.floor(tracker.num_computed_tokens) - num_stored) // geometry.chunk_size
        # What does not fit whole leaves half of the pages to others, which may end with this step.
        fits = num_chunks * geometry.pages_per_chunk <= num_free
        max_chunks = num_chunks if fits else max(1, num_free // (2 * geometry.pages_per_chunk))
        chunks = LMCacheMPRequestMetadata.GetStoreMetadata(tracker, geometry, block_ids, span, max_tokens, max_chunks)
        if chunks is None:
            return
        transfer = self._transfer(request, chunks, server)
        pages = server.staging.take_to_save(len(transfer.moves))
        if pages is None:
            tracker.num_stored_tokens = num_stored
            self.num_saves_without_room += 1
            return
        self._num_saves += 1
        save = SavePages(self._num_saves, transfer, tuple(pages))
        self._unproven.setdefault(request.request_id, []).append(save)
        self._next.saves.append(save)

    def _judge(self, request_id: str) -> None:
        """Queue a verdict for each copied save: True if the engine sealed all of its blocks."""
        for save in self._unproven.pop(request_id, ()):
            is_good = self._is_sealed(save)
            self._next.verdicts[save.number] = is_good
            tracker = self._trackers.get(request_id)
            if not is_good and tracker is not None:
                chunks = save.transfer.chunks
                tracker.forget_stored(chunks.start, save.transfer.server.geometry.chunk_size)

    def _is_sealed(self, save: SavePages) -> bool:
        """Return whether the seals of all blocks of a save match their identities.

        A block that has left its group's window since, and may hold another request's KV now, was complete: none is copied
        whose first tokens are missing, and a block leaves the window only after later tokens were processed.
        """
        chunks, manager = save.transfer.chunks, self._bound_manager
        tables = manager.get_block_ids(chunks.request_id)
        first_block = chunks.start // save.transfer.server.geometry.block_size
        for move in save.transfer.moves:
            held = tables[move.identity.group_id][first_block + move.index :][:1]
            if held != [NULL_BLOCK_ID] and not self._has_seal(move):
                return False
        return True

    def _has_seal(self, move: BlockMove) -> bool:
        pool = self._bound_manager.block_pool
        assert pool.seals is not None, "the connector does not start without seals"
        seal = decode_seal(pool.seals.row(move.block_id))
        return (
            seal is not None
            and seal.generation == pool.blocks[move.block_id].generation
            and (seal.group_id, seal.block_hash) == (move.identity.group_id, move.identity.block_hash)
        )

    # ---- details ---------------------------------------------------------------------------------------------------

    def _end_session(self, tracker: LMCacheMPRequestTracker) -> None:
        self._answers.pop(tracker.session_id, None)
        if self._servers.pop(tracker.session_id, None) is not None:
            self._next.ended.append(tracker.session_id)

    def _transfer(self, request: Request, chunks: LMCacheMPRequestMetadata, server: ServerSession) -> PageTransfer:
        block_size = server.geometry.block_size
        moves = moves_of(chunks, block_size, request.block_hashes, block_size // HASH_BLOCK_SIZE)
        return PageTransfer(chunks, server, tuple(moves))

    def _span(self, request: Request, tracker: LMCacheMPRequestTracker, num_tokens: int) -> TokenSpan:
        token_ids = request.all_token_ids[:num_tokens].tolist()
        return TokenSpan(tracker.session_id, token_ids, wire_salt(request.cache_salt, extra_keys_of(request.mm_features, "")))

    @property
    def _bound_manager(self) -> KVCacheManager:
        assert self._manager is not None, "bind_kv_cache_manager comes before any request"
        return self._manager
