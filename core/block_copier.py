"""Copies of whole blocks between a pool on a device and pinned host memory, on a stream of their own.

Owns the stream and the pinned memory. Neither direction waits for the model's stream: a block that is read is sealed, and it
is sealed only after the host has waited for the step that filled it; a block that is written has been given to a request
since the last step that could touch it was waited for, and is used only after ``wait``. So copies run concurrently with the
model, and cost it memory bandwidth only. Implements ``core.kv.pool_region.BlockCopier``; what it needs of CUDA comes in as a
``CopyQueue``, so that tests can delay copies without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

STAGING_BYTES = 64 << 20  # of pinned memory; enough copies under way to keep the bus busy
MAX_SLOTS = 16


class CopyDone(Protocol):
    """A copy that was submitted (``torch.cuda.Event`` is one)."""

    def synchronize(self) -> None:
        """Return once it is done."""
        ...


class CopyQueue(Protocol):
    """Where copies are submitted: they are done in order, at some time."""

    def submit(self, copy: Callable[[], object]) -> CopyDone:
        """Submit a copy and return at once."""
        ...


class CudaCopyQueue:
    """A stream of a CUDA device. Its priority is the lowest, which is the default."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, copy: Callable[[], object]) -> CopyDone:
        """See ``CopyQueue``."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy()
            done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done


class TensorBlockCopier:
    """Copies rows of a tensor ``rows`` [num_blocks, block_bytes] uint8 to and from ``num_slots`` slots in host memory."""

    def __init__(self, rows: torch.Tensor, queue: CopyQueue, num_slots: int) -> None:
        import torch

        self._rows = rows
        self._queue = queue
        self._slots = torch.empty((num_slots, rows.shape[1]), dtype=torch.uint8, pin_memory=rows.is_cuda)
        self._copies: dict[int, CopyDone] = {}

    @property
    def num_slots(self) -> int:
        """See ``BlockCopier``."""
        return self._slots.shape[0]

    def slot(self, slot: int) -> memoryview:
        """See ``BlockCopier``."""
        assert slot not in self._copies, f"a copy still uses slot {slot}"
        return self._slots[slot].numpy().data

    def start_read(self, slot: int, block_id: int) -> None:
        """See ``BlockCopier``."""
        self._start(slot, lambda: self._slots[slot].copy_(self._rows[block_id], non_blocking=True))

    def start_write(self, slot: int, block_id: int) -> None:
        """See ``BlockCopier``."""
        self._start(slot, lambda: self._rows[block_id].copy_(self._slots[slot], non_blocking=True))

    def start_write_from(self, slot: int, block_id: int, memory: memoryview) -> None:
        """See ``BlockCopier``."""
        import torch

        source = torch.frombuffer(memory, dtype=torch.uint8)
        self._start(slot, lambda: self._rows[block_id].copy_(source, non_blocking=True))

    def wait(self, slot: int) -> None:
        """See ``BlockCopier``. Waits with the GIL released."""
        copy = self._copies.pop(slot, None)
        if copy is not None:
            copy.synchronize()

    def _start(self, slot: int, copy: Callable[[], object]) -> None:
        assert slot not in self._copies, f"a copy still uses slot {slot}"
        self._copies[slot] = self._queue.submit(copy)


def on_side_stream(device: torch.device, call: Callable[P, R]) -> Callable[P, R]:
    """Return ``call`` made on a stream of its own on a CUDA device; what it has submitted is done when it returns."""
    import torch

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            result = call(*args, **kwargs)
            stream.synchronize()
        return result

    return called


def cuda_block_copier(rows: torch.Tensor) -> TensorBlockCopier:
    """Return a copier for the use of one thread. ``rows`` [num_blocks, block_bytes] uint8, on a CUDA device."""
    num_slots = max(4, min(MAX_SLOTS, STAGING_BYTES // rows.shape[1]))
    return TensorBlockCopier(rows, CudaCopyQueue(rows.device), num_slots)
