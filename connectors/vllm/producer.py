"""The scheduler side of P: which blocks are sealed for readers, under which generation, and which handoffs are published.

A handoff goes through these states; a seal that readers may trust exists only between the order and the end:

    ordered     the step that completes the prompt seals its blocks, and leases them
    published   the request ended well: vLLM keeps its blocks until every rank has reported the transfer's end
    cancelled   it ended otherwise, or was preempted: the next step breaks the seals, before it writes any block

vLLM frees the blocks of a published handoff only after each rank has broken its seals, so no block with a valid seal that a
published handoff names is ever handed out. Runs on the engine core's thread; knows no sockets, no memory, and nothing of vLLM
but its requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.vllm.handoff_params import (
    MAX_VALUE_CHARS,
    VALUE_KEY,
    EngineHandoff,
    HeldBlocks,
    Rank,
    brings_handoff,
    decode_handoff,
    encode_handoff,
    wants_handoff,
)
from connectors.vllm.identity import ModelIdentity
from connectors.vllm.orders import RankOrders, SealOrder
from connectors.vllm.prompt_hashes import PromptHashes, VllmRequest, can_be_hashed
from core.errors import InvalidRequest
from core.ids import IdSource, new_hex_id
from core.kv.block import NULL_BLOCK_ID
from core.kv.hashing import BlockHasher
from core.kv.seals import ExpectedSeal
from core.log import event
from core.rate_limit import LimitedLog
from core.wire.kv import KVLayoutInfo

ENDED_WELL = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})
LOST_BLOCKS = frozenset({"PREEMPTED", "WAITING_FOR_REMOTE_KVS"})  # those of a request whose prompt was complete

Table = tuple[list[int], ...]  # block ids of a request, by KV cache group
_Content = tuple[int, bytes, int]  # of a block: its group, its hash, and how many tokens it holds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """What an engine writes into its handoffs. ``ranks`` are in order of their tensor-parallel rank.

    ``layout`` is that of a block on one rank, ``num_kv_heads`` counts those of the model, on all ranks together.
    """

    engine_id: str
    model: ModelIdentity
    layout: KVLayoutInfo
    ranks: tuple[Rank, ...]
    num_kv_heads: int
    lease_ms: int


@dataclass(slots=True)
class _SealedBlock:
    """A block that handoffs name: its seal, equal for all of them, and how many they are."""

    seal: ExpectedSeal
    num_handoffs: int = 0


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A handoff whose blocks are sealed, by group from the first block that the group still holds."""

    transfer_id: str
    groups: tuple[HeldBlocks, ...]
    prompt_hash: bytes

    def block_ids(self) -> list[int]:
        """All blocks of the handoff."""
        return [block_id for group in self.groups for block_id in group.block_ids]


class Producer:
    """Handoffs of one engine. Orders for the ranks go into ``orders``, the next step's message.

    ``windows`` holds the sliding window of each KV cache group in tokens, None for full attention.
    """

    def __init__(self, engine: EngineIdentity, hasher: BlockHasher, ids: IdSource, windows: Sequence[int | None]) -> None:
        self.orders = RankOrders()
        self._engine = engine
        self._hasher = hasher
        self._ids = ids
        self._windows = windows
        self._wanted: dict[str, VllmRequest] = {}  # requests whose prompt is not complete yet, by id
        self._ordered: dict[str, tuple[VllmRequest, _Ordered]] = {}
        self._published: dict[str, _Ordered] = {}
        self._sealed: dict[int, _SealedBlock] = {}
        self._last_generation = 0
        self._is_suspended = False
        self._limited_log = LimitedLog(_log, time.monotonic)

    @property
    def num_held_blocks(self) -> int:
        """How many blocks handoffs name, published or not."""
        return len(self._sealed)

    def on_new_request(self, request: VllmRequest) -> None:
        """Remember a request whose KV another engine will load."""
        if wants_handoff(request.kv_transfer_params) and can_be_hashed(request):
            self._wanted[request.request_id] = request

    def build_orders(self, num_scheduled_tokens: dict[str, int], table_of: Callable[[str], Table | None]) -> None:
        """Order the seals of the prompts that this step completes.

        Requests whose seals were ordered and that go on are cancelled: a preempted one has lost its blocks, also if another
        connector loads into new ones since, and one that is scheduled again is no prompt for another engine, unless it was
        preempted and resumed since the last step.
        """
        for request_id, (ordered_request, _) in list(self._ordered.items()):
            if ordered_request.status.name in LOST_BLOCKS or request_id in num_scheduled_tokens:
                self._cancel(request_id)
                self._want_again(ordered_request)
        if self._is_suspended:
            return
        for request_id, count in num_scheduled_tokens.items():
            request = self._wanted.get(request_id)
            if request is None:
                continue
            if request.num_computed_tokens < request.num_prompt_tokens <= request.num_computed_tokens + count:
                table = table_of(request_id)
                assert table is not None, f"{request_id} is scheduled without blocks"
                self._order(request, table)
                del self._wanted[request_id]

    def request_finished(self, request: VllmRequest, table: Table) -> dict[str, Any] | None:
        """Publish the request's handoff and return its ``kv_transfer_params``; None: its blocks may be freed at once."""
        self._wanted.pop(request.request_id, None)
        num_output_tokens = request.num_output_tokens
        if num_output_tokens > 1 and request.status.name in ENDED_WELL and wants_handoff(request.kv_transfer_params):
            hint = "a prompt is handed off after its first token: ask for max_tokens 1"
            self._limited_log.warning("handoff_not_made", output_tokens=num_output_tokens, hint=hint)
        if request.request_id not in self._ordered:
            return None
        _, ordered = self._ordered[request.request_id]
        is_whole = request.status.name in ENDED_WELL and num_output_tokens == 1
        if not is_whole or not _holds(table, ordered.groups):
            self._cancel(request.request_id)
            return None
        params = encode_handoff(self._describe(request, ordered), request.request_id)
        num_chars = len(params[VALUE_KEY])
        if num_chars > MAX_VALUE_CHARS:  # no reader would take it, nor release it
            self._limited_log.warning("handoff_too_large", prompt_tokens=request.num_prompt_tokens, characters=num_chars)
            self._cancel(request.request_id)
            return None
        del self._ordered[request.request_id]
        self._published[request.request_id] = ordered
        self.orders.published.append(ordered.transfer_id)
        return params

    def end_own(self, params: object) -> bool:
        """End a published handoff of this engine that nothing will read; return False if the parameters bring none."""
        if not brings_handoff(params):
            return False
        try:
            handoff = decode_handoff(params)
        except InvalidRequest:
            return False
        if handoff is None or all(own.transfer_id != handoff.transfer_id for own in self._published.values()):
            return False
        self.orders.ended.append(handoff.transfer_id)
        return True

    def suspend(self) -> None:
        """End all handoffs, and make none until ``reset``: the model has other weights.

        Prompts that have been computed in part are not handed off later either: their KV is of both.
        """
        self._is_suspended = True
        for request_id, (ordered_request, _) in list(self._ordered.items()):
            self._cancel(request_id)
            self._want_again(ordered_request)
        self._wanted = {name: request for name, request in self._wanted.items() if not request.num_computed_tokens}
        self.orders.ended += [ordered.transfer_id for ordered in self._published.values()]

    def reset(self, engine: EngineIdentity, hasher: BlockHasher) -> None:
        """End all handoffs, and go on as this engine: no KV of the old weights is left."""
        self.suspend()
        self._engine, self._hasher, self._is_suspended = engine, hasher, False

    def on_sending_ended(self, request_ids: set[str]) -> None:
        """All ranks have broken their seals of these requests' blocks, which vLLM frees now."""
        for request_id in sorted(request_ids & self._published.keys()):
            self._forget(self._published.pop(request_id))

    # ---- one handoff -------------------------------------------------------------------------------------------------

    def _order(self, request: VllmRequest, table: Table) -> None:
        num_tokens, block_size = request.num_prompt_tokens, self._engine.layout.block_size
        hashes = PromptHashes(self._hasher, request).block_ends(num_tokens, block_size)
        firsts = [
            self._first_held_block(group_id, block_ids[: len(hashes)], num_tokens) for group_id, block_ids in enumerate(table)
        ]
        contents = {
            block_ids[index]: (group_id, hashes[index], min(block_size, num_tokens - index * block_size))
            for group_id, block_ids in enumerate(table)
            for index in range(firsts[group_id], len(hashes))
        }
        strange = [block_id for block_id, content in contents.items() if self._has_other_content(block_id, content)]
        if strange:  # vLLM has freed them without our report: what it says cannot be handed off
            _log.error(event("handoff_not_sealed", request_id=request.request_id, blocks_of_other_handoffs=strange))
            return
        seals = {block_id: self._seal(block_id, content) for block_id, content in contents.items()}
        groups = []
        for first, block_ids in zip(firsts, table, strict=True):
            held = tuple(block_ids[first : len(hashes)])
            groups.append(HeldBlocks(first, held, tuple(seals[block_id].generation for block_id in held)))
        ordered = _Ordered(new_hex_id(self._ids, "kv-"), tuple(groups), hashes[-1])
        self._ordered[request.request_id] = request, ordered
        self.orders.seals.append(SealOrder(ordered.transfer_id, request.request_id, tuple(seals.items())))

    def _first_held_block(self, group_id: int, block_ids: Sequence[int], num_tokens: int) -> int:
        """Return the position of the first block that vLLM holds until the request ends; the window has left earlier ones."""
        window = self._windows[group_id]
        first = 0 if window is None else max(0, num_tokens - window + 1) // self._engine.layout.block_size
        while first < len(block_ids) and block_ids[first] == NULL_BLOCK_ID:
            first += 1
        return first

    def _has_other_content(self, block_id: int, content: _Content) -> bool:
        sealed = self._sealed.get(block_id)
        return sealed is not None and (sealed.seal.group_id, sealed.seal.block_hash, sealed.seal.num_tokens) != content

    def _seal(self, block_id: int, content: _Content) -> ExpectedSeal:
        """Return the seal of a block for one more handoff: the one that others know already, or one of a new generation."""
        sealed = self._sealed.get(block_id)
        if sealed is None:
            self._last_generation += 1
            sealed = self._sealed[block_id] = _SealedBlock(ExpectedSeal(self._last_generation, *content))
        sealed.num_handoffs += 1
        return sealed.seal

    def _cancel(self, request_id: str) -> None:
        _, ordered = self._ordered.pop(request_id)
        self._forget(ordered)
        waiting = [order for order in self.orders.seals if order.transfer_id != ordered.transfer_id]
        if len(waiting) < len(self.orders.seals):  # no step has carried it
            self.orders.seals = waiting
        else:
            self.orders.cancelled.append(ordered.transfer_id)

    def _want_again(self, request: VllmRequest) -> None:
        """Remember a cancelled request whose prompt is computed anew: its output was in flight when it was preempted.

        While it is loaded, all of it may be counted as computed; its last token is computed all the same.
        """
        is_anew = request.status.name in LOST_BLOCKS or request.num_computed_tokens < request.num_prompt_tokens
        if is_anew and not request.num_output_tokens:
            self._wanted[request.request_id] = request

    def _forget(self, ordered: _Ordered) -> None:
        for block_id in ordered.block_ids():
            sealed = self._sealed[block_id]
            sealed.num_handoffs -= 1
            if not sealed.num_handoffs:
                del self._sealed[block_id]

    def _describe(self, request: VllmRequest, ordered: _Ordered) -> EngineHandoff:
        engine = self._engine
        return EngineHandoff(
            transfer_id=ordered.transfer_id,
            engine_id=engine.engine_id,
            model=engine.model,
            layout=engine.layout,
            num_tokens=request.num_prompt_tokens,
            prompt_hash=ordered.prompt_hash,
            groups=ordered.groups,
            ranks=engine.ranks,
            lease_ms=engine.lease_ms,
        )


def _holds(table: Table, groups: Sequence[HeldBlocks]) -> bool:
    """Return True if the request still has the blocks that were sealed, at the same positions."""
    return all(
        tuple(block_ids[group.first_block : group.first_block + len(group.block_ids)]) == group.block_ids
        for block_ids, group in zip(table, groups, strict=True)
    )
