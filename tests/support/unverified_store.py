"""A defect for tests of the simulator: blocks of a store are used as they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.base import StoredBlock
from kvstore.client_base import StoreClientBase


def use_what_a_store_gives_unverified(patch: Callable[[object, str, object], None]) -> None:
    """Let every client of a store copy without a check; ``patch`` is ``monkeypatch.setattr``."""

    def copy_out(_client: StoreClientBase, block: StoredBlock, target: memoryview) -> None:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(block.content, np.uint8))

    patch(StoreClientBase, "copy_out", copy_out)
    patch(StoreClientBase, "verify", lambda _client, _block: None)
