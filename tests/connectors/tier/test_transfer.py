"""Blocks between pool and tier, one decision at a time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from connectors.pool_access import HostPoolAccess, open_pool
from connectors.reports import ALL_BLOCKS, LoadEnded
from connectors.tier import transfer as mover_module
from connectors.tier.messages import SaveEnded, SaveItem, SavesAreSlow, TierConnectorMetadata, TierLoad
from connectors.tier.transfer import BLOCKS_PER_TURN, TierTransfer
from connectors.withheld import HUNG_S, WITHHELD_S
from core.digest import BlockDigester
from core.kv.seals import ExpectedSeal, decode_seal
from core.testing.clock import FakeClock
from core.testing.hash_model import hash_model_region
from kvstore.key import StoreKey, layout_key

BLOCK_SIZE, NUM_BLOCKS, INCARNATION = 16, 40, 9


@pytest.fixture
def region():
    region = hash_model_region(NUM_BLOCKS, BLOCK_SIZE, INCARNATION)
    for block_id in range(NUM_BLOCKS):
        region.buffer[block_id * region.block_bytes : (block_id + 1) * region.block_bytes] = (
            bytes([block_id]) * region.block_bytes
        )
    return region


@pytest.fixture
def mover(region, store):
    return TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, FakeClock())


def row(region, block_id):
    return bytes(region.buffer[block_id * region.block_bytes : (block_id + 1) * region.block_bytes])


def sealed(region, block_id, generation=1, group_id=0):
    """Seal a block of the pool and return what saves it."""
    block_hash = bytes([block_id]) * 16
    region.seals.seal(block_id, ExpectedSeal(generation, group_id, block_hash, BLOCK_SIZE))
    return SaveItem(StoreKey(block_hash, layout_key(region.layout), group_id), block_id, generation)


def drive(mover):
    while mover.step():
        pass
    return mover.take_reports()


def save(mover, *items):
    mover.submit(TierConnectorMetadata(saves=list(items)))
    return drive(mover)


def load(mover, items, block_ids, request_id="r"):
    job = TierLoad(request_id, tuple(item.key for item in items), tuple(block_ids), num_tokens=BLOCK_SIZE * len(items))
    mover.submit(TierConnectorMetadata(loads=[job]))


def test_saved_block_carries_its_seal_with_a_digest_and_no_generation_of_the_pool(mover, region, store):
    item = sealed(region, 3, generation=77)
    assert save(mover, item) == [SaveEnded((3,))]
    content, seal_row = store.blocks[item.key]
    seal = decode_seal(seal_row)
    assert bytes(content) == row(region, 3)
    assert (seal.generation, seal.incarnation, seal.block_hash) == (1, INCARNATION, item.key.block_hash)
    assert seal.digest == BlockDigester(region.block_bytes).digest(memoryview(content))


def test_digest_that_the_owner_has_made_is_kept(store):
    region = hash_model_region(4, BLOCK_SIZE, INCARNATION, digest=lambda block: 4711)
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, FakeClock())
    item = sealed(region, 2)
    save(mover, item)
    assert decode_seal(store.blocks[item.key][1]).digest == 4711


def test_block_of_another_generation_hash_or_without_seal_is_not_saved(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 5)]
    sealed(region, 1, generation=2)
    region.seals.break_seals([2])
    region.seals.seal(3, ExpectedSeal(1, 0, bytes(16), BLOCK_SIZE))
    assert save(mover, *items) == [SaveEnded((1, 2, 3)), SaveEnded((4,))]
    assert list(store.blocks) == [items[3].key]
    assert mover.counts["stale_blocks"] == 3


def test_block_rewritten_during_its_store_is_stale_and_never_verified(mover, region, store):
    store.answers_at_once = False
    item = sealed(region, 5)
    mover.submit(TierConnectorMetadata(saves=[item]))
    store.answer()  # it is not there
    assert mover.step()
    mover.step()
    region.seals.break_seals([5])
    region.buffer[5 * region.block_bytes] ^= 1
    store.answer()
    assert drive(mover) == [SaveEnded((5,))]
    assert (mover.counts["stale_blocks"], mover.counts["saved_blocks"]) == (1, 0)
    store.answers_at_once = True
    load(mover, [item], [6])
    (ended,) = drive(mover)
    assert ended.error.code == "digest"


@pytest.mark.parametrize("generation", [None, 2], ids=["unsealed", "sealed again"])
def test_block_that_is_rewritten_before_its_digest_is_made_is_not_stored(mover, region, store, monkeypatch, generation):
    """Its digest would be that of the new bytes: they would pass for the old ones."""
    items = [sealed(region, block_id) for block_id in (4, 5, 6)]
    digest = mover._digester.digest

    def rewritten_meanwhile(content):
        region.seals.break_seals([5])
        region.buffer[5 * region.block_bytes] ^= 1
        if generation is not None:
            sealed(region, 5, generation)
        return digest(content)

    monkeypatch.setattr(mover, "_digester", SimpleNamespace(digest=rewritten_meanwhile))
    assert save(mover, *items) == [SaveEnded((5,)), SaveEnded((4, 6))]
    assert list(store.blocks) == [items[0].key, items[2].key]
    assert mover.counts["stale_blocks"] == 1


def test_blocks_are_released_put_by_put(mover, region, store, monkeypatch):
    monkeypatch.setattr(type(mover._pool), "max_reads", 2)
    items = [sealed(region, block_id) for block_id in range(1, 7)]
    save(mover, items[1])
    store.answers_at_once = False
    mover.submit(TierConnectorMetadata(saves=items))
    store.answer()
    assert drive(mover) == [SaveEnded((2,))], "it is there"
    for block_ids in ((1, 3), (4, 5), (6,)):
        store.answer()
        assert drive(mover) == [SaveEnded(block_ids)]
    assert not mover.is_waiting


def test_saves_that_do_not_come_further_are_reported_once(region, store):
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    clock.advance(10)
    store.answers_at_once = False
    mover.submit(TierConnectorMetadata(saves=[sealed(region, 3)]))
    assert drive(mover) == [], "it has just begun"
    clock.advance(mover_module.SLOW_S)
    assert drive(mover) == [SavesAreSlow()]
    assert drive(mover) == []
    store.answer()
    assert drive(mover) == [], "that was progress"
    clock.advance(mover_module.SLOW_S)
    assert drive(mover) == [SavesAreSlow()]
    store.answer()
    assert drive(mover) == [SaveEnded((3,))]
    clock.advance(10)
    assert drive(mover) == []


def test_what_the_tier_has_is_not_stored_again(mover, region, store):
    items = [sealed(region, block_id) for block_id in (1, 2, 3)]
    save(mover, *items[:2])
    save(mover, *items)
    assert mover.counts == {"saved_blocks": 3, "known_blocks": 2, "stale_blocks": 0}


def test_loaded_blocks_are_those_that_were_asked_for(mover, region):
    items = [sealed(region, block_id) for block_id in range(1, 8)]
    save(mover, *items)
    load(mover, items, range(20, 27))
    (ended,) = drive(mover)
    assert ended.error is None
    assert ended.usage.transferred_tokens == 7 * BLOCK_SIZE
    assert [row(region, 20 + index) for index in range(7)] == [row(region, 1 + index) for index in range(7)]
    assert row(region, 27) == bytes([27]) * region.block_bytes


def test_of_a_load_in_part_the_bad_blocks_are_named(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 5)]
    save(mover, *items)
    del store.blocks[items[1].key]
    store.blocks[items[3].key][0][5] ^= 1
    load(mover, items, range(20, 24))
    (ended,) = drive(mover)
    assert ended.invalid_block_ids == (21, 22, 23)
    assert ended.error.code == "store_miss"
    assert ended.usage.transferred_tokens == ended.usage.verified_blocks * BLOCK_SIZE == BLOCK_SIZE


def test_after_a_missing_block_nothing_is_requested(region, store, monkeypatch):
    monkeypatch.setattr(mover_module, "GET_BYTES", 2 * region.block_bytes)
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, FakeClock())
    items = [sealed(region, block_id, group_id=block_id // 16) for block_id in range(2, 18)]  # the last two: group 1
    save(mover, *items)
    del store.blocks[items[3].key]
    load(mover, items, range(20, 36))
    (ended,) = drive(mover)
    assert ended.error.code == "store_miss"
    assert ended.invalid_block_ids == tuple(range(23, 34)), "the other group has its own prefix"
    assert store.num_gets <= 4, "two before it, one beside it, and that of the other group"
    assert row(region, 24) == bytes([24]) * region.block_bytes
    assert not store.pinned


def test_every_bad_block_is_found_so_that_it_is_stored_again(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 8)]
    save(mover, *items)
    for index in (1, 3, 6):
        store.blocks[items[index].key][0][5] ^= 1
    load(mover, items, range(20, 27))
    (ended,) = drive(mover)
    assert (ended.error.code, ended.invalid_block_ids) == ("digest", (21, 23, 26))
    assert store.rejected == {"digest": 3}


def test_a_load_as_a_whole_ends_at_its_deadline(region, store, monkeypatch):
    """Each part is answered in time, and all of them together are not."""
    monkeypatch.setattr(mover_module, "GET_BYTES", 2 * region.block_bytes)
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    items = [sealed(region, block_id) for block_id in range(1, 11)]
    save(mover, *items)
    store.answers_at_once = False
    keys = tuple(item.key for item in items)
    job = TierLoad("r", keys, tuple(range(20, 30)), num_tokens=10 * BLOCK_SIZE, deadline=clock.now() + 3)
    mover.submit(TierConnectorMetadata(loads=[job]))
    for _ in range(3):
        mover.step()
        assert not mover.take_reports()
        clock.advance(1)
        store.answer(1)
    (ended,) = drive(mover)
    assert ended.error.code == "deadline"
    assert ended.usage.verified_blocks == 4
    assert ended.invalid_block_ids == tuple(range(24, 30))
    assert not store.pinned


@pytest.mark.parametrize("max_pins", [1, 3, 7])
def test_loads_at_once_take_turns_when_the_tier_pins_too_little_for_all(region, store, monkeypatch, max_pins):
    monkeypatch.setattr(mover_module, "GET_BYTES", 4 * region.block_bytes)
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    items = [sealed(region, block_id) for block_id in range(1, 11)]
    save(mover, *items)
    store.max_pins = max_pins
    load(mover, items, range(20, 30), "a")
    load(mover, items, range(30, 40), "b")
    ended = []
    for _ in range(60):
        ended += drive(mover)
        clock.advance(mover_module.RETRY_S)
    assert {report.request_id: report.error for report in ended} == {"a": None, "b": None}
    assert [row(region, 30 + index) for index in range(10)] == [row(region, 1 + index) for index in range(10)]
    assert mover.counts["withheld_gets"]
    assert not store.pinned


def test_a_tier_that_continues_withholding_costs_no_more_than_the_deadline(region, store):
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    item = sealed(region, 1)
    save(mover, item)
    store.max_pins = 0
    mover.submit(TierConnectorMetadata(loads=[TierLoad("r", (item.key,), (20,), BLOCK_SIZE, deadline=clock.now() + 1)]))
    assert drive(mover) == []
    assert store.num_gets == 1, "it is asked again after a moment, not at once"
    clock.advance(1)
    (ended,) = drive(mover)
    assert (ended.error.code, ended.invalid_block_ids) == ("deadline", ALL_BLOCKS)


class LandingPool(HostPoolAccess):
    """A pool that blocks reach as they reach one on a device: nobody has looked at the bytes on their way."""

    has_digests = True

    def write_from(self, block_id, memory):
        self._row(block_id)[:] = memory
        return True

    def digests(self, block_ids):
        return [BlockDigester(self._block_bytes).digest(self._row(block_id)) for block_id in block_ids]


@pytest.mark.parametrize("max_pins", [1, 2, 10])
def test_blocks_that_landed_before_the_tier_withheld_more_are_verified(region, store, max_pins):
    clock = FakeClock()
    pool = LandingPool(region.buffer, region.block_bytes)
    mover = TierTransfer("tier", store, pool, region.seals, region.block_bytes, clock)
    items = [sealed(region, block_id) for block_id in range(1, 5)]
    save(mover, *items)
    for item in items[::2]:
        store.blocks[item.key][0][7] ^= 1
    store.max_pins = max_pins
    load(mover, items, range(20, 24))
    ended = []
    while not ended:
        ended = drive(mover)
        clock.advance(mover_module.RETRY_S)
    assert [(report.error.code, report.invalid_block_ids) for report in ended] == [("digest", (20, 22))]


def test_blocks_that_a_tier_withholds_without_an_end_are_missing_in_time(region, store):
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    items = [sealed(region, block_id, group_id=block_id % 2) for block_id in (1, 2)]
    save(mover, *items)
    store.max_pins = 0
    keys = tuple(item.key for item in items)
    mover.submit(TierConnectorMetadata(loads=[TierLoad("r", keys, (20, 21), BLOCK_SIZE, deadline=clock.now() + 30)]))
    assert drive(mover) == []
    clock.advance(0.9 * WITHHELD_S)
    assert drive(mover) == []
    ended = []
    for _ in range(3):
        clock.advance(0.1 * WITHHELD_S)
        ended += drive(mover)
    assert [(report.error.code, report.invalid_block_ids) for report in ended] == [("store_miss", ALL_BLOCKS)]


def test_a_tier_that_has_withheld_for_long_is_not_waited_for_again_until_it_gives(region, store):
    clock = FakeClock()
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, clock)
    item = sealed(region, 1)
    save(mover, item)
    store.max_pins = 0
    load(mover, [item], (20,), "first")
    drive(mover)
    clock.advance(WITHHELD_S)
    assert [report.request_id for report in drive(mover)] == ["first"]
    load(mover, [item], (20,), "second")
    (ended,) = drive(mover)
    assert (ended.request_id, ended.error.code) == ("second", "store_miss")
    clock.advance(HUNG_S)
    load(mover, [item], (20,), "third")
    assert drive(mover) == []
    store.max_pins = 1
    clock.advance(mover_module.RETRY_S)
    (ended,) = drive(mover)
    assert (ended.request_id, ended.error) == ("third", None)


def test_a_load_of_nothing_names_no_blocks(mover, region, store):
    items = [sealed(region, block_id) for block_id in (1, 2)]
    load(mover, items, (20, 21))
    (ended,) = drive(mover)
    assert (ended.invalid_block_ids, ended.usage.transferred_tokens) == (ALL_BLOCKS, 0)
    assert ended.error.code == "store_miss"


def test_least_of_all_groups_counts(mover, region, store):
    items = [sealed(region, block_id, group_id=block_id % 2) for block_id in range(1, 9)]
    save(mover, *items)
    del store.blocks[items[3].key]
    load(mover, items, range(20, 28))
    (ended,) = drive(mover)
    assert ended.usage.transferred_tokens == 8 * BLOCK_SIZE // 4


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_aborted_load_ends_without_another_byte(mover, region, store, num_steps):
    items = [sealed(region, block_id) for block_id in range(1, 11)]
    save(mover, *items)
    load(mover, items, range(20, 30))
    for _ in range(num_steps):
        mover.step()
    assert not mover.take_reports()
    mover.submit(TierConnectorMetadata(aborts=["r"]))
    before = bytes(region.buffer)
    assert drive(mover) == [LoadEnded("r", None)]
    assert bytes(region.buffer) == before
    assert not store.pinned


def test_abort_of_a_load_that_has_ended_is_nothing(mover):
    mover.submit(TierConnectorMetadata(aborts=["gone"]))
    assert drive(mover) == []


def test_load_waits_for_a_slow_tier_without_holding_others_up(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 5)]
    save(mover, *items)
    store.answers_at_once = False
    load(mover, items[:2], (20, 21), "slow")
    assert not mover.step()
    assert mover.is_waiting
    store.answers_at_once = True
    load(mover, items[2:], (22, 23), "fast")
    assert [ended.request_id for ended in drive(mover)] == ["fast"]
    store.answer()
    assert [ended.request_id for ended in drive(mover)] == ["slow"]
    assert not mover.is_waiting


def test_loads_go_before_saves_and_take_turns(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 11)]
    save(mover, *items)
    load(mover, items, range(20, 30), "a")
    load(mover, items[:BLOCKS_PER_TURN], range(30, 30 + BLOCKS_PER_TURN), "b")
    mover.submit(TierConnectorMetadata(saves=[sealed(region, 15)]))
    order = [type(report).__name__ + getattr(report, "request_id", "") for report in drive(mover)]
    assert order == ["LoadEndedb", "LoadEndeda", "SaveEnded"]


def test_large_loads_are_asked_for_in_parts(region, store, monkeypatch):
    monkeypatch.setattr(mover_module, "GET_BYTES", 5 * region.block_bytes)
    mover = TierTransfer("tier", store, open_pool(region), region.seals, region.block_bytes, FakeClock())
    items = [sealed(region, block_id) for block_id in range(1, 12)]
    save(mover, *items)
    load(mover, items, range(20, 31))
    mover.step()
    assert len(store.pinned) == 2, "the next part is on its way while one is copied"
    (ended,) = drive(mover)
    assert (store.num_gets, ended.usage.verified_blocks) == (3, 11)
    assert not store.pinned


def test_closing_in_mid_load_gives_back_what_is_pinned(mover, region, store):
    items = [sealed(region, block_id) for block_id in range(1, 11)]
    save(mover, *items)
    load(mover, items, range(20, 30))
    mover.step()
    mover.close()
    store.close()
