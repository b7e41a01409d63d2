"""The disk tier under a store: restarts, corruption, and a disk that is too small."""

import pytest

from core.config_workers import KVStoreSection
from core.errors import ConfigError
from core.ids import SeededIds
from core.kv.seals import SEAL_BYTES
from kvstore.build import machine_options, make_tiers
from kvstore.segment_file import PAGE_BYTES, record_bytes
from kvstore.segments import SegmentLog, least_capacity_bytes
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import NUM_SLOTS, get, lookup, put, read


@pytest.fixture
def open_store(embedded_store, tmp_path):
    def open_one(**settings):
        return embedded_store(disk_path=str(tmp_path), **{"disk_bytes": 64 << 20, **settings})

    return open_one


def disk_of(store):
    return store.workers[0].statistics()


def test_a_restarted_store_has_what_its_disk_has(open_store):
    blocks = [make_block(number) for number in range(6)]
    with open_store() as store:
        put(store, blocks)
    with open_store() as store:
        assert list(lookup(store, [block.key for block in blocks]).hits) == [True] * 6
        assert read(store, [block.key for block in blocks]) == [bytes(block.content) for block in blocks]
        assert disk_of(store).loaded_blocks == 6


def test_what_memory_evicts_comes_back_from_disk(open_store):
    blocks = [make_block(number) for number in range(3 * NUM_SLOTS)]
    with open_store() as store:
        for start in range(0, len(blocks), 8):
            put(store, blocks[start : start + 8])
            assert store.flush()
        assert read(store, [block.key for block in blocks[:8]]) == [bytes(block.content) for block in blocks[:8]]


@pytest.mark.parametrize("where", ["header", "content"])
def test_corruption_on_disk_is_found_counted_and_forgotten(open_store, tmp_path, where):
    blocks = [make_block(number) for number in range(3)]
    with open_store() as store:
        put(store, blocks)
    (path,) = tmp_path.glob("segment-*.kv")
    with open_store() as store:  # opened before: a start would notice it
        with path.open("r+b") as file:
            file.seek(PAGE_BYTES + record_bytes(BLOCK_BYTES) + (40 if where == "header" else 5000))
            file.write(b"\xff\x00\xff")
        copies = read(store, [block.key for block in blocks])
        assert copies == [None if copy is None else bytes(block.content) for copy, block in zip(copies, blocks, strict=True)]
        assert copies.count(None) == disk_of(store).corrupt_blocks == 1
        lost = blocks[copies.index(None)]
        assert list(lookup(store, [lost.key]).hits) == [False]
        put(store, [lost])
        assert read(store, [lost.key]) == [bytes(lost.content)]


def test_salt_and_group_keep_their_places_on_disk(open_store):
    block, other = make_block(1), make_block(1, group_id=3)
    with open_store() as store:
        put(store, [block, other])
    with open_store() as store:
        assert read(store, [other.key, block.key]) == [bytes(other.content), bytes(block.content)]


def test_a_small_disk_keeps_its_limit_and_the_newest(open_store):
    capacity = 30 * record_bytes(BLOCK_BYTES)
    with open_store(disk_bytes=capacity) as store:
        for number in range(80):
            put(store, [make_block(number)])
            assert store.flush()
        assert disk_of(store).used_bytes <= capacity
        assert disk_of(store).saved_blocks == 80
    with open_store(disk_bytes=capacity) as store:
        assert list(lookup(store, [make_block(79).key, make_block(0).key]).hits) == [True, False]


def test_a_load_under_way_survives_the_release_of_its_get(open_store):
    blocks = [make_block(number) for number in range(8)]
    with open_store() as store:
        put(store, blocks)
    with open_store() as store:
        for _ in range(10):
            store.release(store.get([block.key for block in blocks]))
        ticket = get(store, [block.key for block in blocks])
        assert ticket.num_prefix_blocks == 8
        store.release(ticket)
        assert store.machine.memory.arena.num_pinned == 0


def test_two_stores_cannot_have_one_folder(open_store):
    with open_store(), pytest.raises(ConfigError, match="another process"), open_store():
        pass


def test_redis_tier_that_cannot_be_made_leaves_the_folder_free(tmp_path):
    wrong = KVStoreSection(disk_path=str(tmp_path), redis_url="redis://:secret@localhost/0")
    with pytest.raises(ConfigError, match="redis_url"):
        make_tiers(wrong, SeededIds(1))
    (tier,) = make_tiers(KVStoreSection(disk_path=str(tmp_path)), SeededIds(1))
    tier.close()


def test_memory_for_not_one_block_is_refused(embedded_store):
    with pytest.raises(ConfigError, match="memory_bytes"), embedded_store(memory_bytes=4096):
        pass


def test_a_disk_that_holds_no_block_is_refused(tmp_path):
    block_bytes, ids = 1 << 20, SeededIds(1)
    section = KVStoreSection(memory_bytes=16 << 20, disk_path=str(tmp_path), disk_bytes=block_bytes)
    with pytest.raises(ConfigError, match=f"does not hold one block of {block_bytes} bytes") as refused:
        machine_options(section, ids).make_memory(block_bytes)
    assert refused.value.param == "kvstore.disk_bytes"


@pytest.mark.parametrize("segment_bytes", [1 << 12, 1 << 20, 1 << 30])
@pytest.mark.parametrize("block_bytes", [1 << 10, 100_000, 1 << 20])
def test_the_smallest_disk_that_is_accepted_holds_a_block(tmp_path, block_bytes, segment_bytes):
    least = least_capacity_bytes(segment_bytes, block_bytes)
    for capacity, is_held in ((least - 1, False), (least, True)):
        log = SegmentLog(tmp_path / str(is_held), capacity, segment_bytes, SeededIds(1))
        assert log.append(make_block(1).key.pack(), bytes(SEAL_BYTES), memoryview(bytes(block_bytes))) is is_held
        log.close()
