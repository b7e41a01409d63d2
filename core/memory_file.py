"""Anonymous memory files, which other processes of this host can map through ``/proc``, in ordinary or in huge pages.

Owns the choice of pages and the fallback from huge ones. Knows nothing of the content: ``core.engine.kv_pool`` keeps the KV
pool in such a file, ``kvstore.arena`` the store's arena. Every page is allocated when a file is made, so that a host without
enough memory refuses the file and does not kill its owner later. Its size is sealed (``core.sealed_size``).

Huge pages (hugetlb) are reserved by the operator, beforehand; a pool in them has fewer entries in page tables and TLB. In
Kubernetes a container may take those of its limit ``hugepages-2Mi``. Sources: memfd_create(2), hugetlbpage.rst.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from core.config_types import HugePages
from core.errors import ConfigError
from core.log import event
from core.sealed_size import seal_size

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryFile:
    """An open file of whole pages, zeroed and all present. Its maker closes ``fd``."""

    fd: int
    num_bytes: int
    page_bytes: int

    def map(self) -> memoryview:
        """Return a shared mapping of the whole file; it lives as long as a view of it is held."""
        return memoryview(mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))


@dataclass(frozen=True, slots=True)
class HugePageStock:
    """The huge pages of this host's default size."""

    page_bytes: int  # 0 = the kernel has none
    num_pages: int
    num_free: int  # without the pages that are promised to others

    def lacks(self, num_bytes: int) -> str:
        """Return the shortage for so many bytes; empty if there is none."""
        if not self.page_bytes:
            return "this kernel has no huge pages"
        needed = -(-num_bytes // self.page_bytes)
        if needed <= self.num_free:
            return ""
        return f"{needed} pages of {self.page_bytes >> 10} kB are needed, {self.num_free} of {self.num_pages} are free"


def huge_page_stock(meminfo: Path = Path("/proc/meminfo")) -> HugePageStock:
    """Return the kernel's account of its huge pages."""
    fields = dict(line.partition(":")[::2] for line in meminfo.read_text().splitlines())
    total, free, promised = (int(fields.get(f"HugePages_{name}", "0")) for name in ("Total", "Free", "Rsvd"))
    return HugePageStock(int(fields.get("Hugepagesize", "0 kB").split()[0]) * 1024, total, max(0, free - promised))


def create_memory_file(name: str, num_bytes: int, huge_pages: HugePages = "never", param: str = "") -> MemoryFile:
    """Return a new file of at least ``num_bytes``. With ``auto``, ordinary pages replace missing huge ones, with a warning.

    Raises:
        OSError: there is not enough memory.
        ConfigError: ``always``, and there are not enough huge pages; names the setting ``param``.
    """
    if huge_pages == "never":
        return _create(name, num_bytes, mmap.PAGESIZE, 0)
    try:
        return _create_huge(name, num_bytes)
    except OSError as error:
        reason = error.strerror
    if huge_pages == "always":
        raise ConfigError(
            f"{param} = always: {reason}; reserve them (vm.nr_hugepages, in Kubernetes also the limit hugepages-2Mi) "
            f"or set it to auto",
            param=param,
        )
    logger.warning(event("huge_pages_missing", file=name, bytes=num_bytes, reason=reason))
    return _create(name, num_bytes, mmap.PAGESIZE, 0)


def _create_huge(name: str, num_bytes: int) -> MemoryFile:
    stock = huge_page_stock()
    missing = stock.lacks(num_bytes)
    if missing:
        raise OSError(errno.ENOMEM, missing)
    try:
        return _create(name, num_bytes, stock.page_bytes, os.MFD_HUGETLB)
    except OSError as error:  # a container may only take as many of the free ones as its limit allows
        raise OSError(
            error.errno, f"{stock.num_free} huge pages are free, but not for this process ({error.strerror})"
        ) from None


def _create(name: str, num_bytes: int, page_bytes: int, flags: int) -> MemoryFile:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    size = -(-num_bytes // page_bytes) * page_bytes if flags else num_bytes
    try:
        os.posix_fallocate(fd, 0, size)
        seal_size(fd)
    except OSError:
        os.close(fd)
        raise
    return MemoryFile(fd, size, page_bytes)
