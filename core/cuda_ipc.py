"""CUDA IPC: memory of one process, mapped into the address space of another one on the same host.

Owns nothing: who opens a handle closes it. Goes by the driver's library, so that a failed call leaves no error behind for the
next launch of the runtime, and makes the device's primary context, which is torch's, current for each call.

Source: CUDA driver API, sections "Memory Management" and "Primary Context Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.errors import ConnectorUnavailable, PeerUnreachable
from core.kv.peer_rows import Extent

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL

_Address = ctypes.c_uint64  # CUdeviceptr


class _Handle(ctypes.Structure):
    """CUipcMemHandle, passed by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaIpc:
    """The calls for one device, by its number among those that this process sees. ``library`` stands in for the driver.

    Raises:
        ConnectorUnavailable: there is no driver, or it does not know the device.
    """

    def __init__(self, device: int, library: Any = None) -> None:  # noqa: ANN401 - a library has no type
        self._cuda = library if library is not None else _load()
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        for name, *arguments in (
            ("cuInit", ctypes.c_uint(0)),
            ("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(device)),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device),  # the process keeps it for good
        ):
            failure = self._call(name, *arguments)
            if failure:
                raise ConnectorUnavailable(f"shm transport: {failure}")

    def export(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation that holds this address of ours, and the address counted from its start.

        Raises:
            ConnectorUnavailable: such memory cannot be shared.
        """
        handle = _Handle()
        try:
            base_address, _ = self.extent(address)
            with self._in_context():
                failure = self._call("cuIpcGetMemHandle", ctypes.byref(handle), _Address(base_address))
        except PeerUnreachable as error:
            raise ConnectorUnavailable(f"shm transport: {error.message}") from None
        if failure:
            raise ConnectorUnavailable(
                f"shm transport: {failure}: the KV pool lies in memory that CUDA IPC cannot share, as that of "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is: leave that out, or use tcp"
            )
        return bytes(handle), address - base_address

    def open(self, handle: bytes) -> int:
        """Map another process's allocation and return its address here.

        Raises:
            PeerUnreachable: it is gone, or this process may not map it.
        """
        address = _Address()
        with self._in_context():
            of_peer, flags = _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
            failure = self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), of_peer, flags)
        if failure:
            raise PeerUnreachable(f"the memory on its device cannot be mapped: {failure}")
        return address.value

    def close(self, address: int) -> None:
        """Unmap an allocation that ``open`` has mapped.

        Raises:
            PeerUnreachable: the driver refuses.
        """
        with self._in_context():
            failure = self._call("cuIpcCloseMemHandle", _Address(address))
        if failure:
            raise PeerUnreachable(f"memory on a device cannot be unmapped: {failure}")

    def extent(self, address: int) -> Extent:
        """Return the allocation that holds this address.

        Raises:
            PeerUnreachable: there is none.
        """
        base, num_bytes = _Address(), ctypes.c_size_t()
        with self._in_context():
            failure = self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), _Address(address))
        if failure:
            raise PeerUnreachable(f"no memory on a device is known at {address:#x}: {failure}")
        return Extent(base.value, num_bytes.value)

    def device_of(self, address: int) -> int:
        """Return the number of the device that holds this address.

        Raises:
            PeerUnreachable: the driver knows none.
        """
        ordinal = ctypes.c_int()
        with self._in_context():
            attribute = ctypes.c_int(_DEVICE_ORDINAL)
            failure = self._call("cuPointerGetAttribute", ctypes.byref(ordinal), attribute, _Address(address))
        if failure:
            raise PeerUnreachable(f"no device is known for the memory at {address:#x}: {failure}")
        return ordinal.value

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """Let this thread, whatever it has used before, use the device."""
        failure = self._call("cuCtxPushCurrent_v2", self._context)
        if failure:
            raise PeerUnreachable(f"the device cannot be used: {failure}")
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> str:
        """Call a function of the driver; return why it failed, empty if it did not."""
        code = int(getattr(self._cuda, name)(*arguments))
        if not code:
            return ""
        text = ctypes.c_char_p()
        if self._cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return f"{name} returned {code}"
        return f"{name} returned {text.value.decode()} ({code})"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise ConnectorUnavailable(f"shm transport: the CUDA driver cannot be loaded: {error}") from None
