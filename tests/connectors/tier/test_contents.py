"""What routers learn of a tier equals what it holds."""

from __future__ import annotations

import random
import time

import pytest

from connectors.tier.contents import TierContents
from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.ids import RandomIds
from core.kv.content_feed import POOL, ContentFeed, FeedPart, key_of
from core.kv.spec import FullAttentionSpec, SlidingWindowSpec
from core.wire.contents import HOST, ContentPart
from kvstore.build import make_embedded_store
from kvstore.key import StoreKey
from kvstore.testing.blocks import BLOCK_BYTES, make_block, make_key

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_dim": 8, "dtype_bytes": 2}
NUM_BLOCKS = 8


@pytest.fixture
def feed():
    return ContentFeed("w", 1, [FeedPart(POOL, (0,)), FeedPart(ContentPart(medium=HOST, num_blocks=100))])


@pytest.fixture
def contents(feed):
    contents = TierContents(HOST)
    contents.follow(feed.publish_tier)
    return contents


@pytest.fixture
def store():
    store = make_embedded_store(KVStoreSection(memory_bytes=NUM_BLOCKS * 17 << 10), BLOCK_BYTES, SystemClock(), RandomIds())
    yield store
    store.close()


def put(store, contents, numbers):
    blocks = [make_block(number) for number in numbers]
    ticket = store.put([block.key for block in blocks], [block.content for block in blocks], [block.seal for block in blocks])
    end = time.monotonic() + 20
    while not ticket.is_done:
        assert time.monotonic() < end
        time.sleep(0.001)
    contents.store([key for key, is_stored in zip(ticket.keys, ticket.stored, strict=True) if is_stored])


def held(store):
    return {key_of(StoreKey.unpack(key).block_hash) for key in store.machine.memory._residents}


def test_of_a_store_in_this_process_exactly_its_blocks_are_known(store, contents, feed):
    contents.is_exact = store.follow_evictions(contents.remove)
    assert contents.is_exact
    draws = random.Random(5)
    for _ in range(60):
        put(store, contents, draws.sample(range(30), draws.randint(1, 3)))
        if draws.random() < 0.2:
            store.machine.memory.drop(make_key(draws.randrange(30)).pack())
        assert feed.contents(1) == held(store)
    assert store.machine.memory.num_evicted > 20


def test_without_evictions_lookups_correct_what_is_known(contents, feed):
    keys = [make_key(number) for number in range(4)]
    contents.store(keys)
    contents.answer(keys, [True, False, True, False])
    assert feed.contents(1) == {key_of(keys[0].block_hash), key_of(keys[2].block_hash)}
    contents.answer(keys, [])  # it was not answered
    assert len(feed.contents(1)) == 2


def test_only_the_group_with_full_attention_is_reported(contents, feed):
    contents.bind([SlidingWindowSpec(sliding_window=32, **SHAPE), FullAttentionSpec(**SHAPE)])
    contents.store([make_key(1, group_id=0), make_key(2, group_id=1)])
    assert feed.contents(1) == {key_of(make_key(2).block_hash)}


def test_the_oldest_names_are_forgotten_beyond_the_capacity(contents, feed):
    contents.store([make_key(number) for number in range(100)])
    contents.store([make_key(0)])
    contents.store([make_key(100), make_key(101)])
    assert feed.contents(1) == {key_of(make_key(number).block_hash) for number in range(102)} - {
        key_of(make_key(number).block_hash) for number in (1, 2)
    }
