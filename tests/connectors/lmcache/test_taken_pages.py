"""What is copied from pages into the pool, with a server that writes whenever it likes."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from connectors.lmcache.connector import LMCacheConnector
from connectors.lmcache.staging import SHM_PREFIX, PageIdentity, PageSealer, Staging
from core.digest import BlockDigester

BLOCK_BYTES, BLOCK_SIZE = 256, 32
IDENTITIES = [PageIdentity(0, bytes([number]) * 16) for number in range(2)]


class LateWriter:
    """Checks as a ``PageSealer``; the server writes into the pages once each check is done, or before it."""

    def __init__(self, sealer: PageSealer, staging: Staging, *, is_early: bool) -> None:
        self._sealer = sealer
        self._staging = staging
        self._is_early = is_early

    def find_fault(self, *args):
        if self._is_early:
            self._staging.rows[:, :8] = 9
        fault = self._sealer.find_fault(*args)
        self._staging.rows[:, :8] = 9
        return fault


@pytest.fixture
def staging():
    staging = Staging(f"{SHM_PREFIX}test_taken_{os.getpid()}", 1 << 16, BLOCK_BYTES, BLOCK_SIZE)
    staging.unlink()
    return staging


@pytest.mark.parametrize("is_early", [True, False], ids=["before the check", "after the check"])
def test_what_the_server_writes_after_its_reply_never_passes_for_the_block(staging, is_early):
    """A block is either good in the pool, or named as faulty."""
    sealer = PageSealer(1, 7, BLOCK_SIZE, BlockDigester(BLOCK_BYTES))
    for page, identity in enumerate(IDENTITIES, start=1):
        staging.rows[page, :BLOCK_BYTES] = page
        sealer.seal(staging.rows[page], identity)
    pool = np.zeros((8, BLOCK_BYTES), np.uint8)
    connector = SimpleNamespace(
        _sealer=LateWriter(sealer, staging, is_early=is_early),
        worker=SimpleNamespace(rows=pool),
    )
    moves = tuple(SimpleNamespace(block_id=5 + index, identity=identity) for index, identity in enumerate(IDENTITIES))
    transfer = SimpleNamespace(server=SimpleNamespace(staging=staging), moves=moves)
    faults = LMCacheConnector._take(connector, SimpleNamespace(transfer=transfer, request_id="r"), (1, 2))
    is_good = [bool((pool[5 + index] == 1 + index).all()) for index in range(2)]
    assert is_good == [index not in faults for index in range(2)]
    assert is_good == [True, False], "the second is overwritten before it is copied"
