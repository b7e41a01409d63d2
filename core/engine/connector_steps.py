"""The worker side of a connector inside the runner's step: the calls of ``core.connector.KVConnectorWorker``, in order.

Owns the sequence and what a failing connector does to a step. Does not know what a connector moves. The
sequence runs in every step, empty ones included.

An error before the forward pass ends the step at once: nothing may be computed on KV of unknown state. An error after it is
kept as ``failure`` and raised by the next step, so that tokens already sampled reach their clients first. Either way the
engine ends: transfers that fail are *reported* (``failed_recving``); a connector that raises is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from core.attention.base import AttentionBackend, AttentionBatch, AttentionPlan, AttentionSpec
from core.connector import KVConnectorWorker
from core.request import KVConnectorOutput, SchedulerOutput


class ConnectorSteps:
    """The lifecycle of one connector, or of none (``worker`` None: every call does nothing)."""

    def __init__(self, worker: KVConnectorWorker | None, launch_is_asynchronous: bool) -> None:
        self._worker = worker
        self._launch_is_asynchronous = launch_is_asynchronous
        self.failure: Exception | None = None

    def before_forward(self, step: SchedulerOutput) -> None:
        """Secure blocks that this step may overwrite, and start loads that the pass must see."""
        if self.failure is not None:
            raise self.failure
        if self._worker is None or step.kv_connector_metadata is None:
            return
        self._worker.handle_preemptions(step.kv_connector_metadata)
        if self._loads_early(step):
            self._worker.start_load_kv(step.kv_connector_metadata)

    def after_launch(self, step: SchedulerOutput) -> None:
        """Start the loads that run during the pass."""
        if self._worker is None or step.kv_connector_metadata is None or self._loads_early(step):
            return
        self._worker.start_load_kv(step.kv_connector_metadata)

    def finish(self, step: SchedulerOutput) -> KVConnectorOutput | None:
        """Return what ended since the last step, None if nothing did."""
        if self._worker is None:
            return None
        try:
            self._worker.wait_for_save()
            output = self._worker.get_transfer_results(step.finished_req_ids)
            output.invalid_block_ids |= self._worker.get_block_ids_with_load_errors()
        except Exception as error:  # any error of a plugin; kept, and raised by the next step
            self.failure = error
            return None
        return None if output.is_empty() else output

    def shutdown(self) -> None:
        """Stop the connector's worker side."""
        if self._worker is not None:
            self._worker.shutdown()

    def _loads_early(self, step: SchedulerOutput) -> bool:
        # On the CPU the launch is the whole pass; a load started after it would wait for it.
        return step.has_sync_kv_loads or not self._launch_is_asynchronous


@dataclass(slots=True)
class _LayerwisePlan(AttentionPlan):
    """The inner backend's plan, and the model's numbers of the group's layers."""

    inner: AttentionPlan
    layer_indices: tuple[int, ...]


class LayerwiseAttention(AttentionBackend):
    """An attention backend that tells a connector about every layer: before its KV is touched, and once it is written.

    Attention counts layers within their KV cache group, connectors as the model does: ``groups[group][layer]`` translates.
    """

    name = "layerwise"

    def __init__(self, inner: AttentionBackend, worker: KVConnectorWorker, groups: Sequence[tuple[int, ...]]) -> None:
        super().__init__(inner.cache)
        self._inner = inner
        self._worker = worker
        self._groups = groups

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """See ``AttentionBackend.plan``."""
        inner = self._inner.plan(batch)
        return _LayerwisePlan(inner.write_rows, inner, self._groups[batch.group_id])

    def write_kv(self, layer: int, key_value: Tensor, plan: AttentionPlan) -> None:
        """Wait for the layer's loads, which may reach into the block of the new tokens, then write."""
        assert isinstance(plan, _LayerwisePlan)
        self._worker.wait_for_layer_load(plan.layer_indices[layer])
        self._inner.write_kv(layer, key_value, plan.inner)

    def attend(self, layer: int, query: Tensor, spec: AttentionSpec, plan: AttentionPlan) -> Tensor:
        """Attend, then offer the layer for saving."""
        assert isinstance(plan, _LayerwisePlan)
        attended = self._inner.attend(layer, query, spec, plan.inner)
        self._worker.save_kv_layer(plan.layer_indices[layer])
        return attended


def with_layer_hooks(
    attention: AttentionBackend, worker: KVConnectorWorker | None, groups: Sequence[tuple[int, ...]]
) -> AttentionBackend:
    """Return a backend that calls the connector's layer hooks, or ``attention`` itself where it has none of its own."""
    if worker is None:
        return attention
    base, kind = KVConnectorWorker, type(worker)
    if kind.wait_for_layer_load is base.wait_for_layer_load and kind.save_kv_layer is base.save_kv_layer:
        return attention
    return LayerwiseAttention(attention, worker, groups)
