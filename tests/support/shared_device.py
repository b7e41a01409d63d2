"""A device without a GPU that several processes share: what stands in for CUDA IPC, with copies that are late.

The device's memory is a memory file of its owner; a handle names the file, and others map it. Copies go by a ``DelayedDevice``.
Implements ``core.kv.peer_rows.PeerMemory``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import struct
from collections.abc import Sequence
from functools import partial

import numpy as np

from connectors.p2p.transport.interface import RowRegion
from connectors.testing.delayed_device import DelayedDevice, DelayedEvent
from core.errors import ConnectorUnavailable, PeerUnreachable
from core.kv.peer_rows import ExportedMemory, Extent

HANDLE = struct.Struct("<qq48x")  # process and descriptor


def on_shared_device(region: RowRegion, device: DelayedDevice | None = None) -> RowRegion:
    """Return a region of host memory as if it were on a device; copies are late by chance, or as ``device`` says."""
    device = device or DelayedDevice(seed=1)
    memory = partial(SharedDeviceMemory, region, device)
    return dataclasses.replace(region, buffer=None, memory_fd=None, device="cuda:0", new_peer_memory=memory)


class SharedDeviceMemory:
    """See ``PeerMemory``. ``mapped`` is what is open, by address; ``known`` are regions of this process beside our own."""

    def __init__(self, region: RowRegion, device: DelayedDevice) -> None:
        assert region.buffer is not None
        self._region = region
        self._ours = _rows_at(region.base_address, region.num_rows, region.row_bytes)
        self._stream = device.new_stream()
        self.mapped: dict[int, mmap.mmap] = {}
        self.known = [region]
        self.num_opened = 0

    def export(self) -> ExportedMemory:
        """Name the memory file."""
        if self._region.memory_fd is None:
            raise ConnectorUnavailable("this memory cannot be shared")
        return ExportedMemory(HANDLE.pack(os.getpid(), self._region.memory_fd), 0)

    def open(self, handle: bytes) -> int:
        """Map the memory file of another process; its own a process cannot open, as with CUDA."""
        pid, fd = HANDLE.unpack(handle)
        if pid == os.getpid():
            raise PeerUnreachable("a process cannot open its own handle")
        try:
            there = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
            memory = mmap.mmap(there, os.fstat(there).st_size)
            os.close(there)
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"not mapped: {error}") from None
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.num_opened += 1
        self.mapped[address] = memory
        return address

    def close(self, address: int) -> None:
        """Unmap; nothing that was submitted may be left to be done."""
        assert not self._stream.work, "unmapped while copies are under way"
        del self.mapped[address]

    def extent(self, address: int) -> Extent:
        """Return the mapping that holds the address, or our own memory."""
        ours = [Extent(region.base_address, region.num_bytes) for region in self.known]
        for extent in (*ours, *(Extent(base, len(memory)) for base, memory in self.mapped.items())):
            if extent.base_address <= address < extent.base_address + extent.num_bytes:
                return extent
        raise PeerUnreachable("no such memory")

    def rows(self, address: int, num_rows: int, row_bytes: int) -> SharedDeviceRows:
        """Return rows that are mapped."""
        return SharedDeviceRows(self, _rows_at(address, num_rows, row_bytes))

    def submit(self, source: np.ndarray, remote_rows: Sequence[int], local_rows: Sequence[int]) -> DelayedEvent:
        """Copy rows some time."""

        def copy() -> None:
            self._ours[list(local_rows)] = source[list(remote_rows)]

        return self._stream.submit(copy)


class SharedDeviceRows:
    """See ``PeerRows``."""

    def __init__(self, memory: SharedDeviceMemory, rows: np.ndarray) -> None:
        self._memory = memory
        self._rows = rows

    def start_copy(self, remote_rows: Sequence[int], local_rows: Sequence[int]) -> DelayedEvent:
        """Copy rows some time."""
        return self._memory.submit(self._rows, remote_rows, local_rows)

    def copy_to_host(self, first_row: int, target: memoryview) -> None:
        """Copy rows now."""
        num_rows = target.nbytes // self._rows.shape[1]
        target[:] = self._rows[first_row : first_row + num_rows].reshape(-1).data


def _rows_at(address: int, num_rows: int, row_bytes: int) -> np.ndarray:
    memory = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(address)
    return np.frombuffer(memory, dtype=np.uint8).reshape(num_rows, row_bytes)
