"""Pinning memory that torch has not allocated: with a runtime that records its calls, and on a GPU."""

from __future__ import annotations

import mmap

import pytest
import torch

from core.engine.cuda.pinned_memory import pin_for_cuda, pin_memory


class Runtime:
    def __init__(self, code=0):
        self.code = code
        self.pinned = {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if not self.code:
            self.pinned[address] = (num_bytes, flags)
        return self.code

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def memory():
    return memoryview(mmap.mmap(-1, 8192))


def test_memory_is_pinned_until_it_is_unpinned(memory):
    runtime = Runtime()
    unpin = pin_memory(memory, runtime, lambda tensor: True)
    assert list(runtime.pinned.values()) == [(8192, 1)]
    unpin()
    assert runtime.pinned == {}


def test_refusal_is_told_and_leaves_nothing(memory, caplog):
    runtime = Runtime(code=801)
    assert pin_memory(memory, runtime, lambda tensor: True) is None
    assert "memory_not_pinned" in caplog.text
    assert "801" in caplog.text


def test_pinning_without_effect_is_taken_back(memory, caplog):
    runtime = Runtime()
    assert pin_memory(memory, runtime, lambda tensor: False) is None
    assert runtime.pinned == {}
    assert "memory_not_pinned" in caplog.text


@pytest.mark.gpu
def test_a_gpu_copies_from_pinned_memory(memory):
    torch.cuda.init()
    unpin = pin_for_cuda(memory)
    assert unpin is not None
    memory[:] = bytes(range(256)) * 32
    on_device = torch.frombuffer(memory, dtype=torch.uint8).to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert on_device.cpu().numpy().tobytes() == bytes(memory)
    unpin()
