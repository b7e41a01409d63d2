"""The store's side of the protocol: sessions and what ends with them, reservations, and messages that make no sense."""

import pytest

from kvstore import messages as m
from kvstore.arena import NONCE_BYTES, SlotState, arena_bytes, write_header
from kvstore.eviction import make_policy
from kvstore.key import pack_keys
from kvstore.memory import MemoryTier
from kvstore.server_state import SendParcel, ServerOptions, ServerState, StartJob, WatchProcess
from kvstore.testing.blocks import BLOCK_BYTES, make_block, make_key
from kvstore.testing.in_memory import DictTier, MappableArena
from kvstore.tiers.worker import TierRunner

NUM_SLOTS = 8
NONCE = bytes(range(NONCE_BYTES))
INCARNATION = 77


class Store:
    """A machine whose messages are passed by hand; jobs of tiers are done when the test says so."""

    def __init__(self, *, tiers=(), write_back=False, policy="lru"):
        def make_memory(block_bytes):
            memory = memoryview(bytearray(arena_bytes(NUM_SLOTS, BLOCK_BYTES)))
            write_header(memory, NUM_SLOTS, BLOCK_BYTES, INCARNATION, NONCE)
            return MemoryTier(MappableArena(memory, None), make_policy(policy, NUM_SLOTS))

        self.machine = ServerState(ServerOptions(INCARNATION, make_memory, write_back=write_back), tiers)
        self.runners = [TierRunner(tier) for tier in tiers]
        self.jobs, self.watched, self.now = [], [], 0.0

    def say(self, client, message, blocks=()):
        return self.take(self.machine.on_parcel(client, message, blocks, self.now))

    def take(self, actions):
        self.jobs += [action.job for action in actions if isinstance(action, StartJob)]
        self.watched += [action.client_id for action in actions if isinstance(action, WatchProcess)]
        return [action.parcel for action in actions if isinstance(action, SendParcel)]

    def finish_jobs(self):
        parcels = []
        while self.jobs:
            job = self.jobs.pop(0)
            self.runners[job.tier].run(job)
            parcels += self.take(self.machine.on_job_done(job))
        return parcels

    def greet(self, client, *, is_local=True):
        (welcome,) = self.say(client, m.Hello(client_id=client.decode(), session=1, block_bytes=BLOCK_BYTES))
        assert isinstance(welcome.message, m.Welcome)
        if is_local:
            (attached,) = self.say(client, m.Attach(nonce=NONCE, pid=1, start_ticks=0))
            assert attached.message == m.Attached()

    def put(self, client, blocks, number=1):
        message = m.Put(
            number=number, keys=pack_keys(block.key for block in blocks), seals=b"".join(block.seal for block in blocks)
        )
        (reply,) = self.say(client, message, [block.content for block in blocks])
        return list(reply.message.stored)

    def get(self, client, blocks, number):
        return self.say(client, m.Get(number=number, keys=pack_keys(block.key for block in blocks)))

    def reserve(self, client, blocks, number):
        sizes = tuple(block.content.nbytes for block in blocks)
        (reply,) = self.say(client, m.Reserve(number=number, keys=pack_keys(block.key for block in blocks), sizes=sizes))
        return reply.message

    @property
    def arena(self):
        return self.machine.memory.arena


@pytest.fixture
def store():
    store = Store()
    store.greet(b"a")
    return store


def blocks_of(*numbers):
    return [make_block(number) for number in numbers]


def test_a_client_without_a_session_is_told_so():
    (reply,) = Store().say(b"a", m.Lookup(number=1, keys=b""))
    assert reply.message == m.UnknownClient(incarnation=INCARNATION)


def test_shared_memory_is_proven_by_the_nonce(store):
    store.greet(b"b", is_local=False)
    (reply,) = store.say(b"b", m.Attach(nonce=bytes(32), pid=1, start_ticks=0))
    assert reply.message.code == "protocol_error"
    (reply,) = store.say(b"b", m.Reserve(number=1, keys=make_key(1).pack(), sizes=(8,)))
    assert reply.message.code == "protocol_error"
    assert store.watched == ["a"]
    assert (store.machine.num_clients, store.machine.num_local_clients) == (2, 1)


def test_blocks_that_do_not_fit_the_slots_are_refused_with_both_sizes(store):
    (reply,) = store.say(b"b", m.Hello(client_id="b", session=1, block_bytes=BLOCK_BYTES + 1))
    assert reply.message.code == "layout"
    assert str(BLOCK_BYTES) in reply.message.message
    assert str(BLOCK_BYTES + 1) in reply.message.message


def test_a_get_is_pinned_until_it_is_released(store):
    store.put(b"a", blocks_of(1, 2))
    store.get(b"a", blocks_of(1, 2), 5)
    assert store.arena.num_pinned == 2
    store.say(b"a", m.ReleaseBlocks(numbers=(5, 99)))
    assert store.arena.num_pinned == 0


def test_frames_are_the_client_s_own_and_pin_nothing(store):
    store.greet(b"b", is_local=False)
    store.put(b"a", blocks_of(1))
    (reply,) = store.get(b"b", blocks_of(1), 5)
    assert bytes(reply.blocks[0]) == bytes(make_block(1).content)
    assert store.arena.num_pinned == 0


def test_a_long_answer_comes_in_parts(store, monkeypatch):
    monkeypatch.setattr("kvstore.server_state.MAX_BLOCKS_BYTES", 2 * BLOCK_BYTES)
    store.greet(b"b", is_local=False)
    store.put(b"a", blocks_of(1, 2, 3, 5))
    parts = store.get(b"b", blocks_of(1, 2, 3, 4, 5), 7)
    assert [(part.message.first, list(part.message.present), part.message.is_last) for part in parts] == [
        (0, [1, 1], False),
        (2, [1, 0, 1], True),
    ]


def test_what_cannot_be_pinned_now_is_told_from_what_is_not_there(store):
    store.put(b"a", blocks_of(1, 2, 3, 5, 6))
    (reply,) = store.get(b"a", blocks_of(1, 2, 3), 7)
    assert reply.message.withheld == b""
    (reply,) = store.get(b"a", blocks_of(4, 5, 6), 8)  # half of the slots is for one client
    assert (list(reply.message.present), list(reply.message.withheld)) == ([0, 1, 0], [0, 0, 1])
    store.say(b"a", m.ReleaseBlocks(numbers=(7,)))
    (reply,) = store.get(b"a", blocks_of(6), 9)
    assert (list(reply.message.present), reply.message.withheld) == ([1], b"")


def test_what_cannot_be_pinned_in_a_long_answer_is_reported_part_by_part(store, monkeypatch):
    monkeypatch.setattr("kvstore.server_state.MAX_BLOCKS_BYTES", 2 * BLOCK_BYTES)
    store.greet(b"b", is_local=False)
    store.put(b"a", blocks_of(1, 2, 3, 4, 5))
    parts = store.get(b"b", blocks_of(1, 2, 3, 4, 5, 6), 7)
    assert [(part.message.first, list(part.message.present), list(part.message.withheld)) for part in parts] == [
        (0, [1, 1], []),
        (2, [1, 1, 0, 0], [0, 0, 1, 0]),
    ]


@pytest.mark.parametrize("num_pinned", [3, 4])
def test_a_block_that_comes_up_when_too_many_are_pinned_is_withheld(num_pinned):
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    lower = blocks_of(11, 12)
    for block in lower:
        tier.save(block.key.pack(), block.seal, block.content)
    store.put(b"a", blocks_of(*range(num_pinned)))
    store.get(b"a", blocks_of(*range(num_pinned)), 1)
    replies = store.get(b"a", lower, 2) + store.finish_jobs()
    message = replies[-1].message
    num_present = 4 - num_pinned
    assert (sum(message.present), sum(message.withheld)) == (num_present, 2 - num_present)


def store_above(*contents):
    """Return a store of eight slots, half of them for one client at a time, and blocks that its lower tier has."""
    tier, lower = DictTier(), blocks_of(*contents)
    for block in lower:
        tier.save(block.key.pack(), block.seal, block.content)
    store = Store(tiers=[tier])
    store.greet(b"a")
    return store, lower


def test_earlier_blocks_come_up_before_later_ones_are_pinned():
    store, lower = store_above(11, 12)
    store.put(b"a", blocks_of(1, 2, 3, 4))
    store.get(b"a", [*lower, *blocks_of(1, 2, 3, 4)], 1)
    (reply,) = store.finish_jobs()
    assert list(reply.message.present) == [1, 1, 1, 1, 0, 0]
    assert list(reply.message.withheld) == [0, 0, 0, 0, 1, 1]


def test_a_later_block_of_a_get_makes_room_for_an_earlier_one():
    store, lower = store_above(11)
    store.put(b"a", blocks_of(1, 2, 3, 4))
    store.put(b"a", blocks_of(5, 6, 7, 8))
    store.finish_jobs()  # nothing is pinned until it is saved
    for client, contents in ((b"b", (5, 6, 7, 8)), (b"c", (4,))):
        store.greet(client)
        store.get(client, blocks_of(*contents), 1)
    store.get(b"a", [*lower, *blocks_of(1, 2, 3)], 1)
    (reply,) = store.finish_jobs()
    assert list(reply.message.present) == [1, 1, 1, 0]
    assert list(reply.message.withheld) == [0, 0, 0, 1]
    for client in (b"a", b"b", b"c"):
        store.say(client, m.ReleaseBlocks(numbers=(1,)))
    assert store.arena.num_pinned == 0


@pytest.mark.parametrize("end", ["goodbye", "hello", "death"])
def test_everything_a_client_held_ends_with_it(store, end):
    store.put(b"a", blocks_of(1, 2))
    store.get(b"a", blocks_of(1, 2), 5)
    store.reserve(b"a", blocks_of(3, 4), 6)
    if end == "goodbye":
        store.say(b"a", m.StoreGoodbye())
    elif end == "hello":
        store.say(b"a", m.Hello(client_id="a", session=2, block_bytes=BLOCK_BYTES))
    else:
        store.take(store.machine.on_process_died("a"))
    assert (store.arena.num_pinned, store.arena.num_free) == (0, NUM_SLOTS - 2)


def test_a_new_connection_of_the_same_client_ends_the_old_session(store):
    store.put(b"a", blocks_of(1))
    store.get(b"a", blocks_of(1), 5)
    store.say(b"another", m.Hello(client_id="a", session=2, block_bytes=BLOCK_BYTES))
    assert (store.arena.num_pinned, store.machine.num_clients) == (0, 1)


@pytest.mark.parametrize("end", ["hello", "death"])
def test_a_silent_client_s_slots_wait_for_its_death_or_its_return(store, end):
    store.put(b"a", blocks_of(1))
    store.get(b"a", blocks_of(1), 5)
    (slot, *_), *_ = store.reserve(b"a", blocks_of(2), 6).slots
    store.take(store.machine.on_timer(4.9))
    assert store.machine.num_clients == 1
    store.take(store.machine.on_timer(5.0))
    assert (store.machine.num_clients, store.arena.num_pinned, store.machine.num_quarantined) == (0, 0, 1)
    assert store.arena.state(slot) is SlotState.WRITING
    store.now = 6.0
    store.greet(b"b")
    assert store.put(b"b", blocks_of(2)) == [1]  # the block, in another slot
    (reply,) = store.say(b"a", m.Commit(number=6, seals=make_block(2).seal))
    assert isinstance(reply.message, m.UnknownClient)
    if end == "hello":
        store.greet(b"a")
    else:
        store.take(store.machine.on_process_died("a"))
    assert (store.machine.num_quarantined, store.arena.num_free) == (0, NUM_SLOTS - 2)


def test_what_a_heartbeat_does_not_name_is_over(store):
    store.put(b"a", blocks_of(1, 2))
    store.get(b"a", blocks_of(1), 5)
    store.get(b"a", blocks_of(2), 6)
    store.reserve(b"a", blocks_of(3), 7)
    store.say(b"a", m.StoreHeartbeat(last=6, held=(6,)))
    assert (store.arena.num_pinned, store.arena.num_free) == (1, NUM_SLOTS - 3)  # 7 came after the heartbeat was made
    store.say(b"a", m.StoreHeartbeat(last=7, held=(6,)))
    assert store.arena.num_free == NUM_SLOTS - 2


def test_only_one_client_writes_a_block(store):
    store.greet(b"b")
    assert store.reserve(b"a", blocks_of(1), 1).slots[0] != m.NO_SLOT
    assert store.reserve(b"b", blocks_of(1), 1).slots == (m.NO_SLOT,)
    store.say(b"a", m.Commit(number=1, seals=make_block(1).seal))
    reply = store.reserve(b"b", blocks_of(1), 2)
    assert (reply.slots, reply.stored) == ((m.NO_SLOT,), b"\x01")


def test_a_reserved_block_is_no_hit(store):
    store.reserve(b"a", blocks_of(1), 1)
    (reply,) = store.say(b"a", m.Lookup(number=2, keys=make_key(1).pack()))
    assert reply.message.hits == b"\0"


@pytest.mark.parametrize(
    "message",
    [
        m.Commit(number=9, seals=b""),
        m.Reserve(number=1, keys=make_key(1).pack(), sizes=()),
        m.Lookup(number=1, keys=b"half a key"),
        m.Get(number=1, keys=b"half a key"),
        m.Put(number=1, keys=make_key(1).pack(), seals=b""),
        m.Reserve(number=1, keys=make_key(1).pack() + bytes(32) + b"\xff" * 4, sizes=(8, 8)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_nonsense_is_refused_by_its_number_and_leaves_nothing(store, message):
    (reply,) = store.say(b"a", message)
    assert (reply.message.code, reply.message.number) == ("protocol_error", message.number)
    assert store.arena.num_free == NUM_SLOTS


def test_a_reservation_survives_a_commit_that_makes_no_sense_until_it_is_released(store):
    store.reserve(b"a", blocks_of(1), 1)
    (reply,) = store.say(b"a", m.Commit(number=1, seals=bytes(63)))
    assert reply.message.code == "protocol_error"
    store.say(b"a", m.ReleaseBlocks(numbers=(1,)))
    assert store.arena.num_free == NUM_SLOTS
    assert store.put(b"a", blocks_of(1)) == [1]


def test_a_number_that_is_open_cannot_be_used_again(store):
    store.put(b"a", blocks_of(1))
    store.get(b"a", blocks_of(1), 5)
    (reply,) = store.get(b"a", blocks_of(1), 5)
    assert reply.message.code == "protocol_error"
    store.say(b"a", m.ReleaseBlocks(numbers=(5,)))
    assert store.arena.num_pinned == 0


def test_a_rejected_block_is_given_to_no_new_reader(store):
    store.put(b"a", blocks_of(1))
    store.get(b"a", blocks_of(1), 5)
    store.say(b"a", m.Corrupt(keys=make_key(1).pack(), code="digest"))
    assert store.machine.rejected == {"digest": 1}
    (reply,) = store.get(b"a", blocks_of(1), 6)
    assert reply.message.present == b"\0"
    assert store.put(b"a", blocks_of(1)) == [1]
    store.say(b"a", m.ReleaseBlocks(numbers=(5, 6)))
    assert store.arena.num_free == NUM_SLOTS - 1


def test_one_load_serves_all_requests_that_wait_for_it():
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    store.greet(b"b")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, block.content)
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


@pytest.mark.parametrize("is_late", [False, True])
def test_what_another_waits_for_is_loaded(is_late):
    tier = DictTier()
    store = Store(tiers=[tier])
    store.greet(b"a")
    store.greet(b"b")
    block = make_block(1)
    tier.save(block.key.pack(), block.seal, block.content)
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


def test_no_more_is_brought_up_at_a_time_than_half_of_the_slots_hold():
    tier = DictTier()
    store = Store(tiers=[tier])
    blocks = [make_block(number) for number in range(NUM_SLOTS)]
    for block in blocks:
        tier.save(block.key.pack(), block.seal, block.content)
    for client in (b"a", b"b"):
        store.greet(client)
    store.get(b"a", blocks[: NUM_SLOTS // 2], 1)
    (reply,) = store.get(b"b", blocks[NUM_SLOTS // 2 :], 1)
    assert len(store.jobs) == NUM_SLOTS // 2
    assert not any(reply.message.present)
    assert all(reply.message.withheld)
    (parcel,) = store.finish_jobs()
    assert all(parcel.message.present)


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


def test_the_beginning_of_a_prompt_outlives_its_end(store):
    store.put(b"a", blocks_of(1, 2, 3, 4))
    store.put(b"a", blocks_of(*range(10, 16)))
    (reply,) = store.say(b"a", m.Lookup(number=1, keys=pack_keys(make_key(number) for number in (1, 2, 3, 4))))
    assert reply.message.hits == b"\x01\x01\x00\x00"
