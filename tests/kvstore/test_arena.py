"""Slots in shared memory: their states, their pins, and what a reader sees when the owner dies at any store."""

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ConfigError, Full, PeerUnreachable, ProtocolError
from core.memory_file import huge_page_stock
from kvstore.arena import (
    NONCE_BYTES,
    Arena,
    ArenaView,
    SlotState,
    arena_bytes,
    create_arena,
    map_arena,
    round_slot_bytes,
    write_header,
)

SLOT_BYTES = 4096
NONCE = bytes(range(NONCE_BYTES))
INCARNATION = 0xABCD_EF01


def seal_of(number):
    return bytes([number % 256]) * 64


def plain_arena(num_slots=4, kind=Arena):
    memory = memoryview(bytearray(arena_bytes(num_slots, SLOT_BYTES)))
    write_header(memory, num_slots, SLOT_BYTES, INCARNATION, NONCE)
    return kind(memory, None)


@pytest.fixture
def arena():
    return plain_arena()


@pytest.fixture
def shared():
    arena = create_arena(4, SLOT_BYTES, INCARNATION, NONCE)
    yield arena
    arena.close()


def test_a_slot_is_readable_from_commit_to_free(arena):
    slot = arena.reserve(100)
    generation = arena.generation(slot)
    assert not arena.is_readable(slot, generation)
    arena.commit(slot, seal_of(1))
    assert arena.is_readable(slot, generation)
    assert (arena.num_bytes(slot), arena.seal(slot)) == (100, seal_of(1))
    arena.free(slot)
    assert not arena.is_readable(slot, generation)


def test_a_reused_slot_has_another_generation(arena):
    slots = [arena.reserve(8) for _ in range(4)]
    for slot in slots:
        arena.commit(slot, seal_of(slot))
    before = arena.generation(slots[2])
    arena.free(slots[2])
    assert arena.reserve(8) == slots[2]
    arena.commit(slots[2], seal_of(9))
    assert not arena.is_readable(slots[2], before)
    assert arena.is_readable(slots[2], before + 1)


def test_a_full_arena_is_an_error(arena):
    for _ in range(4):
        arena.reserve(8)
    with pytest.raises(Full, match="all 4 slots"):
        arena.reserve(8)


def test_a_block_larger_than_a_slot_is_refused(arena):
    with pytest.raises(Full, match="does not fit"):
        arena.reserve(SLOT_BYTES + 1)


def test_a_dropped_slot_stays_until_its_last_reader_is_gone(arena):
    slot = arena.reserve(8)
    arena.commit(slot, seal_of(1))
    arena.pin(slot)
    arena.pin(slot)
    arena.free(slot)
    assert (arena.state(slot), arena.num_free) == (SlotState.EVICTING, 3)
    arena.unpin(slot)
    assert arena.state(slot) is SlotState.EVICTING
    arena.unpin(slot)
    assert (arena.state(slot), arena.num_free, arena.num_pinned) == (SlotState.FREE, 4, 0)


@given(st.lists(st.tuples(st.sampled_from(["reserve", "commit", "pin", "unpin", "free"]), st.integers(0, 3)), max_size=60))
def test_states_follow_the_table_and_no_slot_is_lost(steps):
    arena = plain_arena()
    model = {slot: [SlotState.FREE, 0] for slot in range(4)}  # state, pins
    for what, slot in steps:
        state, pins = model[slot]
        if what == "reserve" and any(entry[0] is SlotState.FREE for entry in model.values()):
            model[arena.reserve(8)][0] = SlotState.WRITING
        elif what == "commit" and state is SlotState.WRITING:
            arena.commit(slot, seal_of(slot))
            model[slot][0] = SlotState.READY
        elif what == "pin" and state is SlotState.READY:
            arena.pin(slot)
            model[slot][1] += 1
        elif what == "unpin" and pins:
            arena.unpin(slot)
            model[slot][1] -= 1
            if pins == 1 and state is SlotState.EVICTING:
                model[slot][0] = SlotState.FREE
        elif what == "free" and state in (SlotState.WRITING, SlotState.READY):
            arena.free(slot)
            model[slot][0] = SlotState.EVICTING if pins else SlotState.FREE
        assert [arena.state(slot) for slot in range(4)] == [entry[0] for entry in model.values()]
        assert arena.num_free == sum(entry[0] is SlotState.FREE for entry in model.values())
        assert arena.num_pinned == sum(entry[1] > 0 for entry in model.values())


class DiesError(Exception):
    """The owner is killed."""


class MortalArena(Arena):
    """An owner that is killed before one of its stores to the slots' words."""

    stores_left = 10**9

    def _set(self, slot, index, value):
        if self.stores_left == 0:
            raise DiesError
        self.stores_left -= 1
        super()._set(slot, index, value)


@settings(max_examples=200)
@given(stores=st.integers(0, 40), choices=st.lists(st.integers(0, 3), min_size=5, max_size=30))
def test_an_owner_that_dies_between_two_stores_leaves_no_slot_that_lies(stores, choices):
    arena = plain_arena(2, MortalArena)
    arena.stores_left = stores
    told = {}  # (slot, generation) → content that a reader was promised
    number, ready = 0, []
    try:
        for choice in choices:
            if choice and ready:
                arena.free(ready.pop(0))
            number += 1
            if arena.num_free:
                slot = arena.reserve(8)
                arena.content(slot, 8)[:] = number.to_bytes(8, "little")
                told[slot, arena.generation(slot)] = number
                arena.commit(slot, seal_of(number))
                ready.append(slot)
    except DiesError:
        pass
    seen = ArenaView(arena._memory)
    for (slot, generation), number in told.items():
        if seen.is_readable(slot, generation):
            assert bytes(seen.content(slot, seen.num_bytes(slot))) == number.to_bytes(8, "little")
            assert seen.seal(slot) == seal_of(number)


def test_another_mapping_sees_blocks_and_states(shared):
    view = map_arena(shared.describe(), INCARNATION)
    assert view.nonce == NONCE
    slot = shared.reserve(5)
    view.content(slot, 5)[:] = b"block"  # the client writes, the owner decides
    assert not view.is_readable(slot, 1)
    shared.commit(slot, seal_of(3))
    assert view.is_readable(slot, 1)
    assert bytes(shared.content(slot, 5)) == b"block"


def test_another_process_maps_it_and_finds_the_nonce(shared):
    program = (
        "import sys, msgspec\n"
        "from kvstore.arena import map_arena\n"
        "from kvstore.messages import ArenaFile\n"
        "file = msgspec.json.decode(sys.argv[1], type=ArenaFile)\n"
        f"sys.stdout.buffer.write(map_arena(file, {INCARNATION}).nonce)\n"
    )
    file = msgspec.json.encode(shared.describe()).decode()
    done = subprocess.run([sys.executable, "-c", program, file], capture_output=True, check=True, timeout=60)
    assert done.stdout == NONCE


def test_a_view_outlives_its_owner(shared):
    view = map_arena(shared.describe(), INCARNATION)
    slot = shared.reserve(5)
    shared.content(slot, 5)[:] = b"block"
    shared.commit(slot, seal_of(1))
    shared.close()
    assert view.is_readable(slot, 1)
    assert bytes(view.content(slot, 5)) == b"block"


@pytest.mark.parametrize("change", [{"inode": 1}, {"num_bytes": 4096}, {"fd": 9999}, {"pid": 2**22 + 1}])
def test_a_file_that_is_not_the_one_described_is_refused(shared, change):
    file = msgspec.structs.replace(shared.describe(), **change)
    with pytest.raises(PeerUnreachable):
        map_arena(file, INCARNATION)


def test_a_file_that_its_owner_could_shrink_is_refused(shared):
    arena = shared.describe()
    unsealed = os.memfd_create("kvferry-test-unsealed")
    os.ftruncate(unsealed, arena.num_bytes)
    file = msgspec.structs.replace(arena, fd=unsealed, inode=os.fstat(unsealed).st_ino, pid=os.getpid())
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        map_arena(file, INCARNATION)
    os.close(unsealed)


def test_the_arena_of_another_incarnation_is_refused(shared):
    with pytest.raises(PeerUnreachable, match="incarnation"):
        map_arena(shared.describe(), INCARNATION + 1)


def test_memory_that_is_no_arena_is_refused():
    with pytest.raises(ProtocolError):
        ArenaView(memoryview(bytearray(8192)))
    with pytest.raises(ProtocolError):
        ArenaView(memoryview(b""))


@pytest.mark.parametrize(("slot", "num_bytes"), [(-1, 8), (4, 8), (0, SLOT_BYTES + 1), (0, -1)])
def test_no_view_goes_beyond_its_slot(arena, slot, num_bytes):
    with pytest.raises(ProtocolError):
        arena.content(slot, num_bytes)


def test_slots_are_whole_pages():
    assert [round_slot_bytes(size) for size in (1, 4096, 4097)] == [4096, 4096, 8192]


def test_a_closed_arena_leaves_no_descriptor():
    arena = create_arena(2, SLOT_BYTES, INCARNATION, NONCE)
    fd = arena.describe().fd
    arena.close()
    assert arena.describe() is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.skipif(huge_page_stock().num_free < 2, reason="no huge pages are reserved here: sysctl vm.nr_hugepages=8")
def test_an_arena_in_huge_pages_is_mapped_whole_by_its_client():
    arena = create_arena(4, SLOT_BYTES, INCARNATION, NONCE, "always")
    file = arena.describe()
    assert file.num_bytes == huge_page_stock().page_bytes > arena_bytes(4, SLOT_BYTES)
    view = map_arena(file, INCARNATION)
    assert (view.num_slots, view.nonce) == (4, NONCE)
    slot = arena.reserve(8)
    view.content(slot, 8)[:] = b"by hand!"
    assert bytes(arena.content(slot, 8)) == b"by hand!"
    arena.close()


def test_an_arena_for_which_huge_pages_are_demanded_in_vain_is_refused():
    with pytest.raises(ConfigError, match=r"kvstore\.huge_pages = always"):
        create_arena(1 << 40, SLOT_BYTES, INCARNATION, NONCE, "always")
