"""The host memory of an EC connector: chunks of embeddings, and a seal for each, in memory files that peers can map.

Owns the memory; ``chunk_cache`` knows which chunk holds what. Transports see chunks as blocks, and register ``region`` as
their pool.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np

from connectors.ec.chunk_cache import CachedChunk
from connectors.ec.chunks import ChunkLayout, RowsDigester, rows_in_chunk
from core.digest import BlockDigester
from core.errors import ConfigError
from core.kv.pool_region import KVPoolRegion
from core.kv.seals import (
    DigestBlocks,
    ExpectedSeal,
    SealTable,
    each_by_itself,
    layout_fingerprint,
    map_seal_memory,
    seal_memory_bytes,
)
from core.memory_file import MemoryFile, create_memory_file
from core.wire.media import ECSeal

_CHUNKS_FILE = "kvferry-embeddings"
_SEALS_FILE = "kvferry-embedding-seals"


class ChunkMemory:
    """``memory_bytes`` of host memory in chunks. Seals are made with digests.

    Raises: ConfigError if it does not hold one chunk, or the host does not have it.
    """

    def __init__(self, layout: ChunkLayout, memory_bytes: int, incarnation: int) -> None:
        self.layout = layout
        self.num_chunks = memory_bytes // layout.chunk_bytes
        if not self.num_chunks:
            raise ConfigError(
                f"ec_connector.memory_bytes = {memory_bytes} does not hold one chunk of {layout.chunk_bytes} bytes",
                param="ec_connector.memory_bytes",
            )
        chunks_file = _memory_file(_CHUNKS_FILE, self.num_chunks * layout.chunk_bytes)
        seals_file = _memory_file(_SEALS_FILE, seal_memory_bytes(self.num_chunks))
        self._fds = [chunks_file.fd, seals_file.fd]
        self._bytes = chunks_file.map()
        self._last_generation = 0
        blocks = layout.as_blocks
        seal_memory = map_seal_memory(self.num_chunks, seals_file.fd)
        self._seals = SealTable(seal_memory, incarnation, layout_fingerprint(blocks), self._new_digester())
        self.region = KVPoolRegion(
            base_address=ctypes.addressof(ctypes.c_char.from_buffer(self._bytes)),
            num_blocks=self.num_chunks,
            block_bytes=layout.chunk_bytes,
            layout=blocks,
            buffer=self._bytes,
            memory_fd=chunks_file.fd,
            seals=self._seals,
            new_digester=self._new_digester,
        )

    def chunk(self, index: int) -> memoryview:
        """Return the writable bytes of a chunk."""
        size = self.layout.chunk_bytes
        return self._bytes[index * size : (index + 1) * size]

    def rows(self, first_chunk: int, num_embeds: int) -> memoryview:
        """Return the writable bytes of an item's rows: [num_embeds, hidden_size], without the padding of its last chunk."""
        start = first_chunk * self.layout.chunk_bytes
        return self._bytes[start : start + self.layout.num_bytes(num_embeds)]

    def write(self, item: CachedChunk, rows: memoryview, digester: RowsDigester) -> tuple[ECSeal, int]:
        """Fill the chunks of an item and seal them for readers; return the seal of the whole item, and the chunks' generation.

        Each write has a new generation, so that a reader with an older generation is refused.
        """
        self._seals.break_seals(item.chunks)
        self._last_generation += 1
        target = np.frombuffer(self._bytes, dtype=np.uint8)[item.first_chunk * self.layout.chunk_bytes :]
        num_bytes, end = rows.nbytes, item.num_chunks * self.layout.chunk_bytes
        target[:num_bytes] = np.frombuffer(rows, dtype=np.uint8)
        target[num_bytes:end] = 0
        for index, block_hash in enumerate(self.layout.chunk_hashes(item.identifier, item.num_embeds)):
            num_rows = rows_in_chunk(item.num_embeds, index)
            self._seals.seal(item.first_chunk + index, ExpectedSeal(self._last_generation, 0, block_hash, num_rows))
        digest = digester.digest(self.rows(item.first_chunk, item.num_embeds))
        return self.layout.seal(item.identifier, item.num_embeds, digest), self._last_generation

    def close(self) -> None:
        """Close the files; the memory is freed with its last view."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _new_digester(self) -> DigestBlocks:
        digester = BlockDigester(self.layout.chunk_bytes)
        return each_by_itself(lambda chunk: digester.digest(self.chunk(chunk)))


def _memory_file(name: str, num_bytes: int) -> MemoryFile:
    try:
        return create_memory_file(name, num_bytes)
    except OSError as error:
        raise ConfigError(
            f"ec_connector.memory_bytes: no {num_bytes} bytes of memory for embeddings: {error.strerror}",
            param="ec_connector.memory_bytes",
        ) from None
