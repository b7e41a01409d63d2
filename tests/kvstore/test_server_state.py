"""The store's side of the protocol: sessions and what ends with them, pins, reservations, and messages that make no sense."""

import pytest

from kvstore import messages as m
from kvstore.arena import SlotState
from kvstore.key import pack_keys
from kvstore.testing.blocks import BLOCK_BYTES, make_block, make_key
from kvstore.testing.in_memory import DictTier
from tests.kvstore.played_server import INCARNATION, NUM_SLOTS, Store, blocks_of


@pytest.fixture
def store():
    store = Store()
    store.greet(b"a")
    return store


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


def test_why_there_is_no_memory_is_remembered_while_a_client_asks_for_it():
    store, hello = Store(max_block_bytes=BLOCK_BYTES), m.Hello(client_id="b", session=1, block_bytes=2 * BLOCK_BYTES)
    (reply,) = store.say(b"b", hello)
    assert store.machine.refusal == reply.message.message != ""
    store.now = 4.0
    store.say(b"b", hello)
    store.now = 8.0
    store.take(store.machine.on_timer(store.now))
    assert store.machine.refusal, "it asks still"
    store.now = 9.0
    store.take(store.machine.on_timer(store.now))
    assert store.machine.refusal == "", "it is gone"
    store.say(b"b", hello)
    store.greet(b"a")
    assert store.machine.refusal == ""
    store.say(b"b", hello)
    assert store.machine.refusal == "", "others are served"


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


def test_the_beginning_of_a_prompt_outlives_its_end(store):
    store.put(b"a", blocks_of(1, 2, 3, 4))
    store.put(b"a", blocks_of(*range(10, 16)))
    (reply,) = store.say(b"a", m.Lookup(number=1, keys=pack_keys(make_key(number) for number in (1, 2, 3, 4))))
    assert reply.message.hits == b"\x01\x01\x00\x00"
