"""Copies of rows between pools on a device: on the stand-in for CUDA, and on a GPU between two tensors of one process."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from core import peer_memory
from core.cuda_ipc import CudaIpc
from core.errors import ConnectorUnavailable, PeerUnreachable
from core.peer_memory import CudaPeerMemory, RowCopier
from tests.support.fake_cuda import ClaimedCuda

NUM_ROWS = 24


@pytest.fixture
def cuda():
    if torch.cuda.is_available():
        pytest.skip("a stand-in for a CUDA device, where there is none")
    cuda = ClaimedCuda()
    with cuda.installed():
        yield cuda


def rows_on_device(row_bytes, device="cuda"):
    content = torch.randint(0, 256, (NUM_ROWS, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return content.to(device), content


def install_kernel(monkeypatch, copy_rows):
    module = ModuleType("core.triton_rows")
    module.copy_rows = copy_rows
    monkeypatch.setitem(sys.modules, "core.triton_rows", module)


def copy_by_index(target, source, target_rows, source_rows):
    target.index_copy_(0, target_rows, source.index_select(0, source_rows))


def assert_copies(copier, target, row_bytes, device="cuda"):
    source, content = rows_on_device(row_bytes, device)
    remote, local = [7, 3, 3, 21, 0], [1, 20, 5, 0, 23]
    copier.start(source, remote, local).synchronize()
    found = target.cpu()
    assert torch.equal(found[local], content[remote])
    others = [row for row in range(NUM_ROWS) if row not in local]
    assert not found[others].any()


@pytest.mark.parametrize("row_bytes", [256, 250], ids=["words", "bytes"])
def test_rows_are_copied_by_torch_where_there_is_no_triton(cuda, caplog, monkeypatch, row_bytes):
    monkeypatch.setattr(peer_memory, "SCRATCH_BYTES", 2 * row_bytes)  # two rows at a time
    target = torch.zeros((NUM_ROWS, row_bytes), dtype=torch.uint8, device="cuda")
    copier = RowCopier(target)
    assert copier.is_by_torch
    assert "triton_rows_off" in caplog.text
    assert_copies(copier, target, row_bytes)


@pytest.mark.parametrize("row_bytes", [256, 250], ids=["words", "bytes"])
def test_rows_are_copied_by_a_kernel_that_copies_right(cuda, caplog, monkeypatch, row_bytes):
    install_kernel(monkeypatch, copy_by_index)
    target = torch.zeros((NUM_ROWS, row_bytes), dtype=torch.uint8, device="cuda")
    copier = RowCopier(target)
    assert (copier.is_by_torch, caplog.text) == (False, "")
    assert_copies(copier, target, row_bytes)


@pytest.mark.parametrize("damage", ["wrong rows", "refuses"])
def test_kernel_that_copies_wrong_or_not_at_all_is_not_used(cuda, caplog, monkeypatch, damage):
    def copy_rows(target, source, target_rows, source_rows):
        if damage == "refuses":
            raise RuntimeError("no compiler")
        copy_by_index(target, source, source_rows, target_rows)

    install_kernel(monkeypatch, copy_rows)
    target = torch.zeros((NUM_ROWS, 256), dtype=torch.uint8, device="cuda")
    copier = RowCopier(target)
    assert copier.is_by_torch
    assert ("no compiler" if damage == "refuses" else "other bytes") in caplog.text
    assert_copies(copier, target, 256)


def test_row_numbers_on_their_way_are_not_overwritten(cuda, monkeypatch):
    """The stand-in refuses to upload pinned memory that has changed meanwhile."""
    monkeypatch.setattr(peer_memory, "NUM_SLOTS", 2)
    monkeypatch.setattr(peer_memory, "MAX_ROWS", 4)
    install_kernel(monkeypatch, copy_by_index)
    target = torch.zeros((NUM_ROWS, 64), dtype=torch.uint8, device="cuda")
    copier = RowCopier(target)
    source, content = rows_on_device(64)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2)).tolist()
    copier.start(source, order, range(NUM_ROWS)).synchronize()
    assert torch.equal(target.cpu(), content[order])


def test_rows_come_to_host_memory_at_once(cuda):
    source, content = rows_on_device(256)
    copier = RowCopier(torch.zeros_like(source))
    landed = torch.zeros((3, 256), dtype=torch.uint8)
    copier.copy_to_host(source, 5, landed.view(-1).numpy().data)
    assert torch.equal(landed, content[5:8])


class OneDevice:
    """Calls of the driver for ``device``, where all memory is on device 1."""

    def __init__(self, device):
        self.device = device

    def device_of(self, address):
        return 1


def test_memory_of_another_device_is_refused(cuda, monkeypatch):
    """Its seals lie in host memory and would be right, whatever comes over the link between the two."""
    monkeypatch.setattr(peer_memory, "CudaIpc", OneDevice)
    install_kernel(monkeypatch, copy_by_index)
    memory = CudaPeerMemory(torch.zeros((NUM_ROWS, 64), dtype=torch.uint8, device="cuda"))
    with pytest.raises(PeerUnreachable, match=r"on cuda:1, ours on cuda:0: shm reads within one device"):
        memory.rows(0x7000, 4, 64)


def test_device_without_room_makes_the_transport_unavailable(cuda, monkeypatch):
    def no_room(rows):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(peer_memory, "CudaIpc", OneDevice)
    monkeypatch.setattr(peer_memory, "RowCopier", no_room)
    with pytest.raises(ConnectorUnavailable, match=r"cuda:0 cannot be prepared: CUDA out of memory\.$"):
        CudaPeerMemory(torch.zeros((NUM_ROWS, 64), dtype=torch.uint8, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["triton", "torch"])
@pytest.mark.parametrize("row_bytes", [64 << 10, 4104, 250])
def test_rows_are_copied_on_a_gpu(monkeypatch, row_bytes, by):
    if by == "torch":
        install_kernel(monkeypatch, None)
    target = torch.zeros((NUM_ROWS, row_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    copier = RowCopier(target)
    assert copier.is_by_torch == (by == "torch")
    assert_copies(copier, target, row_bytes)


@pytest.mark.gpu
def test_memory_of_this_process_on_a_gpu_is_found_by_its_address():
    rows = torch.arange(NUM_ROWS, dtype=torch.uint8, device="cuda")[:, None].expand(-1, 4096).contiguous()
    target = torch.zeros_like(rows)
    torch.cuda.synchronize()
    memory = CudaPeerMemory(target)
    base_address, num_bytes = memory.extent(rows.data_ptr())
    assert base_address <= rows.data_ptr()
    assert rows.data_ptr() + rows.numel() <= base_address + num_bytes
    assert CudaIpc(0).device_of(rows.data_ptr()) == 0
    memory.rows(rows.data_ptr(), NUM_ROWS, 4096).start_copy([3, 9], [1, 2]).synchronize()
    assert target[:, 0].tolist()[:4] == [0, 3, 9, 0]
    handle, offset = memory.export()
    assert (len(handle), target.data_ptr() - offset) == (64, memory.extent(target.data_ptr()).base_address)
