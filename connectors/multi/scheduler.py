"""The scheduler side of several connectors: the first one with a hit loads, and all may save.

Owns which connector loads for which request, and how many still read the blocks of a finished one. Every connector gets
every request and every step, in the configured order; those that are not chosen are called with nothing to load, and get the
same blocks. Runs on the engine thread and knows nothing of its parts' work. After vLLM's ``MultiConnector``, which continues
to ask the others after a hit: here they are not asked, since their answers would be ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain

from core.connector import KVConnectorScheduler
from core.kv.events import KVCacheEvent
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.request import KVConnectorMetadata, KVConnectorOutput, KVConnectorWorkerMetadata, Request, SchedulerOutput
from core.wire.kv import KVHandoff


@dataclass(frozen=True, slots=True)
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """One step's message of each connector, in their order.

    ``extra_async_saves`` maps requests that have just finished to the number of connectors, less one, that read their blocks.
    """

    metadata: tuple[KVConnectorMetadata, ...]
    extra_async_saves: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MultiKVConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """The messages of each connector to its scheduler side, in their order; None from connectors without one."""

    metadata: tuple[KVConnectorWorkerMetadata | None, ...]


class MultiConnectorScheduler(KVConnectorScheduler):
    """Asks in order; informs all. At most one of them makes handoffs: a request has one."""

    def __init__(self, connectors: Sequence[KVConnectorScheduler]) -> None:
        self._connectors = tuple(connectors)
        self._manager: KVCacheManager | None = None
        self._chosen: dict[str, KVConnectorScheduler] = {}  # by request id, from a hit until its blocks are allocated
        self._extra_async_saves: dict[str, int] = {}
        self._early = tuple(connector for connector in connectors if connector.reads_early)
        self.reads_early = bool(self._early)

    def _concerned(self, request: Request) -> tuple[KVConnectorScheduler, ...]:
        """Return all, or those that load early for a request whose prompt is still being computed elsewhere."""
        return self._early if request.is_early else self._connectors

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Pass the manager on, and keep it for the references of blocks."""
        self._manager = manager
        for connector in self._connectors:
            connector.bind_kv_cache_manager(manager)

    def on_new_request(self, request: Request) -> None:
        """Show the request to all that it concerns."""
        for connector in self._concerned(request):
            connector.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the offer of the first connector that has one.

        While a connector has no answer yet, the later ones are not asked, because it takes precedence.
        """
        self._chosen.pop(request.request_id, None)
        for connector in self._concerned(request):
            num_tokens, is_async = connector.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                self._chosen[request.request_id] = connector
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Tell the chosen connector to load, and all others that there is nothing for them to load."""
        chosen = self._chosen.pop(request.request_id, None)
        assert chosen is not None or not num_external_tokens, f"{request!r} loads what was not offered"
        for connector in self._concerned(request):
            connector.update_state_after_alloc(request, blocks, num_external_tokens if connector is chosen else 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return all their messages, and the counts of saves since the last step."""
        extra, self._extra_async_saves = self._extra_async_saves, {}
        metadata = tuple(connector.build_connector_meta(scheduler_output) for connector in self._connectors)
        return MultiKVConnectorMetadata(metadata, extra)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Pass the report to all; each gets its own worker side's addition."""
        meta = output.worker_meta
        assert meta is None or isinstance(meta, MultiKVConnectorWorkerMetadata)
        own = meta.metadata if meta is not None else (None,) * len(self._connectors)
        for connector, worker_meta in zip(self._connectors, own, strict=True):
            connector.update_connector_output(replace(output, worker_meta=worker_meta))

    def request_finished(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, KVHandoff | None]:
        """Keep the blocks while any connector reads them, and return the handoff of the one that makes it."""
        self._chosen.pop(request.request_id, None)
        handoff: KVHandoff | None = None
        num_saves = 0
        for connector in self._concerned(request):
            is_kept, found = connector.request_finished(request, block_ids)
            num_saves += is_kept
            assert handoff is None or found is None, f"two connectors hand {request!r} over"
            handoff = handoff or found
        if num_saves > 1:
            self._extra_async_saves[request.request_id] = num_saves - 1
        return num_saves > 0, handoff

    def describe_prefix(self, request: Request, start: int, end: int) -> KVHandoff | None:
        """Return the description of the first that makes one."""
        descriptions = (connector.describe_prefix(request, start, end) for connector in self._connectors)
        return next((handoff for handoff in descriptions if handoff is not None), None)

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Return the events of all."""
        return [event for connector in self._connectors for event in connector.take_events()]

    def has_pending_push_work(self) -> bool:
        """True if a part has work, or a count must reach the worker side."""
        return bool(self._extra_async_saves) or any(connector.has_pending_push_work() for connector in self._connectors)

    def has_pending_block_frees(self) -> bool:
        """True if a part is about to free blocks, or several together."""
        if any(connector.has_pending_block_frees() for connector in self._connectors):
            return True
        holders = [block_ids for connector in self._connectors if (block_ids := connector.soon_released_blocks())]
        if len(holders) < 2 or self._manager is None:
            return False
        blocks, most = self._manager.block_pool.blocks, len(holders)
        shared = chain(*holders[1:])  # all blocks of two parts are among them; other references exist to nearly all
        candidates = [block_id for block_id in shared if blocks[block_id].ref_cnt <= most]
        return any(blocks[block_id].ref_cnt == sum(block_id in ids for ids in holders) for block_id in candidates)

    def free_spare_blocks(self) -> None:
        """Let all parts free what they can spare."""
        for connector in self._connectors:
            connector.free_spare_blocks()

    def shutdown(self) -> None:
        """End all, the last first, also if one fails."""
        with ExitStack() as stack:
            for connector in self._connectors:
                stack.callback(connector.shutdown)
