"""The stand-in for a device refuses and notes what it says it does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.attention.torch_kernels import download, refill, upload
from tests.support.fake_cuda import DEVICE, ClaimedCuda, DeviceMisuse

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a CUDA device, where there is none")

READS = {
    "item": lambda there: there[0].item(),
    "condition": lambda there: bool(there.any()),
    "list": lambda there: there.tolist(),
    "nonzero": torch.nonzero,
    "mask": lambda there: there[there > 1],
    "masked write": lambda there: there.__setitem__(there > 1, there.new_zeros(2)),
    "copy": lambda there: there.cpu(),
    "copy of the kind": lambda there: there.to("cpu", torch.float64),
    "counts": lambda there: there.repeat_interleave(there),
    "equality": lambda there: torch.equal(there, there),
}


@pytest.fixture
def cuda():
    device = ClaimedCuda()
    with device.installed(), torch.inference_mode():
        yield device


def test_uploads_and_operators_wait_for_nothing(cuda):
    with cuda.launching() as waits:
        there = upload(np.arange(4), DEVICE)
        there[1:3].add_(10)
        there[upload(np.array([0]), DEVICE)] = 7
        copied = download(there.to(torch.float32) * 2)
        event = torch.cuda.Event()
        event.record()
    assert waits == []
    assert there.is_cuda
    assert copied.tolist() != [14, 22, 24, 6]  # nothing has arrived
    event.synchronize()
    assert copied.tolist() == [14, 22, 24, 6]


@pytest.mark.parametrize("kind", READS)
def test_what_the_host_reads_is_noted_with_its_place_and_refused_in_a_recording(cuda, kind):
    there = upload(np.arange(4), DEVICE)
    with cuda.launching() as waits:
        READS[kind](there)
    assert waits
    assert "test_fake_cuda.py" in waits[0]
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DeviceMisuse, match="recorded"):
        READS[kind](there)


@pytest.mark.parametrize("make", [lambda: torch.tensor([1, 2], device=DEVICE), lambda: torch.arange(2).to("cuda")])
def test_copies_from_pageable_memory_are_noted(cuda, make):
    with cuda.launching() as waits:
        assert make().is_cuda
    assert "pageable" in waits[0]


@pytest.mark.parametrize(
    "mix",
    [
        lambda there: there + torch.arange(4),
        lambda there: there[torch.tensor([0])],
        lambda there: torch.cat((there, torch.arange(2))),
        lambda there: torch.arange(4).add_(there),
        lambda there: there.numpy(),
    ],
)
def test_operators_on_two_devices_are_refused(cuda, mix):
    with pytest.raises(DeviceMisuse):
        mix(upload(np.arange(4), DEVICE))
    assert (upload(np.arange(4), DEVICE) + torch.tensor(1)).tolist() == [1, 2, 3, 4]  # a number may come from the host


def test_a_replay_runs_the_recorded_operators_and_nothing_else(cuda):
    source, calls = upload(np.arange(3), DEVICE), []
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        calls.append(1)
        total = source[1:].sum() + len(calls)
        source[:1].fill_(9)
    refill(source, np.array([0, 20, 30]))
    graph.replay()
    assert (total.item(), source.tolist(), calls) == (51, [9, 20, 30], [1])


def test_a_recording_takes_nothing_from_the_host(cuda):
    there = upload(np.arange(3), DEVICE)
    for move in (lambda: upload(np.arange(3), DEVICE), lambda: refill(there, np.arange(3)), lambda: download(there)):
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DeviceMisuse, match="recorded"):
            move()


def test_pinned_memory_that_changes_under_a_copy_is_noticed(cuda):
    staging = torch.arange(3).pin_memory()
    staging.to(DEVICE, non_blocking=True)
    staging.zero_()
    with pytest.raises(DeviceMisuse, match="changed"):
        torch.cuda.synchronize()


def test_a_kernel_takes_tensors_of_the_device_only_and_the_documented_arguments(cuda):
    double = cuda.kernel(lambda value, *, scale=2: value * scale, lambda value, *, scale: None)
    assert double(upload(np.arange(3), DEVICE), scale=3).tolist() == [0, 3, 6]
    with pytest.raises(DeviceMisuse):
        double(torch.arange(3), scale=3)
    with pytest.raises(TypeError):
        double(upload(np.arange(3), DEVICE))
