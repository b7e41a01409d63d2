"""The store's side of the protocol above its tiers: blocks that come up, and blocks that are handed down."""

import pytest

from kvstore import messages as m
from kvstore.key import pack_keys
from kvstore.testing.blocks import SealedBlock, make_block, make_key
from kvstore.testing.in_memory import DictTier
from tests.kvstore.played_server import NUM_SLOTS, Store, blocks_of


@pytest.fixture
def below() -> tuple[Store, SealedBlock]:
    """A store with the clients ``a`` and ``b``, and a block that only its tier has."""
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    store.greet(b"b")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, block.content)
    return store, block


def test_one_load_serves_all_requests_that_wait_for_it(below):
    store, block = below
    assert store.get(b"a", [block], 1) == store.get(b"b", [block], 1) == []
    assert len(store.jobs) == 1
    parcels = store.finish_jobs()
    assert [parcel.message.present for parcel in parcels] == [b"\x01", b"\x01"]
    assert store.arena.num_pinned == 1


@pytest.mark.parametrize("fault", ["damaged", "broken"])
@pytest.mark.parametrize("must_be_asked", [False, True])
def test_a_block_that_its_tier_cannot_deliver_comes_from_the_next_one(fault, must_be_asked):
    upper, lower = tiers = DictTier(), DictTier(must_be_asked=must_be_asked)
    store = Store(tiers=tiers)
    store.greet(b"a")
    blocks = blocks_of(1, 2)
    for block in blocks:
        upper.save(block.key.pack(), block.seal, block.content)
    lower.save(blocks[0].key.pack(), blocks[0].seal, blocks[0].content)
    if fault == "damaged":
        for _, content in upper.values.values():
            content[5] ^= 1
    else:
        upper.load = lambda *_: 1 // 0
    assert store.get(b"a", blocks, 1) == []
    (reply,) = store.finish_jobs()
    assert reply.message.present == b"\x01\x00"
    slot, _, num_bytes = reply.message.slots[0]
    assert store.arena.content(slot, num_bytes) == blocks[0].content
    assert (store.machine.tiering.num_loading, store.arena.num_free) == (0, NUM_SLOTS - 1)


def test_the_next_tier_is_not_asked_for_a_block_that_nobody_waits_for():
    upper, lower = tiers = DictTier(), DictTier()
    store = Store(tiers=tiers)
    store.greet(b"a")
    (block,) = blocks_of(1)
    for tier in tiers:
        tier.save(block.key.pack(), block.seal, block.content)
    upper.load = lambda *_: None
    lower.load = lambda *_: pytest.fail("nobody waits for it")
    store.get(b"a", [block], 1)
    (job,) = store.jobs
    store.runners[0].run(job)
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)))
    store.jobs.clear()
    assert store.take(store.machine.on_job_done(job)) == store.jobs == []
    assert (store.machine.tiering.num_loading, store.arena.num_free) == (0, NUM_SLOTS)


def test_an_abandoned_get_pins_nothing_when_its_block_arrives():
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, block.content)
    store.get(b"a", [block], 1)
    (job,) = store.jobs
    store.runners[0].run(job)  # the tier has begun
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)))
    assert store.take(store.machine.on_job_done(job)) == []
    assert store.arena.num_pinned == 0
    (reply,) = store.get(b"a", [block], 2)  # it is in memory now
    assert reply.message.present == b"\x01"


@pytest.mark.parametrize("end", ["released", "gone"])
@pytest.mark.parametrize("must_be_asked", [False, True])
def test_blocks_without_a_waiting_query_are_not_requested_from_a_tier(end, must_be_asked):
    tier = DictTier(must_be_asked=must_be_asked)
    store = Store(tiers=[tier])
    store.greet(b"a")
    blocks = [make_block(number) for number in range(3)]
    for block in blocks:
        tier.save(block.key.pack(), block.seal, block.content)
    tier.load = tier.locate = lambda *_: pytest.fail("nobody waits for it")
    store.get(b"a", blocks, 1)
    assert store.jobs
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)) if end == "released" else m.StoreGoodbye())
    assert store.finish_jobs() == []
    assert (store.machine.tiering.num_loading, store.arena.num_free) == (0, NUM_SLOTS)


@pytest.mark.parametrize(
    "end", [m.ReleaseBlocks(numbers=(1,)), m.StoreHeartbeat(last=1), m.StoreGoodbye()], ids=["released", "forgotten", "gone"]
)
def test_a_lookup_that_nobody_waits_for_is_not_carried_out(end):
    store = Store(tiers=[DictTier(must_be_asked=True)])
    store.greet(b"a")
    assert store.say(b"a", m.Lookup(number=1, keys=pack_keys([make_key(1)]))) == []
    store.say(b"a", m.StoreHeartbeat(last=1, held=(1,)))
    (job,) = store.jobs
    assert job.is_wanted
    store.say(b"a", end)
    assert not job.is_wanted
    assert store.finish_jobs() == []


@pytest.mark.parametrize("is_late", [False, True])
def test_what_another_waits_for_is_loaded(below, is_late):
    store, block = below
    store.get(b"a", [block], 1)
    if not is_late:
        store.get(b"b", [block], 1)
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)))
    if is_late:  # the tier has just passed it over
        (job,) = store.jobs
        store.runners[0].run(job)
        store.get(b"b", [block], 1)
        store.jobs.clear()
        assert store.take(store.machine.on_job_done(job)) == []
    (parcel,) = store.finish_jobs()
    assert parcel.message.present == b"\x01"


def store_that_loads_all_it_may():
    """Return a store that brings up half as many blocks as it has slots, for client "a", and as many blocks as slots."""
    tier = DictTier()
    store = Store(tiers=[tier])
    blocks = [make_block(number) for number in range(NUM_SLOTS)]
    for block in blocks:
        tier.save(block.key.pack(), block.seal, block.content)
    for client in (b"a", b"b"):
        store.greet(client)
    store.get(b"a", blocks[: NUM_SLOTS // 2], 1)
    return store, blocks


def test_no_more_is_brought_up_at_a_time_than_half_of_the_slots_hold():
    store, blocks = store_that_loads_all_it_may()
    (reply,) = store.get(b"b", blocks[NUM_SLOTS // 2 :], 1)
    assert len(store.jobs) == NUM_SLOTS // 2
    assert not any(reply.message.present)
    assert all(reply.message.withheld)
    (parcel,) = store.finish_jobs()
    assert all(parcel.message.present)


def test_blocks_are_withheld_while_the_tier_ends_loads_that_nobody_waits_for():
    store, blocks = store_that_loads_all_it_may()
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)))
    (reply,) = store.get(b"b", blocks[NUM_SLOTS // 2 :], 1)
    assert not any(reply.message.present)
    assert reply.message.withheld == b"\x01" * (NUM_SLOTS // 2)
    store.finish_jobs()
    assert store.get(b"b", blocks[NUM_SLOTS // 2 :], 2) == []
    (reply,) = store.finish_jobs()
    assert all(reply.message.present)


def test_a_tier_that_has_to_be_asked_delays_the_answer():
    tier = DictTier(must_be_asked=True)
    store = Store(tiers=[tier])
    store.greet(b"a")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, block.content)
    assert store.say(b"a", m.Lookup(number=1, keys=pack_keys([block.key, make_key(2)]))) == []
    (reply,) = store.finish_jobs()
    assert reply.message.hits == b"\x01\x00"


def test_a_corrupt_block_of_a_tier_is_a_miss_and_leaves_no_slot_taken():
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, make_block(2).content)
    store.get(b"a", [block], 1)
    (reply,) = store.finish_jobs()
    assert (reply.message.present, store.arena.num_free) == (b"\0", NUM_SLOTS)
    assert store.runners[0].statistics().corrupt_blocks == 1
    assert not tier.values


def test_write_through_hands_down_at_once():
    tiers = [DictTier(), DictTier()]
    store = Store(tiers=tiers)
    store.greet(b"a")
    store.put(b"a", blocks_of(1))
    assert store.arena.num_pinned == 2 - 1
    store.finish_jobs()
    assert [len(tier.values) for tier in tiers] == [1, 1]
    assert store.arena.num_pinned == 0


def test_write_through_hands_down_all_of_a_long_prompt(monkeypatch):
    monkeypatch.setattr("kvstore.tiering.MAX_SAVE_JOBS", 2)
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    store.put(b"a", blocks_of(*range(NUM_SLOTS)))
    assert len(store.jobs) == store.arena.num_pinned == 2
    store.finish_jobs()
    assert (len(tier.values), store.arena.num_pinned, store.machine.tiering.num_saving) == (NUM_SLOTS, 0, 0)


def test_what_is_evicted_before_its_turn_is_counted(monkeypatch):
    monkeypatch.setattr("kvstore.tiering.MAX_SAVE_JOBS", 2)
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    store.put(b"a", blocks_of(*range(NUM_SLOTS)))
    store.put(b"a", blocks_of(50, 51, 52))
    store.finish_jobs()
    assert len(tier.values) == NUM_SLOTS
    assert store.machine.tiering.num_dropped_saves == 3


@pytest.mark.parametrize("write_back", [False, True])
def test_a_block_that_was_damaged_before_its_save_is_saved_when_put_again(write_back):
    tier = DictTier()
    store = Store(tiers=[tier], write_back=write_back)
    store.greet(b"a")
    (block,) = blocks_of(1)
    store.put(b"a", [block])
    if write_back:
        store.take(store.machine.flush())
    (job,) = store.jobs
    store.machine.memory.content(store.machine.memory.find(job.key))[5] ^= 1
    store.say(b"a", m.Corrupt(keys=job.key, code="digest"))
    store.put(b"a", [block])
    store.finish_jobs()
    store.take(store.machine.flush())
    store.finish_jobs()
    assert [bytes(content) for _, content in tier.values.values()] == [bytes(block.content)]
    assert (store.machine.num_unsaved, store.arena.num_pinned, store.arena.num_free) == (0, 0, NUM_SLOTS - 1)


def test_blocks_that_wait_for_a_tier_that_hangs_are_no_more_than_memory_holds():
    store = Store(tiers=[DictTier()])
    store.greet(b"a")
    for number in range(10 * NUM_SLOTS):  # the tier finishes no job
        store.put(b"a", blocks_of(number))
    tiering = store.machine.tiering
    assert tiering.num_saving <= NUM_SLOTS
    assert tiering.num_dropped_saves == 10 * NUM_SLOTS - tiering.num_saving


def test_write_back_hands_down_when_clean_slots_get_few_and_loses_nothing():
    tier = DictTier()
    store = Store(tiers=[tier], write_back=True)
    store.greet(b"a")
    store.put(b"a", blocks_of(1, 2, 3))
    assert (store.jobs, store.machine.memory.num_dirty) == ([], 3)
    for number in range(4, 40):
        assert store.put(b"a", blocks_of(number)) == [1]
        store.finish_jobs()
    (reply,) = store.say(b"a", m.Lookup(number=1, keys=pack_keys(make_key(number) for number in range(1, 40))))
    assert reply.message.hits == b"\x01" * 39
    assert store.machine.memory.num_dirty <= 0.75 * NUM_SLOTS


def test_write_back_refuses_what_has_no_room_while_the_tier_is_busy():
    store = Store(tiers=[DictTier()], write_back=True)
    store.greet(b"a")
    assert all(store.put(b"a", blocks_of(number)) == [1] for number in range(NUM_SLOTS))
    assert store.put(b"a", blocks_of(99)) == [0]
    store.finish_jobs()
    assert store.put(b"a", blocks_of(99)) == [1]


def test_a_put_without_room_looks_at_no_block_of_the_arena(monkeypatch):
    store = Store(tiers=[DictTier()], write_back=True)
    store.greet(b"a")
    for number in range(NUM_SLOTS):
        store.put(b"a", blocks_of(number))
    looked_at = []
    monkeypatch.setattr(store.machine.memory, "_can_evict", looked_at.append)
    reserved = store.reserve(b"a", blocks_of(*range(100, 200)), 7)
    assert set(reserved.slots) == {m.NO_SLOT}
    assert store.machine.counts["refused_blocks"] == 100
    assert looked_at == []


def test_a_tier_that_fails_does_not_keep_memory_full():
    class BrokenTier(DictTier):
        def save(self, key, seal, block):
            raise RuntimeError("broken")

    store = Store(tiers=[BrokenTier()], write_back=True)
    store.greet(b"a")
    for number in range(3 * NUM_SLOTS):
        assert store.put(b"a", blocks_of(number)) == [1]
        store.finish_jobs()
    assert store.runners[0].statistics().errors > 0


def test_flush_hands_everything_down():
    tier = DictTier()
    store = Store(tiers=[tier], write_back=True)
    store.greet(b"a")
    store.put(b"a", blocks_of(1, 2, 3))
    for _ in range(2):  # a quarter of the slots at a time
        store.take(store.machine.flush())
        store.finish_jobs()
    assert (len(tier.values), store.machine.memory.num_dirty) == (3, 0)
