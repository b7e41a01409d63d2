"""A KV pool in memory files with its seals, and its layout: what a connector under test reads and writes.

Knows no connector and no engine.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
import numpy.typing as npt

from core.digest import BlockDigester
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import (
    DigestBlocks,
    SealTable,
    each_by_itself,
    layout_fingerprint,
    map_seal_memory,
    num_landing_rows,
    seal_memory_bytes,
)
from core.memory_file import create_memory_file
from core.wire.kv import KVLayoutInfo

HEAD_DIM = 64
DTYPE_BYTES = 4


def small_layout(block_size: int = 32, num_layers: int = 2) -> KVLayoutInfo:
    """Return a layout with blocks of some KiB."""
    block_bytes = num_layers * 2 * block_size * HEAD_DIM * DTYPE_BYTES
    return KVLayoutInfo(
        dtype="float32",
        order="HND",
        block_size=block_size,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        block_bytes=block_bytes,
    )


class MemoryPool:
    """A KV pool and its seals, with digests, in two memory files. ``rows`` is [num_blocks, block_bytes] uint8."""

    def __init__(self, num_blocks: int, layout: KVLayoutInfo, incarnation: int = 0) -> None:
        num_bytes = num_blocks * layout.block_bytes
        num_seal_bytes = seal_memory_bytes(num_blocks, num_landing_rows(layout.block_size))
        self.fd = create_memory_file("kvferry-test-pool", num_bytes).fd
        self._seals_fd = create_memory_file("kvferry-test-seals", num_seal_bytes).fd
        self._memory = mmap.mmap(self.fd, num_bytes)
        flat: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self.rows = flat.reshape(num_blocks, layout.block_bytes)
        self.rows[:] = 0
        memory = map_seal_memory(num_blocks, self._seals_fd, num_landing_rows(layout.block_size))
        layout_version = layout_fingerprint(layout)
        self.seals = SealTable(memory, incarnation, layout_version, self._new_digester())
        self.region = KVPoolRegion(
            base_address=flat.ctypes.data,
            num_blocks=num_blocks,
            block_bytes=layout.block_bytes,
            layout=layout,
            buffer=memoryview(self._memory),
            memory_fd=self.fd,
            seals=self.seals,
            new_digester=self._new_digester,
        )

    def _new_digester(self) -> DigestBlocks:
        digester = BlockDigester(self.rows.shape[1])
        return each_by_itself(lambda block_id: digester.digest(self.rows[block_id]))

    def close(self) -> None:
        """Close the files; the memory is freed with its last reference."""
        os.close(self.fd)
        os.close(self._seals_fd)
