"""The arena: slots for blocks in shared memory. Every process that maps it can check the state of a slot at any moment.

This module owns the layout of the memory, the states of the slots and the check of a mapping; it knows no policies, tiers or
messages. One process, the owner, changes states and counts pins. Clients map the memory, read the slots of their gets, and
write only slots that were reserved for them. Pins are not in shared memory, because the count of a reader that died would stay.

    header  magic: u64 | version: u64 | incarnation: u64 | slot_bytes: u64 | num_slots: u64 | nonce[32]            one page
    slots   word: u64 | num_bytes: u64 | ... | seal[64]                                             128 bytes per slot
    blocks  slot_bytes per slot, from a page's beginning

    word  = generation << 2 | state
    FREE -> WRITING (generation + 1) -> READY -> FREE        READY -> EVICTING -> FREE: dropped while pinned

Each state change is one aligned 8-byte store of the slot's word. Seal, size and content are written before it, while the state
forbids reading, so an owner that dies between two stores leaves no inconsistent slot. A reader gets slot and generation,
copies, and reads the word again: if it is still READY in this generation, the bytes are those of the block. This order of
stores holds on x86; other CPUs need fences.

A client opens the memory as ``/proc/<pid>/fd/<n>`` and returns the nonce in its header. The nonce proves that the memory is
shared, which equal host names do not. Sources: memfd_create(2), proc_pid_fd(5).
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum

from core.config_types import HugePages
from core.errors import Full, PeerUnreachable, ProtocolError
from core.kv.seals import SEAL_BYTES
from core.memory_file import create_memory_file
from core.sealed_size import cannot_shrink
from kvstore.messages import ArenaFile

NONCE_BYTES = 32
PAGE_BYTES = 4096

_MAGIC = 0x31414E45_5241464B  # "KFARENA1"
_VERSION = 1
_HEADER = struct.Struct(f"<5Q{NONCE_BYTES}s")
_SLOT_RECORD_BYTES = 128
_WORDS_PER_RECORD = _SLOT_RECORD_BYTES // 8
_SEAL_OFFSET = 64
_STATE_BITS = 2


class SlotState(IntEnum):
    """The state of a slot."""

    FREE = 0
    WRITING = 1  # reserved: one writer, no readers
    READY = 2
    EVICTING = 3  # no new readers; free when the last pin is gone


def slot_word(generation: int, state: SlotState) -> int:
    """Return the word of a slot in this generation and state."""
    return generation << _STATE_BITS | state


def arena_bytes(num_slots: int, slot_bytes: int) -> int:
    """Return the size of the memory of an arena."""
    return _blocks_offset(num_slots) + num_slots * slot_bytes


def round_slot_bytes(block_bytes: int) -> int:
    """Return the size of a slot for blocks of this size: whole pages."""
    return -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class ArenaView:
    """An arena as a client maps it.

    Raises: ProtocolError if the memory is no arena.
    """

    def __init__(self, memory: memoryview) -> None:
        if memory.nbytes < PAGE_BYTES:
            raise ProtocolError(f"{memory.nbytes} bytes are no arena")
        magic, version, incarnation, slot_bytes, num_slots, nonce = _HEADER.unpack_from(memory)
        if (magic, version) != (_MAGIC, _VERSION):
            raise ProtocolError(f"the memory is no arena of version {_VERSION}")
        if memory.nbytes < arena_bytes(num_slots, slot_bytes):
            raise ProtocolError(f"an arena of {num_slots} slots of {slot_bytes} bytes does not have {memory.nbytes} bytes")
        self.incarnation: int = incarnation
        self.slot_bytes: int = slot_bytes
        self.num_slots: int = num_slots
        self.nonce: bytes = nonce
        self._memory = memory
        self._words = memory[PAGE_BYTES : _blocks_offset(num_slots)].cast("Q")
        self._blocks = memory[_blocks_offset(num_slots) :]

    @property
    def memory(self) -> memoryview:
        """The whole memory: header, slots, blocks."""
        return self._memory

    def word(self, slot: int) -> int:
        """Return the word of a slot: generation and state."""
        return self._words[slot * _WORDS_PER_RECORD]

    def state(self, slot: int) -> SlotState:
        """Return the state of a slot."""
        return SlotState(self.word(slot) & ((1 << _STATE_BITS) - 1))

    def generation(self, slot: int) -> int:
        """Return how often a slot has been reserved."""
        return self.word(slot) >> _STATE_BITS

    def is_readable(self, slot: int, generation: int) -> bool:
        """Return whether a slot still holds its content of this generation."""
        return self.word(slot) == slot_word(generation, SlotState.READY)

    def num_bytes(self, slot: int) -> int:
        """Return the size of the block in a slot, at most ``slot_bytes``."""
        return min(self._words[slot * _WORDS_PER_RECORD + 1], self.slot_bytes)

    def seal(self, slot: int) -> bytes:
        """Return a copy of the seal of the block in a slot."""
        start = PAGE_BYTES + slot * _SLOT_RECORD_BYTES + _SEAL_OFFSET
        return bytes(self._memory[start : start + SEAL_BYTES])

    def content(self, slot: int, num_bytes: int) -> memoryview:
        """Return a view of the first bytes of a slot; writable where the memory is.

        Raises:
            ProtocolError: there is no such slot, or it is smaller.
        """
        if not 0 <= slot < self.num_slots or not 0 <= num_bytes <= self.slot_bytes:
            raise ProtocolError(f"no {num_bytes} bytes in slot {slot} of {self.num_slots} slots of {self.slot_bytes} bytes")
        return self._blocks[slot * self.slot_bytes : slot * self.slot_bytes + num_bytes]


class Arena(ArenaView):
    """The owner's arena: it reserves, pins and frees slots. Calls come from one thread at a time."""

    def __init__(self, memory: memoryview, memory_fd: int | None) -> None:
        super().__init__(memory)
        self._memory_fd = memory_fd
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._pins = [0] * self.num_slots

    @property
    def num_free(self) -> int:
        """Number of slots that can be reserved."""
        return len(self._free)

    @property
    def num_pinned(self) -> int:
        """Number of pinned slots."""
        return sum(count > 0 for count in self._pins)

    def describe(self) -> ArenaFile | None:
        """Return where other processes find the memory; None if it is private."""
        if self._memory_fd is None:
            return None
        status = os.fstat(self._memory_fd)
        return ArenaFile(pid=os.getpid(), fd=self._memory_fd, inode=status.st_ino, num_bytes=status.st_size)

    def reserve(self, num_bytes: int) -> int:
        """Return a slot to write. Clients cannot read it until ``commit``.

        Raises:
            Full: no slot is free, or none is large enough.
        """
        if num_bytes > self.slot_bytes:
            raise Full(f"a block of {num_bytes} bytes does not fit a slot of {self.slot_bytes} bytes")
        if not self._free:
            raise Full(f"all {self.num_slots} slots of the arena are in use")
        slot = self._free.pop()
        self._set_word(slot, self.generation(slot) + 1, SlotState.WRITING)
        self._set(slot, 1, num_bytes)
        return slot

    def resize(self, slot: int, num_bytes: int) -> None:
        """Change the size of the block that is being written to a slot."""
        assert self.state(slot) is SlotState.WRITING, f"slot {slot} is {self.state(slot).name}"
        self._set(slot, 1, num_bytes)

    def commit(self, slot: int, seal: bytes) -> None:
        """Make a written slot readable."""
        assert self.state(slot) is SlotState.WRITING, f"slot {slot} is {self.state(slot).name}"
        start = PAGE_BYTES + slot * _SLOT_RECORD_BYTES + _SEAL_OFFSET
        self._memory[start : start + SEAL_BYTES] = seal
        self._set_word(slot, self.generation(slot), SlotState.READY)

    def pin(self, slot: int) -> None:
        """Pin a READY slot: it keeps its content until it is unpinned."""
        assert self.state(slot) is SlotState.READY, f"slot {slot} is {self.state(slot).name}"
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """Remove one pin. If it was the last pin of an EVICTING slot, free the slot."""
        assert self._pins[slot] > 0, f"slot {slot} is not pinned"
        self._pins[slot] -= 1
        if not self._pins[slot] and self.state(slot) is SlotState.EVICTING:
            self._release(slot)

    def is_pinned(self, slot: int) -> bool:
        """Return whether a slot is pinned."""
        return self._pins[slot] > 0

    def free(self, slot: int) -> None:
        """Free a slot, or make it EVICTING if it is pinned: it takes no new pins, and the last ``unpin`` frees it."""
        assert self.state(slot) in (SlotState.WRITING, SlotState.READY), f"slot {slot} is {self.state(slot).name}"
        if self._pins[slot]:
            self._set_word(slot, self.generation(slot), SlotState.EVICTING)
        else:
            self._release(slot)

    def close(self) -> None:
        """Close the memory file. A mapping stays until its last view is released."""
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None

    def _release(self, slot: int) -> None:
        self._set_word(slot, self.generation(slot), SlotState.FREE)
        self._free.append(slot)

    def _set_word(self, slot: int, generation: int, state: SlotState) -> None:
        self._set(slot, 0, slot_word(generation, state))

    def _set(self, slot: int, index: int, value: int) -> None:
        self._words[slot * _WORDS_PER_RECORD + index] = value


def create_arena(num_slots: int, slot_bytes: int, incarnation: int, nonce: bytes, huge_pages: HugePages = "never") -> Arena:
    """Make an arena in a new anonymous memory file, with all pages allocated.

    Raises:
        Full: the host lacks the memory.
        ConfigError: ``huge_pages`` are required and the host has none.
    """
    num_bytes = arena_bytes(num_slots, slot_bytes)
    try:
        file = create_memory_file("kvferry-arena", num_bytes, huge_pages, "kvstore.huge_pages")
    except OSError as error:
        raise Full(f"no memory for an arena of {num_bytes} bytes: {error}") from None
    try:
        memory = file.map()
    except (OSError, ValueError) as error:
        os.close(file.fd)
        raise Full(f"no memory for an arena of {num_bytes} bytes: {error}") from None
    write_header(memory, num_slots, slot_bytes, incarnation, nonce)
    return Arena(memory, file.fd)


def write_header(memory: memoryview, num_slots: int, slot_bytes: int, incarnation: int, nonce: bytes) -> None:
    """Turn zeroed memory of ``arena_bytes`` into an arena without blocks."""
    _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, incarnation, slot_bytes, num_slots, nonce)


def map_arena(file: ArenaFile, incarnation: int) -> ArenaView:
    """Map the arena of another process of this host and check its incarnation.

    Raises:
        PeerUnreachable: it cannot be reached from here, or has another incarnation.
        ProtocolError: the memory is no arena, or its owner could shrink it.
    """
    try:
        fd = os.open(f"/proc/{file.pid}/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise PeerUnreachable(f"the arena of process {file.pid} cannot be opened: {error}") from None
    try:
        status = os.fstat(fd)
        if (status.st_ino, status.st_size) != (file.inode, file.num_bytes):
            raise PeerUnreachable(f"descriptor {file.fd} of process {file.pid} is another file than described")
        if not cannot_shrink(fd):
            raise ProtocolError(f"the arena of process {file.pid} is not sealed against shrinking")
        memory = memoryview(mmap.mmap(fd, file.num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    except (OSError, ValueError) as error:
        raise PeerUnreachable(f"the arena of process {file.pid} cannot be mapped: {error}") from None
    finally:
        os.close(fd)
    arena = ArenaView(memory)
    if arena.incarnation != incarnation:
        raise PeerUnreachable(f"the arena is of incarnation {arena.incarnation:016x} instead of {incarnation:016x}")
    return arena


def _blocks_offset(num_slots: int) -> int:
    table_bytes = num_slots * _SLOT_RECORD_BYTES
    return PAGE_BYTES + -(-table_bytes // PAGE_BYTES) * PAGE_BYTES
