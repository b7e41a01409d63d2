"""The memory tier finds a block to evict whenever there is one, and looks for none when there is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import Full
from kvstore.arena import arena_bytes, write_header
from kvstore.eviction import POLICIES, make_policy
from kvstore.memory import MemoryTier
from kvstore.testing.in_memory import MappableArena

NUM_SLOTS = 4
SLOT_BYTES = 4096
SEAL = bytes(64)


def make_memory(policy):
    memory = memoryview(bytearray(arena_bytes(NUM_SLOTS, SLOT_BYTES)))
    write_header(memory, NUM_SLOTS, SLOT_BYTES, 1, bytes(32))
    return MemoryTier(MappableArena(memory, None), make_policy(policy, NUM_SLOTS))


class Looks:
    """Counts the blocks that a policy asks about."""

    def __init__(self, memory, monkeypatch):
        self.num = 0
        real = memory._can_evict

        def can_evict(key):
            self.num += 1
            return real(key)

        monkeypatch.setattr(memory, "_can_evict", can_evict)


def store(memory, key, *, is_dirty=False):
    resident = memory.reserve(key, 8)
    memory.commit(resident, SEAL, is_dirty=is_dirty)
    return resident


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", ["dirty", "pinned", "written"])
def test_without_a_block_that_can_be_evicted_no_block_is_looked_at(policy, why, monkeypatch):
    memory = make_memory(policy)
    for number in range(NUM_SLOTS):
        if why == "written":
            memory.reserve(bytes([number]), 8)
            continue
        resident = store(memory, bytes([number]), is_dirty=why == "dirty")
        if why == "pinned":
            memory.pin(resident)
    looks = Looks(memory, monkeypatch)
    for number in range(100, 110):
        with pytest.raises(Full):
            memory.reserve(bytes([number]), 8)
    assert looks.num == 0


@settings(deadline=None)
@given(
    policy=st.sampled_from(list(POLICIES)),
    steps=st.lists(st.tuples(st.sampled_from(["put", "put dirty", "pin", "unpin", "clean", "drop"]), st.integers(0, 5))),
)
def test_a_block_is_evicted_whenever_one_can_be(policy, steps):
    memory, residents, pinned = make_memory(policy), {}, []
    memory.on_forgotten = residents.pop
    for what, number in steps:
        key = bytes([number])
        resident = residents.get(key)
        match what:
            case "put" | "put dirty" if resident is None:
                free = [each for each in residents.values() if not each.is_dirty and each not in pinned]
                if memory.arena.num_free or free:
                    residents[key] = store(memory, key, is_dirty=what == "put dirty")
                else:
                    with pytest.raises(Full):
                        memory.reserve(key, 8)
            case "pin" if resident is not None:
                memory.pin(resident)
                pinned.append(resident)
            case "unpin" if pinned:
                memory.unpin(pinned.pop(number % len(pinned)))
            case "clean" if resident is not None:
                memory.mark_clean(resident)
            case "drop":
                memory.drop(key)
        assert memory._num_evictable == sum(not each.is_dirty and each not in pinned for each in residents.values())
