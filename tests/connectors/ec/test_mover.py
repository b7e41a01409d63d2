"""Embeddings to a store and back: what is withheld, missing, wrong, late, or not wanted any more."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from connectors.ec.chunks import ChunkLayout, num_chunks
from connectors.ec.jobs import Fetch, FetchEnded, FetchingMetadata, StoreSource
from connectors.ec.memory import ChunkMemory
from connectors.ec.mover import (
    OTHERS_SAVE_S,
    RETRY_S,
    CheckStored,
    EmbeddingHolder,
    EmbeddingTransfer,
    Forgotten,
    SaveEmbeddings,
)
from connectors.ec.worker import OfferEnded
from connectors.withheld import WITHHELD_S
from core.ec_connector import EmbeddingsLayout
from core.testing.clock import FakeClock
from kvstore.base import GetTicket, LookupTicket, PutTicket, StoredBlock
from kvstore.seal_check import BlockVerifier

LAYOUT = ChunkLayout(EmbeddingsLayout(4, "float32"), b"model")
NAME = bytes(range(16))
NUM_EMBEDS = 3 * 64 - 5


class SlowStore:
    """A ``BlockStore`` that answers on command."""

    def __init__(self):
        self.blocks = {}
        self.open = []
        self.released = []
        self.withheld = set()
        self.takes = True

    def lookup(self, keys):
        return self._ask(LookupTicket(keys, 0))

    def get(self, keys):
        return self._ask(GetTicket(keys, 0))

    def put(self, keys, blocks, seals):
        return self._ask(PutTicket(keys, 0, blocks=blocks, seals=seals))

    def release(self, ticket):
        self.released.append(ticket)

    def copy_out(self, block, target):
        BlockVerifier().check(block.key, block.seal, block.content)
        target[:] = block.content

    def answer(self, failure=""):
        """Answer all that is open."""
        tickets, self.open = self.open, []
        for ticket in tickets:
            ticket.failure = failure
            if not failure:
                self._fill(ticket)
            ticket.is_done = True

    def _ask(self, ticket):
        self.open.append(ticket)
        return ticket

    def _fill(self, ticket):
        match ticket:
            case LookupTicket():
                ticket.hits = [key in self.blocks for key in ticket.keys]
            case GetTicket():
                ticket.withheld = set(self.withheld)
                ticket.blocks = [
                    None if index in self.withheld or key not in self.blocks else self._stored(key)
                    for index, key in enumerate(ticket.keys)
                ]
            case PutTicket():
                ticket.stored = [self.takes] * len(ticket.keys)
                if self.takes:
                    contents = zip(ticket.keys, ticket.blocks, ticket.seals, strict=True)
                    self.blocks.update((key, (bytearray(block), seal)) for key, block, seal in contents)

    def _stored(self, key):
        content, seal = self.blocks[key]
        return StoredBlock(key, memoryview(content), seal, lambda: True)


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def store():
    return SlowStore()


@pytest.fixture
def memory():
    memory = ChunkMemory(LAYOUT, 8 * LAYOUT.chunk_bytes, 1)
    yield memory
    memory.close()


@pytest.fixture
def mover(store, memory, clock):
    return EmbeddingTransfer(store, LAYOUT, memory, EmbeddingHolder(engine_id="worker", incarnation=1), clock)


@pytest.fixture
def fetch(clock):
    return Fetch(NAME, NUM_EMBEDS, range(2, 5), StoreSource(), deadline=clock.now() + 1)


def rows():
    content = np.zeros(num_chunks(NUM_EMBEDS) * LAYOUT.chunk_bytes, dtype=np.uint8)
    content[: LAYOUT.num_bytes(NUM_EMBEDS)] = np.arange(LAYOUT.num_bytes(NUM_EMBEDS)) % 251
    return content


def run(mover, store, turns=20):
    for _ in range(turns):
        mover.step()
        store.answer()
    return mover.take_reports()


@pytest.fixture
def saved(mover, store):
    """Embeddings in the store; returns their announcement."""
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    (ended,) = run(mover, store)
    assert not mover.is_waiting
    return ended.source


def test_what_was_saved_comes_back(mover, store, memory, saved, fetch):
    mover.submit(FetchingMetadata(fetches=[fetch]))
    assert run(mover, store) == [FetchEnded(NAME)]
    assert bytes(memory.rows(2, NUM_EMBEDS)) == rows()[: LAYOUT.num_bytes(NUM_EMBEDS)].tobytes()
    assert (saved.seal.identifier, saved.seal.num_embeds, saved.connector) == (NAME, NUM_EMBEDS, "shared")
    assert len(store.released) == 1


def test_chunks_that_are_withheld_are_asked_for_again(mover, store, clock, saved, fetch):
    store.withheld = {1, 2}
    mover.submit(FetchingMetadata(fetches=[fetch]))
    assert run(mover, store) == []
    assert not mover.step(), "it asks without a pause"
    store.withheld = set()
    clock.advance(RETRY_S)
    assert run(mover, store) == [FetchEnded(NAME)]
    assert len(store.released) == 2


def test_chunks_that_are_withheld_without_an_end_are_a_miss(mover, store, clock, saved, fetch):
    store.withheld = {1, 2}
    mover.submit(FetchingMetadata(fetches=[dataclasses.replace(fetch, deadline=clock.now() + 10)]))
    assert run(mover, store) == []
    store.withheld = {0, 1}
    clock.advance(0.9 * WITHHELD_S)
    assert run(mover, store) == []
    clock.advance(0.1 * WITHHELD_S)
    (ended,) = run(mover, store)
    assert ended.error.code == "store_miss"
    mover.submit(FetchingMetadata(fetches=[dataclasses.replace(fetch, deadline=clock.now() + 10)]))
    (ended,) = run(mover, store)
    assert ended.error.code == "store_miss", "it is waited for again at once"


def test_missing_chunk_is_a_miss(mover, store, saved, fetch):
    del store.blocks[list(store.blocks)[1]]
    mover.submit(FetchingMetadata(fetches=[fetch]))
    (ended,) = run(mover, store)
    assert ended.error.code == "store_miss"


def test_wrong_byte_is_noticed(mover, store, saved, fetch):
    store.blocks[list(store.blocks)[2]][0][7] ^= 1
    mover.submit(FetchingMetadata(fetches=[fetch]))
    (ended,) = run(mover, store)
    assert ended.error.code == "digest"


def test_store_that_does_not_answer_is_waited_for_until_the_deadline(mover, store, clock, fetch):
    mover.submit(FetchingMetadata(fetches=[fetch]))
    mover.step()
    assert not mover.step()
    clock.advance(1)
    assert mover.step()
    (ended,) = mover.take_reports()
    assert ended.error.code == "deadline"
    assert len(store.released) == 1
    assert not mover.is_waiting


def test_store_that_is_gone_is_a_miss_and_gives_the_reason(mover, store, fetch):
    mover.submit(FetchingMetadata(fetches=[fetch]))
    mover.step()
    store.answer(failure="the store is unreachable")
    mover.step()
    (ended,) = mover.take_reports()
    assert ended.error.code == "store_miss"
    assert "unreachable" in ended.error.message


def test_aborted_fetch_ends_and_releases_its_source(mover, store, saved, fetch):
    mover.submit(FetchingMetadata(fetches=[fetch]))
    mover.step()
    mover.submit(FetchingMetadata(aborts=[NAME]))
    assert run(mover, store) == [FetchEnded(NAME, was_aborted=True)]
    assert len(store.released) == 1
    mover.submit(FetchingMetadata(aborts=[NAME]))
    assert run(mover, store) == []


def test_close_unpins_everything(mover, store, saved, fetch):
    mover.submit(FetchingMetadata(fetches=[fetch]))
    mover.step()
    mover.close()
    assert len(store.released) == 1


def test_store_that_takes_nothing_is_said(mover, store, clock):
    store.takes = False
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    assert run(mover, store) == []
    clock.advance(OTHERS_SAVE_S)
    (ended,) = run(mover, store)
    assert not mover.is_waiting
    assert isinstance(ended, OfferEnded)
    assert ended.error.code == "store_unavailable"


def test_a_lost_store_is_said_at_once(mover, store):
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    store.answer(failure="the store is unreachable")
    mover.step()
    (ended,) = mover.take_reports()
    assert "unreachable" in ended.error.message


def test_embeddings_that_another_worker_is_storing_count_as_stored(mover, store, clock):
    store.takes = False  # the slots are reserved for the other worker
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    assert run(mover, store) == []
    assert not mover.step(), "it asks without a pause"
    for chunk in mover._keys(NAME, NUM_EMBEDS)[:-1]:
        store.blocks[chunk] = (bytearray(), b"")
    clock.advance(RETRY_S)
    assert run(mover, store) == [], "one chunk is missing"
    store.blocks[mover._keys(NAME, NUM_EMBEDS)[-1]] = (bytearray(), b"")
    clock.advance(RETRY_S)
    (ended,) = run(mover, store)
    assert ended.source is not None
    assert mover.counts == {"stored": 1}


def test_a_full_store_is_asked_ever_less_often_and_once_more_at_the_end(mover, store, clock):
    store.takes = False
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    asked, lookup = [], store.lookup

    def count(keys):
        asked.append(clock.now())
        return lookup(keys)

    store.lookup = count
    start = clock.now()
    while clock.now() < start + OTHERS_SAVE_S - RETRY_S:
        assert run(mover, store) == []
        clock.advance(RETRY_S)
    assert 6 <= len(asked) <= 8
    store.blocks |= {chunk: (bytearray(), b"") for chunk in mover._keys(NAME, NUM_EMBEDS)}
    clock.advance(RETRY_S)
    (ended,) = run(mover, store)
    assert ended.source is not None


def test_a_save_that_waits_delays_no_other(mover, store):
    store.takes = False
    mover.submit(SaveEmbeddings(NAME, NUM_EMBEDS, rows().data))
    run(mover, store)
    store.takes = True
    mover.submit(SaveEmbeddings(NAME[::-1], NUM_EMBEDS, rows().data))
    (ended,) = run(mover, store)
    assert ended.source.seal.identifier == NAME[::-1]


def test_what_the_store_has_lost_is_forgotten(mover, store, saved):
    mover.submit(CheckStored(saved.seal))
    assert run(mover, store) == []
    store.blocks.popitem()
    mover.submit(CheckStored(saved.seal))
    assert run(mover, store) == [Forgotten(NAME)]
