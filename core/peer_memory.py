"""Reads pools of other processes on a CUDA device, by kernels of this process on a stream of their own.

Owns the stream, the row numbers in pinned memory and what is mapped. The stream has no order with the model's: rows that are
read are sealed, or their seals tell that they were not; rows that are written were given to a load, and no step in flight
writes them any more. Implements ``core.kv.peer_rows.PeerMemory``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from core.cuda_ipc import CudaIpc
from core.errors import ConnectorUnavailable, PeerUnreachable
from core.kv.peer_rows import CopyUnderWay, ExportedMemory, Extent, PeerRows
from core.log import event

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)

MAX_ROWS = 4096  # of a launch: a read of more is cut
NUM_SLOTS = 32  # of row numbers, 64 KiB each: launches whose numbers may be on their way to the device
SCRATCH_BYTES = 16 << 20  # on the device, where torch does the copies
_WORD_BYTES = 8

CopyRows = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", "torch.Tensor"], None]  # as in ``core.triton_rows``


class CudaPeerMemory:
    """See ``PeerMemory``. ``rows`` [num_rows, row_bytes] uint8, contiguous, is our pool.

    Raises:
        ConnectorUnavailable: there is no driver, or the device has no room for what the copies need.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._ours = rows
        self._ipc = CudaIpc(rows.device.index)
        try:
            self._copier = RowCopier(rows)
        except RuntimeError as error:  # torch's errors for want of memory are such
            reason = str(error).partition("\n")[0]
            raise ConnectorUnavailable(f"shm transport: {rows.device} cannot be prepared: {reason}") from None

    def export(self) -> ExportedMemory:
        """See ``PeerMemory``."""
        return ExportedMemory(*self._ipc.export(self._ours.data_ptr()))

    def open(self, handle: bytes) -> int:
        """See ``PeerMemory``."""
        return self._ipc.open(handle)

    def close(self, address: int) -> None:
        """See ``PeerMemory``. What cannot be unmapped stays mapped, with a warning."""
        try:
            self._ipc.close(address)
        except PeerUnreachable as error:
            _log.warning(event("device_memory_not_unmapped", reason=error.message))

    def extent(self, address: int) -> Extent:
        """See ``PeerMemory``."""
        return self._ipc.extent(address)

    def rows(self, address: int, num_rows: int, row_bytes: int) -> PeerRows:
        """See ``PeerMemory``. Memory of another device is refused: nothing has shown that all of its bytes come right."""
        device = self._ipc.device_of(address)
        if device != self._ours.device.index:
            raise PeerUnreachable(f"its memory is on cuda:{device}, ours on {self._ours.device}: shm reads within one device")
        return CudaPeerRows(_tensor_at(address, num_rows, row_bytes, self._ours.device), self._copier)


class CudaPeerRows:
    """See ``PeerRows``."""

    def __init__(self, rows: torch.Tensor, copier: RowCopier) -> None:
        self._rows = rows
        self._copier = copier

    def start_copy(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> CopyUnderWay:
        """See ``PeerRows``."""
        return self._copier.start(self._rows, remote_rows, local_rows)

    def copy_to_host(self, first_row: int, target: memoryview) -> None:
        """See ``PeerRows``."""
        self._copier.copy_to_host(self._rows, first_row, target)


class RowCopier:
    """Copies rows of tensors on a device into rows of ``target`` [num_rows, row_bytes] uint8, in order.

    ``is_by_torch``: not by Triton.
    """

    def __init__(self, target: torch.Tensor) -> None:
        import torch

        self._target = target
        self._device = target.device
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Each slot: the remote rows, then from an even place on the local ones, so that both are aligned to 16 bytes.
            self._slots = torch.empty((NUM_SLOTS, 2 * MAX_ROWS), dtype=torch.int64, pin_memory=True)
            self._slots_there = torch.empty((NUM_SLOTS, 2 * MAX_ROWS), dtype=torch.int64, device=self._device)
        self._uploads: list[CopyUnderWay | None] = [None] * NUM_SLOTS
        self._next_slot = 0
        self._max_rows = MAX_ROWS
        self.is_by_torch = False
        self._copy_rows = self._fastest()

    def start(self, source: torch.Tensor, remote_rows: Sequence[int], local_rows: Sequence[int]) -> CopyUnderWay:
        """Submit copies of rows of ``source`` [_, row_bytes]; return the event behind them."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._submit(self._copy_rows, self._target, source, remote_rows, local_rows)
            return self._event()

    def copy_to_host(self, source: torch.Tensor, first_row: int, target: memoryview) -> None:
        """Copy adjacent rows of ``source`` to host memory; they are there when this returns."""
        import torch

        num_rows = target.nbytes // source.shape[1]
        rows = torch.frombuffer(target, dtype=torch.uint8).view(num_rows, source.shape[1])
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            rows.copy_(source[first_row : first_row + num_rows])

    def _event(self) -> torch.cuda.Event:
        """Return the end of all that was submitted so far."""
        import torch

        reached: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        reached.record(self._stream)
        return reached

    def _submit(
        self,
        copy_rows: CopyRows,
        target: torch.Tensor,
        source: torch.Tensor,
        remote_rows: Sequence[int],
        local_rows: Sequence[int],
    ) -> None:
        """Launch on the current stream, piece by piece."""
        target, source = _in_words(target, source)
        for first in range(0, len(remote_rows), self._max_rows):
            piece = slice(first, first + self._max_rows)
            remote, local = self._upload(remote_rows[piece], local_rows[piece])
            copy_rows(target, source, local, remote)

    def _upload(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Send row numbers to the device; return them there. A slot is written again when its last upload is done."""
        slot, self._next_slot = self._next_slot, (self._next_slot + 1) % NUM_SLOTS
        upload_before = self._uploads[slot]
        if upload_before is not None:
            upload_before.synchronize()
        num_rows = len(remote_rows)
        middle = num_rows + num_rows % 2
        numbers = self._slots[slot].numpy()
        numbers[:num_rows] = remote_rows
        numbers[middle : middle + num_rows] = local_rows
        there = self._slots_there[slot]
        there[: middle + num_rows].copy_(self._slots[slot, : middle + num_rows], non_blocking=True)
        self._uploads[slot] = self._event()
        return there[:num_rows], there[middle : middle + num_rows]

    def _fastest(self) -> CopyRows:
        """Return Triton's kernel, compiled by now, if it copies right; else torch's operations, on fewer rows at a time."""
        import torch

        try:
            from core.triton_rows import copy_rows

            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                is_right = self._copies_right(copy_rows)
            if is_right:
                return copy_rows
            reason = "it copied other bytes"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _log.warning(event("triton_rows_off", reason=reason))
        row_bytes = self._target.shape[1]
        self.is_by_torch, self._max_rows = True, max(1, min(MAX_ROWS, SCRATCH_BYTES // row_bytes))
        return copier_by_torch(torch.empty((self._max_rows, row_bytes), dtype=torch.uint8, device=self._device))

    def _copies_right(self, copy_rows: CopyRows) -> bool:
        """Copy three rows of the pool's size into another order."""
        import torch

        generator = torch.Generator().manual_seed(1)  # the device's own is that of the model's steps
        drawn = torch.randint(0, 256, (3, self._target.shape[1]), dtype=torch.uint8, generator=generator)
        source = drawn.to(self._device)
        copied = torch.zeros_like(source)
        self._submit(copy_rows, copied, source, [2, 0, 1], [0, 1, 2])
        return bool(torch.equal(copied, source.roll(1, 0)))


def copier_by_torch(scratch: torch.Tensor) -> CopyRows:
    """Return what copies as many rows at a time as ``scratch`` [_, row_bytes] uint8 has, without taking memory."""
    import torch

    def copy_rows(target: torch.Tensor, source: torch.Tensor, target_rows: torch.Tensor, source_rows: torch.Tensor) -> None:
        taken = scratch.view(target.dtype)[: len(source_rows)]
        torch.index_select(source, 0, source_rows, out=taken)
        target.index_copy_(0, target_rows, taken)

    return copy_rows


def _in_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors of bytes as tensors of words of 8 bytes, where all rows of all of them begin and end at one."""
    import torch

    are_words = all(tensor.shape[1] % _WORD_BYTES == 0 and tensor.data_ptr() % _WORD_BYTES == 0 for tensor in tensors)
    return tuple(tensor.view(torch.int64) for tensor in tensors) if are_words else tensors


class _Array:
    """Memory on a device for ``torch.as_tensor``, see "CUDA Array Interface" in Numba's documentation."""

    def __init__(self, address: int, shape: tuple[int, int]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


def _tensor_at(address: int, num_rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    """Return the memory at an address of the device as a tensor [num_rows, row_bytes] uint8.

    Raises:
        PeerUnreachable: torch does not take it.
    """
    import torch

    try:
        tensor = torch.as_tensor(_Array(address, (num_rows, row_bytes)), device=device)
    except (RuntimeError, ValueError, TypeError) as error:
        raise PeerUnreachable(f"its memory cannot be read here: {error}") from None
    if tensor.data_ptr() != address:
        raise PeerUnreachable("its memory cannot be read in place here")
    return tensor
