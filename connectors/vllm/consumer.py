"""The scheduler side of D: which tokens of a prompt are loaded from a handoff, and how long its lease is held.

A handoff is offered once, after it has been compared with the request's own prompt; a refused one is never read. Its lease is
held from the arrival of the request to the end of the load on all ranks. Runs on the engine core's thread; knows no sockets,
no memory, and nothing of vLLM but its requests.

A release names a lease, and P ends it whoever needs it still. A client can write a handoff that shares leases with another one,
so it is released only when no request needs one that shares a lease with it. Ranks cannot decide that: with other numbers of
ranks of P, other ranks of D hold the same lease.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.p2p.actions import ReadUnit
from connectors.p2p.consumer.block_mapping import TokenExtent, map_group
from connectors.vllm.handoff_params import VALUE_KEY, EngineHandoff, brings_handoff, decode_handoff, engine_of
from connectors.vllm.head_ranges import can_split, heads_of
from connectors.vllm.identity import check_same_model
from connectors.vllm.orders import LoadOrder, RankOrders, RemoteHandoff
from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.producer import EngineIdentity, Table
from connectors.vllm.prompt_hashes import PromptHashes, VllmRequest, can_be_hashed
from core.errors import ConnectorUnavailable, InvalidRequest, KVFerryError, LayoutMismatch, StaleBlock, fallback_reason
from core.kv.hashing import BlockHasher
from core.rate_limit import LimitedLog
from core.wire.kv import GroupBlocks
from core.wire.pairing import check_convertible, has_equal_blocks

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A handoff that fits the request's prompt. ``block_hashes`` are this engine's own, at the ends of P's blocks."""

    handoff: EngineHandoff
    block_hashes: tuple[bytes, ...]

    @property
    def remote(self) -> RemoteHandoff:
        """The handoff as the ranks know it."""
        return RemoteHandoff(self.handoff.transfer_id, self.handoff.peers)


class Consumer:
    """Loads of one engine. Orders for the ranks go into ``orders``, the next step's message.

    ``windows`` holds the sliding window of each KV cache group in tokens, None for full attention.
    """

    def __init__(self, engine: EngineIdentity, hasher: BlockHasher, rules: PeerRules, windows: Sequence[int | None]) -> None:
        self.orders = RankOrders()
        self.refused: Counter[str] = Counter()  # handoffs that were not read, by reason
        self._engine = engine
        self._hasher = hasher
        self._rules = rules
        self._windows = windows
        self._offers: dict[str, _Offer] = {}  # by request id
        self._loading: dict[str, RemoteHandoff] = {}
        self._users: dict[str, Counter[RemoteHandoff]] = {}  # by transfer id: requests with an offer or a load of a handoff
        self._unused: list[RemoteHandoff] = []  # handoffs whose release waits for others
        self._last_hashes: PromptHashes | None = None  # choices of one answer have one prompt, and come one after another
        self._is_suspended = False
        self._limited_log = LimitedLog(_log, time.monotonic)

    @property
    def num_loading(self) -> int:
        """How many requests wait for blocks."""
        return len(self._loading)

    def on_new_request(self, request: VllmRequest) -> None:
        """Check the request's handoff, if it has one, and keep its lease alive from now on. A refused one is released."""
        params = request.kv_transfer_params
        if not brings_handoff(params):
            return
        handoff: EngineHandoff | None = None
        try:
            handoff = decode_handoff(params)
            if handoff is None:
                raise ConnectorUnavailable(
                    f"kv_transfer_params of engine {engine_of(params)!r} have no {VALUE_KEY!r}: it runs another connector"
                )
            self._check_peers(handoff)
        except KVFerryError as error:
            self._refuse(error, engine_of(params))
            return
        remote = RemoteHandoff(handoff.transfer_id, handoff.peers)
        if not can_be_hashed(request) or request.abort_immediately:
            self._release_unused(remote)  # vLLM has rejected the request: its prompt is a stand-in
            return
        try:
            self._offers[request.request_id] = _Offer(handoff, self._check(request, handoff))
        except KVFerryError as error:
            self._refuse(error, handoff.engine_id)
            self._release_unused(remote)
            return
        self._users.setdefault(remote.transfer_id, Counter())[remote] += 1
        self.orders.holds.append(remote)
        self._order_releases()  # it may need what has been released since the last step: releases come after holds

    def num_loadable_tokens(self, request: VllmRequest, num_local_tokens: int) -> int:
        """Return how many tokens after the local hit a load would bring. Changes nothing."""
        offer = self._offers.get(request.request_id)
        return 0 if offer is None else max(0, offer.handoff.num_tokens - num_local_tokens)

    def start_load(self, request: VllmRequest, table: Table, num_tokens: int) -> None:
        """Load the last ``num_tokens`` tokens of the request's handoff into its blocks; 0 = the handoff is not needed."""
        offer = self._offers.pop(request.request_id, None)
        if offer is None:
            return
        if not num_tokens:
            self._release(offer.remote)
            return
        self._loading[request.request_id] = offer.remote
        units = self._map(request, offer, table, num_tokens)
        self.orders.loads.append(LoadOrder(request.request_id, offer.remote, units, num_tokens, offer.handoff.layout))

    def request_finished(self, request_id: str) -> None:
        """End what the request has begun. Blocks of a load stay the request's until all ranks report its end."""
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            self._release(offer.remote)
        elif request_id in self._loading:
            self.orders.aborts.append(request_id)

    def suspend(self) -> None:
        """Give up the handoffs that are not being loaded yet, and refuse all until ``reset``: the model has other weights."""
        self._is_suspended = True
        while self._offers:
            _, offer = self._offers.popitem()
            self._release(offer.remote)

    def reset(self, engine: EngineIdentity, hasher: BlockHasher) -> None:
        """Give up the handoffs that are not being loaded yet, and go on as this engine: no KV of the old weights is left."""
        self.suspend()
        self._engine, self._hasher, self._is_suspended = engine, hasher, False

    def on_loads_ended(self, request_ids: set[str]) -> None:
        """All ranks have ended these loads, successfully or not: release the leases."""
        for request_id in sorted(request_ids & self._loading.keys()):
            self._release(self._loading.pop(request_id))

    def _release(self, remote: RemoteHandoff) -> None:
        """One request is done with a handoff. Others may use it too: several choices of one answer are as many requests."""
        users = self._users[remote.transfer_id]
        users[remote] -= 1
        if users[remote]:
            return
        del users[remote]
        if not users:
            del self._users[remote.transfer_id]
        self._release_unused(remote)

    def _release_unused(self, remote: RemoteHandoff) -> None:
        self._unused.append(remote)
        self._order_releases()

    def _order_releases(self) -> None:
        """Release the handoffs that no request needs, but for those that share a lease with one that is needed."""
        unused = dict.fromkeys([*self.orders.releases, *self._unused])
        self._unused = [remote for remote in unused if self._is_shared(remote)]
        self.orders.releases = [remote for remote in unused if not self._is_shared(remote)]

    def _is_shared(self, remote: RemoteHandoff) -> bool:
        """Return True if a request needs this handoff, or another one with a lease of it."""
        return any(_share_lease(remote, used) for used in self._users.get(remote.transfer_id, ()))

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_peers(self, handoff: EngineHandoff) -> None:
        for rank in handoff.ranks:
            refusal = self._rules.refusal(rank.control_address)
            if refusal is not None:
                raise InvalidRequest(refusal)

    def _check(self, request: VllmRequest, handoff: EngineHandoff) -> tuple[bytes, ...]:
        """Compare the handoff with what this engine knows itself; return its own hashes at the ends of P's blocks.

        Raises:
            LayoutMismatch: P's blocks cannot be used here.
            StaleBlock: they are not those of this prompt.
        """
        engine = self._engine
        if self._is_suspended:
            raise LayoutMismatch("the last reset of vLLM's caches has failed here: reset them again")
        check_same_model(engine.model, handoff.model)
        check_convertible(engine.layout, handoff.layout, engine.engine_id)
        _check_ranks(engine, handoff)
        if handoff.layout.block_size != engine.layout.block_size and any(self._windows):
            sizes = f"block_size {handoff.layout.block_size} at the peer, {engine.layout.block_size} here"
            # A block that lacks the first tokens of a window would get into vLLM's prefix cache.
            raise LayoutMismatch(f"{sizes}: blocks of sliding windows are not converted")
        if len(handoff.groups) != len(self._windows):
            raise StaleBlock(f"the handoff has {len(handoff.groups)} groups, not {len(self._windows)}")
        if handoff.num_tokens > request.num_prompt_tokens:
            raise StaleBlock(f"the handoff covers {handoff.num_tokens} of {request.num_prompt_tokens} prompt tokens")
        hashes = self._hashes_of(request).block_ends(handoff.num_tokens, handoff.layout.block_size)
        if hashes[-1] != handoff.prompt_hash:
            raise StaleBlock("the handoff is of another prompt")
        for group_id, group in enumerate(handoff.groups):
            num_lacking = group.first_block * handoff.layout.block_size
            num_skipped = self._num_skipped(request, handoff, group_id)
            if group.first_block + len(group.block_ids) != len(hashes) or num_lacking > num_skipped:
                raise StaleBlock(f"the handoff lacks blocks of group {group_id}")
        return hashes

    def _hashes_of(self, request: VllmRequest) -> PromptHashes:
        if self._last_hashes is None or not self._last_hashes.is_of(self._hasher, request):
            self._last_hashes = PromptHashes(self._hasher, request)
        return self._last_hashes

    def _num_skipped(self, request: VllmRequest, handoff: EngineHandoff, group_id: int) -> int:
        """Return how many first tokens no later token attends to in this group. The prompt's last token is computed here."""
        window = self._windows[group_id]
        num_processed = min(handoff.num_tokens, request.num_prompt_tokens - 1)
        return 0 if window is None else max(0, num_processed - window + 1)

    def _map(self, request: VllmRequest, offer: _Offer, table: Table, num_tokens: int) -> tuple[ReadUnit, ...]:
        """Pair the blocks to fill with P's."""
        handoff = offer.handoff
        units: list[ReadUnit] = []
        for group_id, (group, local_ids) in enumerate(zip(handoff.groups, table, strict=True)):
            extent = TokenExtent(
                group_id=group_id,
                start=handoff.num_tokens - num_tokens,
                end=handoff.num_tokens,
                local_block_size=self._engine.layout.block_size,
                remote_block_size=handoff.layout.block_size,
                num_skipped_tokens=self._num_skipped(request, handoff, group_id),
                is_converted=not has_equal_blocks(self._engine.layout, handoff.layout),
            )
            blocks = GroupBlocks(
                group_id=group_id,
                first_block=group.first_block,
                block_ids=group.block_ids,
                generations=group.generations,
                block_hashes=offer.block_hashes[group.first_block :],
            )
            units += map_group(extent, blocks, local_ids, offer.block_hashes).units
        return tuple(units)

    def _refuse(self, error: KVFerryError, engine_id: str) -> None:
        reason = fallback_reason(error.code)
        self.refused[reason] += 1
        self._limited_log.warning("handoff_refused", key=(engine_id, reason), engine=engine_id, reason=error.message)


def _share_lease(one: RemoteHandoff, other: RemoteHandoff) -> bool:
    """Return True if these handoffs of one name have a lease in common, whatever they say of P's incarnation."""
    return any(ours.address == theirs.address for ours, theirs in zip(one.ranks, other.ranks, strict=False))


def _check_ranks(engine: EngineIdentity, handoff: EngineHandoff) -> None:
    """Check that the heads in P's blocks are known from its number of ranks.

    Raises:
        LayoutMismatch: they are not.
    """
    num_peers = len(handoff.ranks)
    if not engine.layout.splits_heads:
        if num_peers != len(engine.ranks):
            sizes = f"tensor parallelism {num_peers} at the peer, {len(engine.ranks)} here"
            raise LayoutMismatch(f"{sizes}; the KV heads of this model cannot be told apart in its blocks")
        return
    if not can_split(num_peers, engine.num_kv_heads):
        raise LayoutMismatch(f"{engine.num_kv_heads} KV heads cannot be split among the peer's {num_peers} ranks")
    found, expected = handoff.layout.num_kv_heads, len(heads_of(0, num_peers, engine.num_kv_heads))
    if found != expected:
        raise LayoutMismatch(
            f"{found} KV heads in a block at the peer, {expected} of {engine.num_kv_heads} on {num_peers} ranks"
        )
