"""A store inside the process whose tier hangs: its calls end in time, and what arrives later is kept."""

import threading
import time

import pytest

from kvstore.embedded import EmbeddedStore
from kvstore.testing.blocks import make_block
from kvstore.testing.in_memory import DictTier
from kvstore.testing.store_suite import copy_of, get, lookup, put, read

TIMEOUT_S = 0.5


class HangingTier(DictTier):
    """Keeps everybody waiting until it is ``released``. ``reached`` tells that somebody waits."""

    def __init__(self, **options):
        super().__init__(**options)
        self.reached, self.released = threading.Event(), threading.Event()

    def hang(self):
        self.reached.set()
        self.released.wait()

    def locate(self, keys):
        self.hang()
        return super().locate(keys)

    def load(self, key, target):
        self.hang()
        return super().load(key, target)

    def save(self, key, seal, block):
        self.hang()
        return super().save(key, seal, block)


@pytest.fixture(params=[False, True], ids=["known", "must be asked"])
def tier(request, monkeypatch):
    tier = HangingTier(must_be_asked=request.param)
    monkeypatch.setattr("kvstore.build.make_tiers", lambda *_: [tier])
    yield tier
    tier.released.set()


@pytest.mark.slow
def test_a_get_and_a_lookup_end_in_time_although_a_tier_hangs(tier, embedded_store):
    block = make_block(1)
    tier.values[block.key.pack()] = (block.seal, bytearray(block.content))
    with embedded_store(request_timeout_s=TIMEOUT_S) as store:
        ticket = get(store, [block.key])
        assert (ticket.blocks, ticket.failure) == ([None], "deadline")
        late = lookup(store, [make_block(2).key])
        assert list(late.hits) == [False]
        assert store.statistics().timeouts == (2 if late.failure else 1)
        assert put(store, [make_block(3)]).stored == [True]
        tier.released.set()
        assert store.flush()
        assert read(store, [block.key]) == [bytes(block.content)]
        assert store.machine.memory.arena.num_pinned == 0


def test_what_is_still_to_be_copied_when_a_store_closes_reaches_the_tier(monkeypatch, embedded_store):
    tier, block, copy_all = DictTier(), make_block(1), EmbeddedStore._copy_all

    def copy_late(store):
        while store._copies.qsize() < 2:  # the put, and the end
            time.sleep(0.001)
        copy_all(store)

    monkeypatch.setattr(EmbeddedStore, "_copy_all", copy_late)
    monkeypatch.setattr("kvstore.build.make_tiers", lambda *_: [tier])
    with embedded_store(write_policy="back") as store:
        ticket = store.put([block.key], [block.content], [block.seal])
    assert ticket.stored == [True]
    assert bytes(tier.values[block.key.pack()][1]) == bytes(block.content)


class SlowTier(DictTier):
    """Takes less than the time of a call for each block, and more for all of them."""

    def load(self, key, target):
        time.sleep(0.6 * TIMEOUT_S)
        return super().load(key, target)


@pytest.mark.slow
def test_calls_wait_for_a_tier_that_is_only_slow(monkeypatch, embedded_store):
    tier, blocks = SlowTier(), [make_block(number) for number in range(4)]
    tier.values = {block.key.pack(): (block.seal, bytearray(block.content)) for block in blocks}
    monkeypatch.setattr("kvstore.build.make_tiers", lambda *_: [tier])
    with embedded_store(request_timeout_s=TIMEOUT_S) as store:
        tickets = [store.get([block.key]) for block in blocks]
        for ticket, block in zip(tickets, blocks, strict=True):
            assert store.wait(ticket, 30.0)
            assert copy_of(store, ticket.blocks[0]) == bytes(block.content)
            store.release(ticket)
        assert store.statistics().timeouts == 0


def test_a_store_closes_although_a_tier_hangs_and_says_so(tier, embedded_store, monkeypatch, caplog):
    monkeypatch.setattr("kvstore.embedded.STOP_TIMEOUT_S", 0.1)
    block = make_block(1)
    tier.values[block.key.pack()] = (block.seal, bytearray(block.content))
    with embedded_store(request_timeout_s=60.0) as store:
        ticket = store.get([block.key])
        assert tier.reached.wait(30.0)
    assert ticket.is_done
    assert ticket.blocks == [None]
    assert "event=kvstore_tier_hangs tier=dict" in caplog.text
    assert "kvstore_unsaved" not in caplog.text


def test_a_store_that_closes_before_its_blocks_are_saved_says_how_many(tier, embedded_store, monkeypatch, caplog):
    monkeypatch.setattr("kvstore.embedded.STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kvstore.embedded.FLUSH_TIMEOUT_S", 0.1)
    with embedded_store(write_policy="back") as store:
        put(store, [make_block(1), make_block(2)])
    assert "event=kvstore_unsaved blocks=2" in caplog.text
