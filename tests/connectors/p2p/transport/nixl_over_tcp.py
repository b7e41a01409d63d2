"""The suite over UCX's TCP, for owner and reader.

Run by ``test_nixl.py`` in a process of its own: UCX reads its environment once, when it is loaded.
"""

import os
from pathlib import Path

import numpy as np
import pytest

from connectors.testing.transport_suite import NUM_ROWS, PEER, TransportSuite

FACTORIES = Path(__file__).with_name("transport_factories.py")


@pytest.fixture(autouse=True, scope="session")
def _only_tcp():
    assert os.environ["UCX_TLS"] == "tcp"


class TestNixlOverTcp(TransportSuite):
    factory = f"{FACTORIES}:make_nixl"

    def test_no_byte_of_a_frozen_owner_arrives_after_the_fence(self, facing, mortal):
        """Without the suite's last question to the thawed owner.

        UCX ends the process of an owner that answers a reader which is gone ("Fatal: unexpected error: Endpoint timeout").
        """
        assert facing.read([0], [0]) is None
        mortal.freeze()
        rows = list(range(1, NUM_ROWS))
        handle = facing.transport.post_read(PEER, 0, rows, rows)
        for _ in range(20):
            facing.poll(0.01)
        assert handle not in facing.results, "only TCP needs the owner's process; this was something else"
        facing.transport.remove_peer(PEER)
        before = facing.memory.rows.copy()
        mortal.thaw()
        facing.wait(handle)
        for _ in range(20):
            facing.poll(0.01)
        assert np.array_equal(facing.memory.rows, before), "bytes arrived after the fence"
