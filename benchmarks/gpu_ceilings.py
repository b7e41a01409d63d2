"""What a device can do at best: copies, matrix products, and the way to the host and back.

All times are taken on the device's own work, between two waits for it; the best of some repeats counts, as for a ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second count what is read and what is written for a copy on the device, and once for one to the host."""

    copy_bytes_per_s: float
    matmul_flops: float
    to_host_bytes_per_s: float
    to_device_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class CeilingSize:
    """How large the operands are."""

    copy_bytes: int
    matmul: int  # rows and columns
    repeats: int


def measure_ceilings(device: str, dtype: torch.dtype, size: CeilingSize) -> Ceilings:
    source = torch.ones(size.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    host = torch.zeros(size.copy_bytes // 4, dtype=torch.uint8, pin_memory=device == "cuda")
    part = source[: len(host)]
    left = torch.randn(size.matmul, size.matmul, device=device, dtype=dtype)
    right = torch.randn(size.matmul, size.matmul, device=device, dtype=dtype)
    out = torch.empty_like(left)
    return Ceilings(
        copy_bytes_per_s=2 * size.copy_bytes / best_s(lambda: target.copy_(source), device, size.repeats),
        matmul_flops=2 * size.matmul**3 / best_s(lambda: torch.mm(left, right, out=out), device, size.repeats),
        to_host_bytes_per_s=len(host) / best_s(lambda: host.copy_(part, non_blocking=True), device, size.repeats),
        to_device_bytes_per_s=len(host) / best_s(lambda: part.copy_(host, non_blocking=True), device, size.repeats),
    )


def best_s(call: Callable[[], object], device: str, repeats: int, per_repeat: int = 4) -> float:
    """Return the shortest time of a call, of those whose work is done one after the other."""
    call()
    times = []
    for _ in range(repeats):
        wait_for(device)
        begin = time.perf_counter()
        for _ in range(per_repeat):
            call()
        wait_for(device)
        times.append((time.perf_counter() - begin) / per_repeat)
    return min(times)


def wait_for(device: str) -> None:
    """Return once the device has nothing to do."""
    if device == "cuda":
        torch.cuda.synchronize()
