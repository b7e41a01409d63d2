"""Memory files in ordinary and huge pages: what there is, what is refused, and what takes its place."""

import os
import resource
import subprocess
import sys

import pytest

from core import memory_file
from core.errors import ConfigError
from core.memory_file import HugePageStock, create_memory_file, huge_page_stock
from core.sealed_size import cannot_shrink

STOCK = huge_page_stock()
needs_huge_pages = pytest.mark.skipif(STOCK.num_free < 4, reason="no huge pages are reserved here: sysctl vm.nr_hugepages=8")
TOO_MANY_BYTES = 1 << 50  # more than the huge pages of any host: refused before anything is allocated


@pytest.fixture
def make():
    files = []

    def create(*args, **kwargs):
        files.append(create_memory_file("kvferry-test", *args, **kwargs))
        return files[-1]

    yield create
    for file in files:
        os.close(file.fd)


def test_ordinary_file_has_the_bytes_that_were_asked_for_all_of_them_there_and_zero(make):
    file = make(10_000)
    status = os.fstat(file.fd)
    assert (file.num_bytes, status.st_size) == (10_000, 10_000)
    assert status.st_blocks * 512 >= 10_000
    memory = file.map()
    assert bytes(memory) == bytes(10_000)
    memory[9_999] = 7
    assert os.pread(file.fd, 1, 9_999) == b"\7"


def test_nobody_can_shrink_a_file_under_those_who_have_mapped_it(make):
    file = make(10_000)
    assert cannot_shrink(file.fd)
    for size in (0, 9_999, 10_001):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, size)
    os.pwrite(file.fd, b"\7", 9_999)


def test_other_files_can_shrink(tmp_path):
    with (tmp_path / "file").open("wb") as ordinary:
        assert not cannot_shrink(ordinary.fileno())
    fd = os.memfd_create("kvferry-test", os.MFD_ALLOW_SEALING)
    assert not cannot_shrink(fd)
    os.close(fd)


def test_what_cannot_be_had_is_refused_and_leaves_nothing_open(no_garbage):
    before, limits = os.listdir("/proc/self/fd"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match="large"):
            create_memory_file("kvferry-test", 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir("/proc/self/fd") == before


def test_missing_huge_pages_are_an_error_that_says_what_to_do():
    with pytest.raises(
        ConfigError, match=r"cache\.huge_pages = always: .* needed, \d+ of \d+ are free; reserve them \(vm"
    ) as refused:
        create_memory_file("kvferry-test", TOO_MANY_BYTES, "always", "cache.huge_pages")
    assert refused.value.param == "cache.huge_pages"


def test_huge_pages_that_are_only_wished_for_are_replaced_and_that_is_said(make, monkeypatch, caplog):
    monkeypatch.setattr(memory_file, "huge_page_stock", lambda: HugePageStock(2 << 20, 3, 0))
    file = make(10_000, "auto")
    assert (file.num_bytes, file.page_bytes) == (10_000, os.sysconf("SC_PAGE_SIZE"))
    assert "event=huge_pages_missing" in caplog.text
    assert "1 pages of 2048 kB are needed, 0 of 3 are free" in caplog.text


def test_huge_pages_that_are_free_but_not_for_this_process_are_replaced_too(make, monkeypatch, caplog):
    monkeypatch.setattr(memory_file, "huge_page_stock", lambda: HugePageStock(2 << 20, 10**9, 10**9))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        file = make(10_000, "auto")  # one huge page is above the limit, its ordinary pages are not
        with pytest.raises(ConfigError, match="are free, but not for this process"):
            make(10_000, "always", "cache.huge_pages")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.num_bytes == 10_000
    assert "event=huge_pages_missing" in caplog.text


@pytest.mark.parametrize(
    ("stock", "num_bytes", "missing"),
    [
        (HugePageStock(2 << 20, 10, 4), 8 << 20, ""),
        (HugePageStock(2 << 20, 10, 4), (8 << 20) + 1, "5 pages of 2048 kB are needed, 4 of 10 are free"),
        (HugePageStock(0, 0, 0), 1, "this kernel has no huge pages"),
    ],
)
def test_stock_says_what_is_missing(stock, num_bytes, missing):
    assert stock.lacks(num_bytes) == missing


def test_pages_that_are_promised_to_others_are_not_free(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 1 kB\nHugePages_Total:    9\nHugePages_Free:   5\nHugePages_Rsvd:  2\nHugepagesize:  2048 kB\n")
    assert huge_page_stock(path) == HugePageStock(2 << 20, 9, 3)
    path.write_text("MemTotal: 1 kB\n")
    assert huge_page_stock(path) == HugePageStock(0, 0, 0)


@needs_huge_pages
def test_file_in_huge_pages_is_mapped_by_another_process_and_given_back(make):
    file = make(STOCK.page_bytes + 1, "always")
    assert (file.num_bytes, file.page_bytes) == (2 * STOCK.page_bytes, STOCK.page_bytes)
    assert cannot_shrink(file.fd)
    assert huge_page_stock().num_free == STOCK.num_free - 2
    file.map()[STOCK.page_bytes] = 9
    program = (
        "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); m = mmap.mmap(fd, 0, prot=mmap.PROT_READ);"
        "print(m[int(sys.argv[2])]); m.close()"
    )
    path = f"/proc/{os.getpid()}/fd/{file.fd}"
    done = subprocess.run(
        [sys.executable, "-c", program, path, str(STOCK.page_bytes)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "9\n"
