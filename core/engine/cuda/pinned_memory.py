"""Host memory that a CUDA device copies from and to by itself, although torch has not allocated it.

Owns nothing: the caller that pins pages unpins them before the memory is freed. Pinning may fail: limits on locked memory, old
kernels and some kinds of memory files refuse it. Connectors use it as ``KVPoolRegion.pin_memory``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from core.log import event

_PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of the process
_PROBE_BYTES = 4096

logger = logging.getLogger(__name__)


class CudaRuntime(Protocol):
    """The two calls of ``torch.cuda.cudart()`` that are needed; they return an error code."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        """Pin pages."""

    def cudaHostUnregister(self, address: int) -> int:
        """Unpin them."""


def pin_memory(
    memory: memoryview, runtime: CudaRuntime, is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
) -> Callable[[], None] | None:
    """Pin writable memory and return a function that unpins it; None, with a warning, if that is refused or has no effect.

    Takes about a second for some GB. A refusal leaves an error that belongs to the calling thread, so this thread should
    launch nothing.
    """
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    code = int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE))
    if code:
        logger.warning(event("memory_not_pinned", num_bytes=memory.nbytes, cuda_error=code))
        return None
    if not is_pinned(torch.frombuffer(memory, dtype=torch.uint8, count=min(_PROBE_BYTES, memory.nbytes))):
        runtime.cudaHostUnregister(address)
        logger.warning(event("memory_not_pinned", num_bytes=memory.nbytes, reason="torch does not see it"))
        return None

    def unpin() -> None:
        runtime.cudaHostUnregister(address)

    return unpin


def pin_for_cuda(memory: memoryview) -> Callable[[], None] | None:
    """Pin memory by the CUDA runtime that torch has loaded; see ``pin_memory``."""
    return pin_memory(memory, torch.cuda.cudart())  # type: ignore[no-untyped-call]
