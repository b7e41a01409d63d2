"""What a worker counts of its requests."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.wire.messages import TransferUsage
from core.worker.request_accounts import RequestAccounts


def test_exposed_transfer_is_observed_once_for_each_request_that_waited():
    registry = CollectorRegistry()
    accounts = RequestAccounts(WorkerMetrics(registry, {}), requests=None)
    accounts.count([EngineCoreOutput("a/0", [1], transfer_usage=TransferUsage(early_bytes=400, exposed_ms=250.0))])
    accounts.count([EngineCoreOutput("a/0", [2])])
    accounts.count([EngineCoreOutput("b/0", [1], transfer_usage=TransferUsage())])
    name = "kvferry_kv_exposed_transfer_seconds"
    assert (registry.get_sample_value(f"{name}_count"), registry.get_sample_value(f"{name}_sum")) == (1, 0.25)
