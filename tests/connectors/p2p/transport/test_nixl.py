from pathlib import Path

import numpy as np
import pytest

from connectors.p2p.transport.nixl import PROGRESS_INTERVAL_US, NixlTransport
from core.ids import RandomIds
from core.testing.transport_suite import TransportSuite
from core.transport import RowRegion

FACTORIES = Path(__file__).with_name("transport_factories.py")


class TestNixlTransport(TransportSuite):
    factory = f"{FACTORIES}:make_nixl"


def test_progress_threads_sleep_between_events(monkeypatch):
    api = pytest.importorskip("nixl_cu12._api")
    seen = []
    real = api.nixlBind.nixlAgent

    def make(name, config):
        seen.append(config.pthrDelay)
        return real(name, config)

    monkeypatch.setattr(api.nixlBind, "nixlAgent", make)
    rows = np.zeros((4, 4096), dtype=np.uint8)
    transport = NixlTransport(RandomIds(), "test")
    transport.register([RowRegion(rows.ctypes.data, 4, 4096, memoryview(rows).cast("B"))])
    transport.close()
    assert seen == [PROGRESS_INTERVAL_US]
    assert api.nixlBind.nixlAgent is make
