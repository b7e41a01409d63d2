"""The conformance suite of stores: a test class to derive from.

    class TestEmbedded(StoreSuite):
        @pytest.fixture
        def store(self): ...          # an open store with an arena of NUM_SLOTS slots of BLOCK_BYTES, closed afterwards

The store may be shared with other tests, at other times: every test has block numbers of its own. Imports pytest; only tests
import this module.
"""

from __future__ import annotations

import secrets
import threading
import time
from array import array
from collections.abc import Sequence

import pytest

from core.errors import CorruptBlock, ProtocolError
from core.kv.hashing import BlockHasher
from kvstore.base import BlockStore, GetTicket, LookupTicket, PutTicket, StoredBlock, Ticket
from kvstore.key import LAYOUT_KEY_BYTES, StoreKey
from kvstore.testing.blocks import BLOCK_BYTES, LAYOUT, SealedBlock, make_block, seal_block, with_seal

NUM_SLOTS = 48
DEADLINE_S = 30.0


def wait_for(ticket: Ticket) -> None:
    """Wait until a ticket is done."""
    deadline = time.monotonic() + DEADLINE_S
    while not ticket.is_done:
        assert time.monotonic() < deadline, "the store does not answer"
        time.sleep(0.0005)


def put(store: BlockStore, blocks: Sequence[SealedBlock]) -> PutTicket:
    """Put blocks and wait."""
    keys, contents, seals = [b.key for b in blocks], [b.content for b in blocks], [b.seal for b in blocks]
    ticket = store.put(keys, contents, seals)
    wait_for(ticket)
    return ticket


def lookup(store: BlockStore, keys: Sequence[StoreKey]) -> LookupTicket:
    """Look up and wait."""
    ticket = store.lookup(keys)
    wait_for(ticket)
    return ticket


def get(store: BlockStore, keys: Sequence[StoreKey]) -> GetTicket:
    """Get and wait. Release the ticket."""
    ticket = store.get(keys)
    wait_for(ticket)
    return ticket


def copy_of(store: BlockStore, block: StoredBlock | None) -> bytes:
    """Return the checked bytes of a block."""
    assert block is not None, "the block is missing"
    target = bytearray(block.content.nbytes)
    store.copy_out(block, memoryview(target))
    return bytes(target)


def read(store: BlockStore, keys: Sequence[StoreKey]) -> list[bytes | None]:
    """Get, copy, release."""
    ticket = get(store, keys)
    copies = [None if block is None else copy_of(store, block) for block in ticket.blocks]
    store.release(ticket)
    return copies


class StoreSuite:
    """The tests. ``store`` is a fixture of the derived class."""

    @pytest.fixture
    def first(self) -> int:
        return secrets.randbits(48)

    @pytest.fixture
    def blocks(self, first: int) -> list[SealedBlock]:
        return [make_block(first + index) for index in range(4)]

    def test_what_was_put_comes_back_with_its_seal(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        assert put(store, blocks).stored == [True] * 4
        ticket = get(store, [block.key for block in blocks])
        assert [copy_of(store, found) for found in ticket.blocks] == [bytes(block.content) for block in blocks]
        assert [found.seal for found in ticket.blocks if found is not None] == [block.seal for block in blocks]
        store.release(ticket)

    def test_lookup_tells_for_each_key_whether_it_is_there(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, [blocks[0], blocks[1], blocks[3]])
        ticket = lookup(store, [block.key for block in blocks])
        assert list(ticket.hits) == [True, True, False, True]
        assert ticket.num_prefix_hits == 2

    def test_get_leaves_out_what_is_not_there(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, [blocks[0], blocks[2]])
        ticket = get(store, [block.key for block in blocks])
        assert [block is not None for block in ticket.blocks] == [True, False, True, False]
        assert ticket.num_prefix_blocks == 1
        store.release(ticket)

    def test_first_writer_wins(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        original, other = blocks[0], blocks[1]
        put(store, [original])
        rewritten = seal_block(original.key, other.content)
        assert list(put(store, [rewritten]).stored) == [True]
        assert read(store, [original.key]) == [bytes(original.content)]

    @pytest.mark.parametrize(
        "change",
        [{"block_hash": bytes(16)}, {"group_id": 1}, {"layout_version": 1}, {"digest": None}],
        ids=["hash", "group", "layout", "digest"],
    )
    def test_a_seal_that_does_not_fit_its_key_is_refused(
        self, store: BlockStore, blocks: list[SealedBlock], change: dict[str, object]
    ) -> None:
        ticket = put(store, [blocks[0], with_seal(blocks[1], **change), blocks[2]])
        assert list(ticket.stored) == [True, False, True]
        assert list(lookup(store, [block.key for block in blocks]).hits) == [True, False, True, False]

    def test_bytes_that_do_not_fit_their_seal_are_found_and_forgotten(
        self, store: BlockStore, blocks: list[SealedBlock]
    ) -> None:
        wrong = SealedBlock(blocks[0].key, blocks[1].content, blocks[0].seal)
        put(store, [wrong])
        ticket = get(store, [wrong.key])
        with pytest.raises(CorruptBlock):
            copy_of(store, ticket.blocks[0])
        store.release(ticket)
        assert store.statistics().rejected["digest"] == 1
        assert read(store, [wrong.key]) == [None]
        put(store, [blocks[0]])
        assert read(store, [blocks[0].key]) == [bytes(blocks[0].content)]

    def test_a_block_can_be_checked_where_it_lies(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, [blocks[0], SealedBlock(blocks[1].key, blocks[2].content, blocks[1].seal)])
        ticket = get(store, [blocks[0].key, blocks[1].key])
        good, bad = ticket.blocks
        assert good is not None
        assert bad is not None
        store.verify(good)
        assert good.is_current()
        with pytest.raises(CorruptBlock):
            store.verify(bad)
        store.release(ticket)

    def test_salt_keeps_tenants_apart(self, store: BlockStore) -> None:
        hasher = BlockHasher(secrets.token_bytes(16))
        tokens = array("i", range(48))
        chains = [hasher.hash_request_blocks(tokens, keys) for keys in ((), (("cache_salt", "a"),), (("cache_salt", "b"),))]
        keys = [[StoreKey(block_hash, LAYOUT, 0) for block_hash in chain] for chain in chains]
        sealed = [seal_block(key, make_block(index).content) for index, key in enumerate(keys[1])]
        put(store, sealed)
        assert lookup(store, keys[1]).num_prefix_hits == 3
        assert not any(lookup(store, keys[0] + keys[2]).hits)
        assert not any(block is not None for block in get(store, keys[2]).blocks)

    def test_groups_and_layouts_are_apart(self, store: BlockStore, first: int) -> None:
        others = [make_block(first, group_id=1), make_block(first, layout=bytes(LAYOUT_KEY_BYTES))]
        put(store, [make_block(first)])
        assert list(lookup(store, [block.key for block in others]).hits) == [False, False]
        put(store, others)
        assert read(store, [block.key for block in others]) == [bytes(block.content) for block in others]

    def test_blocks_of_several_sizes_live_together(self, store: BlockStore, first: int) -> None:
        blocks = [make_block(first + index, size) for index, size in enumerate((8, 4096, BLOCK_BYTES - 8, BLOCK_BYTES))]
        put(store, blocks)
        assert read(store, [block.key for block in blocks]) == [bytes(block.content) for block in blocks]

    def test_a_block_that_is_too_large_is_refused(self, store: BlockStore, first: int) -> None:
        large, small = make_block(first, 4 * BLOCK_BYTES), make_block(first + 1)
        assert list(put(store, [large, small]).stored) == [False, True]

    def test_pinned_blocks_stay_whatever_is_put(self, store: BlockStore, blocks: list[SealedBlock], first: int) -> None:
        put(store, blocks)
        ticket = get(store, [block.key for block in blocks])
        for start in range(100, 100 + 3 * NUM_SLOTS, 16):
            put(store, [make_block(first + start + index) for index in range(16)])
        assert [copy_of(store, found) for found in ticket.blocks] == [bytes(block.content) for block in blocks]
        store.release(ticket)

    def test_memory_makes_room_for_what_is_new(self, store: BlockStore, first: int) -> None:
        for start in range(0, 3 * NUM_SLOTS, 16):
            assert all(put(store, [make_block(first + start + index) for index in range(16)]).stored)

    def test_one_client_cannot_pin_everything(self, store: BlockStore, first: int) -> None:
        sealed = [make_block(first + index) for index in range(NUM_SLOTS)]
        put(store, sealed)
        tickets = [get(store, [block.key]) for block in sealed]
        assert all(put(store, [make_block(first + 1000 + index)]).stored == [True] for index in range(4))
        for ticket in tickets:
            store.release(ticket)

    def test_release_twice_or_early_is_no_error(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, blocks)
        keys = [block.key for block in blocks]
        ticket = get(store, keys)
        store.release(ticket)
        store.release(ticket)
        for _ in range(5):
            store.release(store.get(keys))
        assert read(store, keys) == [bytes(block.content) for block in blocks]

    def test_the_source_may_change_when_a_put_is_done(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        source = bytearray(blocks[0].content)
        put(store, [SealedBlock(blocks[0].key, memoryview(source), blocks[0].seal)])
        source[:] = bytes(len(source))
        assert read(store, [blocks[0].key]) == [bytes(blocks[0].content)]

    def test_calls_without_keys_are_answered(self, store: BlockStore) -> None:
        assert lookup(store, []).num_prefix_hits == 0
        assert get(store, []).num_prefix_blocks == 0
        assert list(put(store, []).stored) == []

    def test_a_block_in_pieces_is_refused(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        with pytest.raises(ProtocolError):
            store.put([blocks[0].key], [memoryview(bytearray(2 * BLOCK_BYTES))[::2]], [blocks[0].seal])

    def test_several_threads_may_call_at_once(self, store: BlockStore, first: int) -> None:
        failures: list[BaseException] = []

        def work(start: int) -> None:
            try:
                for index in range(8):
                    block = make_block(first + 10_000 + start * 100 + index)
                    put(store, [block])
                    copies = read(store, [block.key])
                    assert copies in ([bytes(block.content)], [None])  # other tests may have evicted it
            except BaseException as error:  # raised again on the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    def test_statistics_count_what_was_done(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, blocks)
        lookup(store, [block.key for block in blocks])
        read(store, [blocks[0].key])
        counted = store.statistics()
        assert (counted.put_blocks, counted.put_bytes) == (4, 4 * BLOCK_BYTES)
        assert (counted.lookups, counted.lookup_keys, counted.lookup_hits) == (1, 4, 4)
        assert (counted.got_blocks, counted.got_bytes) == (1, BLOCK_BYTES)

    def test_a_closed_store_answers_with_misses(self, store: BlockStore, blocks: list[SealedBlock]) -> None:
        put(store, blocks)
        store.close()
        store.close()
        assert not store.is_connected
        assert not any(lookup(store, [blocks[0].key]).hits)
        assert get(store, [blocks[0].key]).blocks == [None]
