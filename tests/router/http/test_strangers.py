"""Workers with another cluster key are counted each time, and logged at a limited rate."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from core.clock import SystemClock
from core.config_router import RouterSection
from core.wire.curve import derive_keys
from core.wire.sockets import AsyncContext, SocketOptions, dealer_socket
from router.dispatch.worker_gateway import WorkerGateway
from router.metrics import RouterMetrics

KEY = derive_keys("the key of the cluster, which is long enough")
OTHER_KEY = derive_keys("the key of another cluster, as long as that")


@pytest.fixture
async def gateway():
    registry = CollectorRegistry()
    config = RouterSection(worker_address="tcp://127.0.0.1:0")
    found = WorkerGateway(config, "tiny", "router", SystemClock(), RouterMetrics(registry), KEY)
    await found.start()
    yield found, registry
    await found.stop()


@pytest.mark.slow
async def test_worker_with_another_key_is_counted_each_time_and_logged_once(gateway, caplog):
    router, registry = gateway
    context = AsyncContext()
    strangers = [dealer_socket(context, SocketOptions(max_message_bytes=1 << 20, keys=OTHER_KEY)) for _ in range(3)]
    for stranger in strangers:
        stranger.connect(router.worker_address)
    for _ in range(2000):
        if (registry.get_sample_value("kvferry_refused_handshakes_total") or 0) >= len(strangers):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the refusals were not counted")
    for stranger in strangers:
        stranger.close(linger=0)
    context.term()
    assert sum("event=handshake_refused" in record.getMessage() for record in caplog.records) == 1
