"""Staging pages in shared memory: every block passes through one of them, with its seal, on its way to or from the server.

The server copies in its own process and at its own time, so it never gets access to the KV pool. It reads pages that hold a
finished copy, and the pages it writes are verified before use. A page holds a block followed by the block's seal with a
digest. The server treats both as one piece of memory, so they are stored, moved and lost together.

    page    block ... | seal[64] | padding                  page 0 stands for "no block": its content has no meaning
    pages   0 | to load ... | to save ...                   separate ranges, so that neither starves the other

Owns the memory and the list of free pages. Several threads take and return pages.
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
SLICE_BYTES = 1 << 22  # given back to the system in one call, in which no other thread of the process runs
PAGE_VERSION = 1  # of the format of a page; part of the name under which pages are kept
NULL_PAGE = 0

_SEALED_GENERATION = 1  # constant: a page is identified by its block hash and digest, not by a block's generation

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PageIdentity:
    """The identity of a block: its KV cache group and the hash of the prompt up to its end."""

    group_id: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class PageSealer:
    """Makes and verifies the seals of pages, for blocks of one layout. Holds scratch memory, so each thread needs its own.

    ``incarnation`` is that of the worker that seals; pages of any incarnation pass verification.
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
        """Return the error if these bytes and their seal are not the block ``identity``; None if they match.

        Pass copies, since the server may write a page at any time.
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
    """The free pages of one kind."""

    def __init__(self, pages: Iterable[int]) -> None:
        self._free = list(pages)
        self._lock = threading.Lock()
        self._is_closed = False
        self.capacity = len(self._free)

    def take(self, count: int) -> list[int] | None:
        with self._lock:
            if self._is_closed or count > len(self._free):
                return None
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
            return taken

    def give(self, pages: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(pages)

    def close(self) -> list[int]:
        """Refuse all further pages, and return the free ones."""
        with self._lock:
            self._is_closed = True
            return self._free.copy()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)


class Staging:
    """Pages for blocks of ``block_bytes``, in a new segment of shared memory named ``name``.

    Half of the pages are for loads, the others for saves. The memory is allocated at once and stays mapped as long as an array
    of it lives; ``unlink`` removes the name.

    Raises:
        ConnectorUnavailable: too little shared memory, or no access to it, or ``num_bytes`` holds fewer than three pages.
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
        self._is_discarded = False
        self._path = SHM_FOLDER / name
        self._fd = -1
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)  # tells sweep_segments that the owner is alive
            os.posix_fallocate(self._fd, 0, num_pages * page_bytes)
            self._memory = mmap.mmap(self._fd, num_pages * page_bytes)
        except OSError as error:
            self.unlink()
            raise ConnectorUnavailable(
                f"no {num_pages * page_bytes} bytes of shared memory in {SHM_FOLDER}: {error}; "
                "lower connector.lmcache.staging_bytes, or make it larger and writable"
            ) from None
        self.rows: Bytes = np.frombuffer(self._memory, dtype=np.uint8).reshape(num_pages, page_bytes)
        half = 1 + (num_pages - 1) // 2
        self._to_load = _FreePages(range(1, half))
        self._to_save = _FreePages(range(half, num_pages))

    @property
    def load_capacity(self) -> int:
        """The largest number of pages for one load."""
        return self._to_load.capacity

    @property
    def num_free_to_save(self) -> int:
        """The number of pages that a save can take now."""
        return self._to_save.num_free

    @property
    def num_used_pages(self) -> int:
        """Pages that the server may read or write, or that wait to be copied."""
        return self._to_load.num_used + self._to_save.num_used

    def take_to_load(self, count: int) -> list[int] | None:
        """Return pages for a load; None if too few are free."""
        return self._to_load.take(count)

    def take_to_save(self, count: int) -> list[int] | None:
        """Return pages for a save; None if too few are free."""
        return self._to_save.take(count)

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages, all of one kind, that neither the server nor this process uses any more."""
        if pages:
            (self._to_load if pages[0] <= self._to_load.capacity else self._to_save).give(pages)
        if self._is_discarded:
            for page in pages:
                self._discard_bytes(page * self.pages.page_bytes, (page + 1) * self.pages.page_bytes)

    def discard(self) -> None:
        """Return the memory of free pages to the system, and that of pages in use when they are freed. Both then read as zeros.

        No page can be taken any more. Mappings stay valid. Nobody may still write to free pages: tmpfs would have to find
        memory for that again. LMCache 0.5.6 keeps a segment mapped until it ends, also after the segment was unregistered.
        """
        self._is_discarded = True
        num_pages = self.pages.num_pages
        taken = sorted(set(range(1, num_pages)).difference(self._to_load.close(), self._to_save.close()))
        first = 0
        for end in (*taken, num_pages):
            self._discard_bytes(first * self.pages.page_bytes, end * self.pages.page_bytes)
            first = end + 1

    def _discard_bytes(self, start: int, end: int) -> None:
        """Give back the pages of the system that lie within [start, end)."""
        start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):  # a file system that cannot
            for first in range(start, end, SLICE_BYTES):
                self._memory.madvise(mmap.MADV_REMOVE, first, min(SLICE_BYTES, end - first))

    def unlink(self) -> None:
        """Remove the name: existing mappings stay valid, new ones are impossible. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._path.unlink(missing_ok=True)
            os.close(fd)


def sweep_segments(folder: Path = SHM_FOLDER) -> int:
    """Remove segments that dead processes left, and return their number.

    A living owner holds a lock on its segment. Locks also work between containers that share the folder but not their pids.
    """
    num_removed = 0
    for path in sorted(folder.glob(f"{SHM_PREFIX}*")):
        with contextlib.suppress(OSError):  # not ours, locked by a living process, or already removed
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                num_removed += 1
            finally:
                os.close(fd)
    return num_removed
