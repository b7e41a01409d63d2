"""Staging: pages in shared memory through which every block goes to and from the server, each with its seal.

The server copies by itself, whenever it likes, so it is never given the pool that attention reads: what it reads here is a copy
that nobody writes, and what it writes here is looked at before it is used. A page holds a block and behind it the block's seal,
with a digest; the server takes both for one piece of memory, so they are kept, moved and lost together.

    page    block ... | seal[64] | padding                  page 0 stands for "no block": its content means nothing
    pages   0 | to load ... | to save ...                   each kind has its own, so that neither starves the other

Owns the memory and which pages are free. Knows neither server nor requests. Pages are taken and given back by several threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from connectors.lmcache.wire import WORD_BYTES, SharedPages
from core.digest import BlockDigester
from core.errors import ConnectorUnavailable, CorruptBlock, KVFerryError, StaleBlock
from core.kv.seals import SEAL_BYTES, Seal, decode_seal, encode_seal

SHM_FOLDER = Path("/dev/shm")  # where shm_open(3) looks for names
SHM_PREFIX = "kvferry_lmcache_"
PAGE_VERSION = 1  # of the format of a page; part of the name under which pages are kept
NULL_PAGE = 0

_SEALED_GENERATION = 1  # a page's seal tells no lives of a block apart: its bytes and their hash are all there is

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """What a block is, by the prompt that it belongs to."""

    group_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class PageSealer:
    """Makes and checks the seals of pages, for blocks of one layout. Holds scratch memory: one for each thread.

    ``incarnation`` is the life of the worker that seals; a reader takes pages of any.
    """

    incarnation: int
    layout_version: int
    block_size: int
    digester: BlockDigester

    def seal(self, page: Bytes, identity: PageIdentity) -> None:
        """Seal the block that a page holds."""
        seal = Seal(
            incarnation=self.incarnation,
            generation=_SEALED_GENERATION,
            group_id=identity.group_id,
            block_hash=identity.block_hash,
            num_tokens=self.block_size,
            layout_version=self.layout_version,
            digest=self.digester.digest(page[: self.digester.block_bytes]),
        )
        start = self.digester.block_bytes
        page[start : start + SEAL_BYTES] = np.frombuffer(encode_seal(seal), dtype=np.uint8)

    def find_fault(self, content: Bytes, seal_row: bytes, identity: PageIdentity) -> KVFerryError | None:
        """Say why bytes that came with a seal must not be used as this block; None if they are it, bit by bit.

        Both should be copies: the server may write a page at any time.
        """
        seal = decode_seal(seal_row)
        if seal is None:
            return StaleBlock("a page from the LMCache server has no seal")
        found = (seal.group_id, seal.block_hash, seal.num_tokens, seal.layout_version)
        if found != (identity.group_id, identity.block_hash, self.block_size, self.layout_version):
            return StaleBlock(
                f"a page from the LMCache server holds block {seal.block_hash.hex()} of group {seal.group_id} "
                f"instead of {identity.block_hash.hex()} of group {identity.group_id}"
            )
        if seal.digest is None or seal.digest != self.digester.digest(content):
            return CorruptBlock("the bytes of a page from the LMCache server are not those that were sealed")
        return None


class _FreePages:
    """Pages of one kind that nobody uses."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = list(pages)
        self._lock = threading.Lock()
        self.capacity = len(self._free)

    def take(self, count: int) -> list[int] | None:
        with self._lock:
            if count > len(self._free):
                return None
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
            return taken

    def give(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(pages)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)


class Staging:
    """Pages for blocks of ``block_bytes``, in a new segment of shared memory named ``name``.

    Half of the pages are for loads, the others for saves. The memory is there before the first page is used, and stays mapped
    as long as an array of it lives; ``unlink`` takes the name away.

    Raises:
        ConnectorUnavailable: there is not enough shared memory, or no two pages in ``num_bytes``.
    """

    def __init__(self, name: str, num_bytes: int, block_bytes: int, block_size: int) -> None:
        row = block_size * WORD_BYTES
        page_bytes = -(-(block_bytes + SEAL_BYTES) // row) * row
        num_pages = num_bytes // page_bytes
        if num_pages < 3:
            raise ConnectorUnavailable(
                f"connector.lmcache.staging_bytes = {num_bytes} is too small: it must hold 3 pages of {page_bytes} bytes"
            )
        self.pages = SharedPages(name, num_pages, page_bytes, block_size)
        self.block_bytes = block_bytes
        self._path = SHM_FOLDER / name
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # says that somebody is alive who needs the name
            os.posix_fallocate(self._fd, 0, num_pages * page_bytes)
            memory = mmap.mmap(self._fd, num_pages * page_bytes)
        except OSError as error:
            self.unlink()
            raise ConnectorUnavailable(
                f"no {num_pages * page_bytes} bytes of shared memory in {SHM_FOLDER}: {error}; "
                "lower connector.lmcache.staging_bytes or make it larger"
            ) from None
        self.rows: Bytes = np.frombuffer(memory, dtype=np.uint8).reshape(num_pages, page_bytes)
        half = 1 + (num_pages - 1) // 2
        self._to_load = _FreePages(range(1, half))
        self._to_save = _FreePages(range(half, num_pages))

    @property
    def load_capacity(self) -> int:
        """Most pages that one load can have."""
        return self._to_load.capacity

    @property
    def num_used_pages(self) -> int:
        """Pages that the server may read or write, or that are about to be copied."""
        return self._to_load.num_used + self._to_save.num_used

    def take_to_load(self, count: int) -> list[int] | None:
        """Return pages for a load, None while there are not enough."""
        return self._to_load.take(count)

    def take_to_save(self, count: int) -> list[int] | None:
        """Return pages for a save, None while there are not enough."""
        return self._to_save.take(count)

    def give_back(self, pages: Sequence[int]) -> None:
        """Take pages back that neither the server nor anybody here uses any more; all of one kind."""
        if pages:
            (self._to_load if pages[0] <= self._to_load.capacity else self._to_save).give(pages)

    def unlink(self) -> None:
        """Take the name away: who has mapped the memory keeps it, and nobody else can. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)


def sweep_segments(folder: Path = SHM_FOLDER) -> int:
    """Remove segments whose makers died before they took the names away; return how many there were.

    Their makers hold a lock as long as they live, which also holds between containers that share the folder but no pids.
    """
    num_removed = 0
    for path in sorted(folder.glob(f"{SHM_PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody else's, or somebody else was faster
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(fd)
    return num_removed
