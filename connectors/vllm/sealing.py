"""The seals of one rank of P: written in the step that completes a prompt, broken when the last handoff of a block ends.

Two threads use it: the engine's thread seals, and the agent's thread ends handoffs.
"""

from __future__ import annotations

import threading
from collections import Counter

from connectors.vllm.orders import SealOrder
from core.kv.seals import SealTable


class Sealer:
    """Handoffs by their transfer ids, and how many of them name each block. Any thread."""

    def __init__(self, seals: SealTable) -> None:
        self._seals = seals
        self._orders: dict[str, SealOrder] = {}
        self._num_handoffs: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._orders)

    def seal(self, order: SealOrder) -> None:
        """Seal the blocks of a prompt whose KV is complete; those that another handoff names have their seals already."""
        with self._lock:
            new = [(block_id, seal) for block_id, seal in order.blocks if not self._num_handoffs[block_id]]
            self._seals.seal_all(new)
            self._num_handoffs.update(block_id for block_id, _ in order.blocks)
            self._orders[order.transfer_id] = order

    def end(self, transfer_id: str) -> None:
        """Break the seals of blocks that no other handoff names. Idempotent."""
        with self._lock:
            order = self._orders.pop(transfer_id, None)
            if order is None:
                return
            self._num_handoffs.subtract(block_id for block_id, _ in order.blocks)
            free = [block_id for block_id, _ in order.blocks if not self._num_handoffs[block_id]]
            self._seals.break_seals(free)
            for block_id in free:
                del self._num_handoffs[block_id]
