"""The worker side of several connectors: every call goes to all of them, and their reports become one.

Owns when the blocks of a finished request are free: after every connector that reads them has reported so. Knows nothing of
its parts' work. Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from connectors.multi.scheduler import MultiKVConnectorMetadata, MultiKVConnectorWorkerMetadata
from core.connector import KVConnectorWorker
from core.kv.pool_region import KVPoolRegion
from core.request import KVConnectorMetadata, KVConnectorOutput


class MultiConnectorWorker(KVConnectorWorker):
    """Passes calls on to all parts, and merges their results."""

    def __init__(self, connectors: Sequence[KVConnectorWorker]) -> None:
        self._connectors = tuple(connectors)
        self._extra_async_saves: dict[str, int] = {}  # by request id: ends of saves that do not free its blocks yet

    def register_kv_caches(self, pool: KVPoolRegion) -> None:
        """Show the pool to all."""
        for connector in self._connectors:
            connector.register_kv_caches(pool)

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Let each of them wake the engine."""
        for connector in self._connectors:
            connector.set_wakeup(wakeup)

    def handle_preemptions(self, metadata: KVConnectorMetadata) -> None:
        """Let each finish with preempted requests."""
        for connector, own in self._messages(metadata):
            connector.handle_preemptions(own)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Start the loads of all. The counts of saves come first: an end may be reported in this very step."""
        assert isinstance(metadata, MultiKVConnectorMetadata)
        self._extra_async_saves |= metadata.extra_async_saves
        for connector, own in self._messages(metadata):
            connector.start_load_kv(own)

    def wait_for_save(self) -> None:
        """Return once none of them needs this step's blocks as they are."""
        for connector in self._connectors:
            connector.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Merge the reports. A request's blocks count as sent once all connectors that read them have reported so."""
        outputs = [connector.get_transfer_results(finished_req_ids) for connector in self._connectors]
        merged = KVConnectorOutput()
        for output in outputs:
            merged.finished_sending |= {request_id for request_id in output.finished_sending if self._is_last(request_id)}
            merged.finished_recving |= output.finished_recving
            merged.invalid_block_ids |= output.invalid_block_ids
            merged.failed_recving |= output.failed_recving
            merged.load_errors |= output.load_errors
            merged.quarantined_block_ids |= output.quarantined_block_ids
            merged.unquarantined_block_ids |= output.unquarantined_block_ids
            merged.transfer_usage |= output.transfer_usage
        metadata = tuple(output.worker_meta for output in outputs)
        if any(meta is not None for meta in metadata):
            merged.worker_meta = MultiKVConnectorWorkerMetadata(metadata)
        return merged

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the two sets of ``get_transfer_results``."""
        output = self.get_transfer_results(finished_req_ids)
        return output.finished_sending, output.finished_recving

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that any of them has found invalid."""
        return set().union(*(connector.get_block_ids_with_load_errors() for connector in self._connectors))

    def shutdown(self) -> None:
        """End all, the last first, also if one fails."""
        with ExitStack() as stack:
            for connector in self._connectors:
                stack.callback(connector.shutdown)

    def _messages(self, metadata: KVConnectorMetadata) -> list[tuple[KVConnectorWorker, KVConnectorMetadata]]:
        assert isinstance(metadata, MultiKVConnectorMetadata)
        return list(zip(self._connectors, metadata.metadata, strict=True))

    def _is_last(self, request_id: str) -> bool:
        """Count the end of one save; True if no other is open."""
        num_left = self._extra_async_saves.pop(request_id, 0)
        if num_left > 1:
            self._extra_async_saves[request_id] = num_left - 1
        return num_left == 0


class LayerwiseMultiConnectorWorker(MultiConnectorWorker):
    """With the layer hooks: only if a part has them, since the engine calls them in every layer."""

    def wait_for_layer_load(self, layer: int) -> None:
        """Return once the layer's loads of all parts are done."""
        for connector in self._connectors:
            connector.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Offer the layer to all."""
        for connector in self._connectors:
            connector.save_kv_layer(layer)


def multi_connector_worker(connectors: Sequence[KVConnectorWorker]) -> MultiConnectorWorker:
    """Return a worker side for several; it has layer hooks only if a part has them."""
    base = KVConnectorWorker
    has_hooks = any(
        type(worker).wait_for_layer_load is not base.wait_for_layer_load or type(worker).save_kv_layer is not base.save_kv_layer
        for worker in connectors
    )
    return LayerwiseMultiConnectorWorker(connectors) if has_hooks else MultiConnectorWorker(connectors)
