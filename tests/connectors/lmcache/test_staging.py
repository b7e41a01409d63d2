"""Pages: what a seal vouches for, who may use which, and what is left of them."""

from __future__ import annotations

import fcntl
import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

import connectors.lmcache.staging as staging_module
from connectors.lmcache.staging import SHM_FOLDER, SHM_PREFIX, PageIdentity, PageSealer, Staging, sweep_segments
from core.digest import BlockDigester
from core.errors import ConnectorUnavailable, CorruptBlock, StaleBlock
from core.kv.seals import SEAL_BYTES

BLOCK_BYTES = 1024
BLOCK_SIZE = 32
IDENTITY = PageIdentity(0, b"h" * 16)


def sealer(incarnation: int = 1, layout_version: int = 5) -> PageSealer:
    return PageSealer(incarnation, layout_version, BLOCK_SIZE, BlockDigester(BLOCK_BYTES))


@pytest.fixture
def staging():
    found = Staging(f"{SHM_PREFIX}test_{os.getpid()}", 1 << 16, BLOCK_BYTES, BLOCK_SIZE)
    yield found
    found.unlink()


@pytest.fixture
def page(staging):
    row = staging.rows[1]
    row[:] = np.random.default_rng(7).integers(0, 256, row.shape, np.uint8)
    sealer().seal(row, IDENTITY)
    return row


def fault_of(sealer, page, identity):
    """Check the block that a page holds."""
    block_bytes = sealer.digester.block_bytes
    return sealer.find_fault(page[:block_bytes], page[block_bytes : block_bytes + SEAL_BYTES].tobytes(), identity)


def test_a_sealed_page_is_good_for_a_worker_of_any_life(page):
    assert fault_of(sealer(incarnation=99), page, IDENTITY) is None


def test_every_bit_of_a_block_is_vouched_for(page):
    for position in range(0, BLOCK_BYTES, 37):
        page[position] ^= 1 << position % 8
        assert isinstance(fault_of(sealer(), page, IDENTITY), CorruptBlock)
        page[position] ^= 1 << position % 8
    assert fault_of(sealer(), page, IDENTITY) is None


@pytest.mark.parametrize("wanted", [PageIdentity(1, b"h" * 16), PageIdentity(0, b"x" * 16)])
def test_a_page_of_something_else_is_refused(page, wanted):
    assert isinstance(fault_of(sealer(), page, wanted), StaleBlock)


def test_a_page_of_another_layout_is_refused(page):
    assert isinstance(fault_of(sealer(layout_version=6), page, IDENTITY), StaleBlock)


@pytest.mark.parametrize("content", [0, 0xFF, 0xEE])
def test_a_page_that_was_never_sealed_is_refused(staging, content):
    staging.rows[2] = content
    assert isinstance(fault_of(sealer(), staging.rows[2], IDENTITY), StaleBlock)


CONTENT_FIELDS = [*range(8), *range(16, 45), *range(48, 56)]  # of a seal: all but who made it and in which life of a block


@pytest.mark.parametrize("offset", CONTENT_FIELDS)
def test_a_page_whose_seal_says_anything_else_is_refused(page, offset):
    page[BLOCK_BYTES + offset] ^= 1
    assert fault_of(sealer(), page, IDENTITY) is not None


def test_loads_and_saves_do_not_starve_each_other(staging):
    saves = staging.take_to_save(1)
    while staging.take_to_save(1) is not None:
        pass
    loads = staging.take_to_load(staging.load_capacity)
    assert len({*loads}) == staging.load_capacity
    assert 0 not in {*loads, *saves}, "the null page is nobody's"
    assert staging.take_to_load(1) is None
    staging.give_back(saves)
    assert staging.take_to_load(1) is None
    assert staging.take_to_save(1) == saves
    staging.give_back(loads)
    assert sorted(staging.take_to_load(len(loads))) == sorted(loads)


def test_too_little_memory_is_said(staging):
    with pytest.raises(ConnectorUnavailable, match="staging_bytes"):
        Staging(f"{SHM_PREFIX}small", 3 * BLOCK_BYTES, BLOCK_BYTES, BLOCK_SIZE)
    with pytest.raises(ConnectorUnavailable, match="shared memory"):
        Staging(f"{SHM_PREFIX}huge_{os.getpid()}", 1 << 46, BLOCK_BYTES, BLOCK_SIZE)
    assert not (SHM_FOLDER / f"{SHM_PREFIX}huge_{os.getpid()}").exists()


def test_the_name_goes_and_the_memory_stays(staging):
    staging.rows[3] = 7
    staging.unlink()
    staging.unlink()
    assert not (SHM_FOLDER / staging.pages.shm_name).exists()
    assert (staging.rows[3] == 7).all()


def test_memory_of_free_pages_goes_back_to_the_system_and_that_of_taken_ones_stays(staging):
    staging.rows[:] = 7
    (taken,) = staging.take_to_save(1)
    staging.give_back(staging.take_to_load(2))
    staging.discard()
    assert (staging.rows[taken] == 7).all()
    assert (staging.rows == 0).mean() > 0.8  # whole pages of the system


def test_memory_of_pages_that_are_given_back_later_goes_back_then():
    staging = Staging(f"{SHM_PREFIX}late_{os.getpid()}", 1 << 20, 1 << 16, BLOCK_SIZE)
    try:
        staging.rows[:] = 7
        pages = [*staging.take_to_save(2), *staging.take_to_load(1)]
        staging.discard()
        assert all((staging.rows[page] == 7).all() for page in pages)
        staging.give_back(pages[:2])
        staging.give_back(pages[2:])
        num_bytes = 512 * (SHM_FOLDER / staging.pages.shm_name).stat().st_blocks
        assert num_bytes <= (len(pages) + 1) * 2 * mmap.PAGESIZE  # what a page of the system shares with the next
    finally:
        staging.unlink()


def test_pages_whose_memory_went_back_are_taken_by_nobody(staging):
    pages = staging.take_to_save(1)
    staging.discard()
    assert staging.take_to_load(1) is None
    staging.give_back(pages)
    assert staging.take_to_save(1) is None
    assert staging.num_used_pages == 0


def test_memory_goes_back_in_slices_between_which_other_threads_run(staging, monkeypatch):
    lengths = []
    monkeypatch.setattr(staging_module, "SLICE_BYTES", 3 * mmap.PAGESIZE)
    staging._memory = SimpleNamespace(madvise=lambda _advice, _start, length: lengths.append(length))
    staging.discard()
    assert sum(lengths) == staging.rows.nbytes // mmap.PAGESIZE * mmap.PAGESIZE
    assert max(lengths) == 3 * mmap.PAGESIZE


def test_segments_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path):
    for name in ("dead", "living"):
        (tmp_path / f"{SHM_PREFIX}{name}").write_bytes(b"x")
    (tmp_path / "somebody_elses").write_bytes(b"x")
    with (tmp_path / f"{SHM_PREFIX}living").open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert sweep_segments(tmp_path) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{SHM_PREFIX}living", "somebody_elses"]
