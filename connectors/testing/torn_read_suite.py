"""The basis of the verified handoff: a seal that is read after its row, and has not changed, proves the row.

    class TestTcpOverRewrittenRows(RewrittenRowsSuite):
        factory = f"{__file__}:make_tcp"          # a function without arguments that returns a transport

An owner in a process of its own rewrites its rows all the time, by the rules: it breaks the seal, writes the row, and
makes the seal with the next generation. A transport with ``reads_in_order`` reads rows and seals at once; with any other
the seals wait for the end of the rows. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest

from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION
from connectors.testing.transport_owner import NUM_CONTENTS, ProcessOwner, generations_of, load_factory
from connectors.testing.transport_suite import PEER, Reader
from core.kv.seals import BROKEN

NUM_ROWS = 8
ROW_BYTES = 1 << 20
WANTED = {"proven": 500, "rewritten": 100}  # rows
DEADLINE_S = 120.0


class RewrittenRowsSuite:
    """The test. ``factory`` names the function that makes a transport, for this process and for the owner's."""

    factory: ClassVar[str]

    @pytest.fixture
    def connected(self) -> Iterator[Reader]:
        """Return a reader that is connected to a restless owner."""
        owner = ProcessOwner(self.factory, NUM_ROWS, ROW_BYTES, salt=1, is_restless=True)
        reader = Reader(load_factory(self.factory)(), NUM_ROWS, ROW_BYTES)
        reader.transport.add_peer(PEER, owner.metadata)
        yield reader
        reader.close()
        owner.close()

    def test_a_seal_that_is_as_it_was_proves_its_row(self, connected: Reader) -> None:
        """Some rows are rewritten meanwhile, some are not: both are distinguished, and no row that counts as proven is torn."""
        found: Counter[str] = Counter()
        deadline = time.monotonic() + DEADLINE_S
        while any(found[kind] < number for kind, number in WANTED.items()):
            assert time.monotonic() < deadline, f"too little was seen: {found}"
            assert connected.read(range(NUM_ROWS), range(NUM_ROWS), region=SEAL_REGION) is None
            before = generations_of(connected.seals)[:NUM_ROWS].copy()
            self._read_rows_and_seals(connected)
            after = generations_of(connected.seals)[:NUM_ROWS]
            for row, generation in enumerate(before.tolist()):
                is_proven = generation == after[row] != BROKEN
                found["proven" if is_proven else "rewritten"] += 1
                if is_proven:
                    content = connected.memory.rows[row]
                    assert (content == generation % NUM_CONTENTS).all(), f"row {row}, {generation}: {np.unique(content)}"

    def _read_rows_and_seals(self, reader: Reader) -> None:
        rows = range(NUM_ROWS)
        handles = [reader.transport.post_read(PEER, POOL_REGION, rows, rows)]
        if not reader.transport.reads_in_order:
            assert reader.wait(*handles) == [None]
        handles.append(reader.transport.post_read(PEER, SEAL_REGION, rows, rows))
        assert reader.wait(*handles) == [None, None]
