"""Freed memory goes back to the system, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes
from core.freed_memory import return_freed_memory

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS"))

ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: everything comes from the heap
blocks = [b"x" * (1 << 20) for _ in range(64)]
last = b"y" * (1 << 20)  # above them in the heap, so that it cannot shrink
del blocks
before = resident()
return_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_below_a_live_block_is_returned():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert int(run.stdout) > 48 << 10
