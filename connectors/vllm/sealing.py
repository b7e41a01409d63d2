"""The seals of one rank of P: written when a prompt is complete, broken when the last handoff of a block ends.

On a CPU the engine's thread seals, in the step that completes the prompt. On a device that step has only been submitted when
vLLM asks for it, so a thread of its own waits for it and seals. The agent's thread ends handoffs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from connectors.vllm.orders import SealOrder
from core.kv.seals import SealTable

STOP_TIMEOUT_S = 10.0


class KVWritten(Protocol):
    """The moment in which the KV of a step is in memory (``torch.cuda.Event`` is one)."""

    def synchronize(self) -> None:
        """Return once it has come."""
        ...


class Sealer:
    """Handoffs by their transfer ids, and how many of them name each block. Any thread."""

    def __init__(self, seals: SealTable) -> None:
        self._seals = seals
        self._orders: dict[str, SealOrder] = {}
        self._num_handoffs: Counter[int] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._orders)

    def begin(self, order: SealOrder) -> None:
        """Note a handoff; its blocks are sealed by ``seal``, if it has not ended before."""
        with self._lock:
            self._num_handoffs.update(block_id for block_id, _ in order.blocks)
            self._orders[order.transfer_id] = order

    def seal(self, order: SealOrder) -> None:
        """Seal the blocks of a prompt whose KV is complete; those that another handoff names may have their seals already."""
        with self._lock:
            if order.transfer_id in self._orders:
                of = self._seals.sealed_generation
                self._seals.seal_all([(block_id, seal) for block_id, seal in order.blocks if of(block_id) != seal.generation])

    def end(self, transfer_id: str) -> None:
        """Break the seals of blocks that no other handoff names; what is not sealed yet never will be. Idempotent."""
        with self._lock:
            order = self._orders.pop(transfer_id, None)
            if order is None:
                return
            self._num_handoffs.subtract(block_id for block_id, _ in order.blocks)
            free = [block_id for block_id, _ in order.blocks if not self._num_handoffs[block_id]]
            self._seals.break_seals(free)
            for block_id in free:
                del self._num_handoffs[block_id]


class SealingThread:
    """Seals prompts whose KV a device is still writing, in the order in which they were submitted.

    ``bind`` makes the calling thread use the device of the pool. ``fail`` is called with the error that ended the thread.
    """

    def __init__(self, sealer: Sealer, bind: Callable[[], None], fail: Callable[[BaseException], None]) -> None:
        self._sealer = sealer
        self._bind = bind
        self._fail = fail
        self._queue: SimpleQueue[tuple[KVWritten, Sequence[SealOrder]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvferry-sealing", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Seal what was submitted, then end the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(STOP_TIMEOUT_S)

    def seal(self, orders: Sequence[SealOrder], written: KVWritten) -> None:
        """Seal the blocks of these prompts once ``written`` has come. Returns at once."""
        self._queue.put((written, orders))

    def _run(self) -> None:
        try:
            self._bind()
            while (handed := self._queue.get()) is not None:
                written, orders = handed
                written.synchronize()
                for order in orders:
                    self._sealer.seal(order)
        except BaseException as error:  # a CUDA error, say: no later handoff could be sealed
            self._fail(error)
