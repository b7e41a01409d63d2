"""Which instructions this machine's CPU has. Reads ``/proc/cpuinfo``; imports no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# On x86, and on 64-bit ARM. A CPU without them computes bfloat16 several times slower than float32.
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@cache
def has_bfloat16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return True if the CPU multiplies bfloat16 numbers by instructions of its own; False where that cannot be read."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    flags = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return any(not _BFLOAT16_FLAGS.isdisjoint(each) for each in flags)
