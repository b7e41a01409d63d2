"""The calls of CUDA's driver: with a driver that notes them and fails where the test says so."""

from __future__ import annotations

import ctypes

import pytest

from core.cuda_ipc import HANDLE_BYTES, CudaIpc
from core.errors import ConnectorUnavailable, PeerUnreachable

BASE, NUM_BYTES, CONTEXT, MAPPED = 0x7F0000000000, 4 << 20, 0xC0, 0x7E0000000000
HANDLE = bytes(range(HANDLE_BYTES))


class Driver:
    """Answers as a driver with one allocation. ``failing`` names the function that returns ``code``."""

    def __init__(self):
        self.failing, self.code = "", 1
        self.contexts, self.opened, self.closed = [], [], []
        self.num_devices = 2

    def __getattr__(self, name):
        def call(*arguments):
            if name == self.failing:
                return self.code
            return getattr(Driver, f"_{name}")(self, *arguments)

        return call

    def _cuInit(self, flags):
        return 0

    def _cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value + 40
        return 0

    def _cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = CONTEXT + device.value
        return 0

    def _cuCtxPushCurrent_v2(self, context):
        self.contexts.append(context.value)
        return 0

    def _cuCtxPopCurrent_v2(self, context):
        self.contexts.pop()
        return 0

    def _cuMemGetAddressRange_v2(self, base, num_bytes, address):
        assert self.contexts == [CONTEXT + 41]
        base._obj.value, num_bytes._obj.value = BASE, NUM_BYTES
        return 0

    def _cuIpcGetMemHandle(self, handle, address):
        assert address.value == BASE, "the allocation's start, not the pool's"
        ctypes.memmove(handle, HANDLE, HANDLE_BYTES)
        return 0

    def _cuIpcOpenMemHandle_v2(self, address, handle, flags):
        self.opened.append((bytes(handle), flags.value))
        address._obj.value = MAPPED
        return 0

    def _cuIpcCloseMemHandle(self, address):
        self.closed.append(address.value)
        return 0

    def _cuPointerGetAttribute(self, ordinal, attribute, address):
        assert attribute.value == 9
        ordinal._obj.value = 1
        return 0

    def _cuGetErrorName(self, code, text):
        if code.value != 1:
            return 1
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def ipc(driver):
    return CudaIpc(1, driver)


def test_memory_is_exported_by_its_allocation_and_the_place_in_it(ipc, driver):
    assert ipc.export(BASE + 512) == (HANDLE, 512)
    assert not driver.contexts, "the thread has the context that it had"


def test_memory_of_others_is_opened_and_closed(ipc, driver):
    assert ipc.open(HANDLE) == MAPPED
    assert driver.opened == [(HANDLE, 1)]
    assert ipc.extent(MAPPED + 7) == (BASE, NUM_BYTES)
    assert ipc.device_of(MAPPED) == 1
    ipc.close(MAPPED)
    assert driver.closed == [MAPPED]
    assert not driver.contexts


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_driver_without_the_device_makes_the_transport_unavailable(driver, failing):
    driver.failing = failing
    with pytest.raises(ConnectorUnavailable, match=rf"{failing} returned CUDA_ERROR_INVALID_VALUE \(1\)"):
        CudaIpc(1, driver)


@pytest.mark.parametrize("failing", ["cuMemGetAddressRange_v2", "cuIpcGetMemHandle", "cuCtxPushCurrent_v2"])
def test_memory_that_cannot_be_shared_makes_the_transport_unavailable(ipc, driver, failing):
    driver.failing = failing
    with pytest.raises(ConnectorUnavailable, match=failing):
        ipc.export(BASE)
    assert not driver.contexts


def test_context_that_is_lost_in_between_makes_the_transport_unavailable(ipc, driver, monkeypatch):
    """The device fails behind the first of two calls."""
    ask = Driver._cuMemGetAddressRange_v2

    def ask_and_lose(driver, *arguments):
        driver.failing = "cuCtxPushCurrent_v2"
        return ask(driver, *arguments)

    monkeypatch.setattr(Driver, "_cuMemGetAddressRange_v2", ask_and_lose)
    with pytest.raises(ConnectorUnavailable, match="CUDA_ERROR_INVALID_VALUE"):
        ipc.export(BASE + 512)


def test_reason_names_the_setting_of_torch_that_makes_memory_unshareable(ipc, driver):
    driver.failing = "cuIpcGetMemHandle"
    with pytest.raises(ConnectorUnavailable, match=r"expandable_segments.*use tcp"):
        ipc.export(BASE)


@pytest.mark.parametrize(
    ("failing", "call"),
    [
        ("cuIpcOpenMemHandle_v2", lambda ipc: ipc.open(HANDLE)),
        ("cuIpcCloseMemHandle", lambda ipc: ipc.close(MAPPED)),
        ("cuMemGetAddressRange_v2", lambda ipc: ipc.extent(MAPPED)),
        ("cuPointerGetAttribute", lambda ipc: ipc.device_of(MAPPED)),
        ("cuCtxPushCurrent_v2", lambda ipc: ipc.open(HANDLE)),
    ],
)
def test_call_that_fails_for_a_peer_makes_that_peer_unreachable(ipc, driver, failing, call):
    driver.failing, driver.code = failing, 201
    with pytest.raises(PeerUnreachable, match=f"{failing} returned 201"):
        call(ipc)
    assert not driver.contexts


def test_host_without_a_driver_is_told_of(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(ConnectorUnavailable, match=r"driver cannot be loaded: libcuda\.so\.1"):
        CudaIpc(0)
