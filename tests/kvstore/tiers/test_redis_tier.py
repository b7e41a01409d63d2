"""The Redis tier against a real server: blocks in other processes' reach, corruption, silence, death and return."""

import signal

import pytest
import redis

from core.errors import ConfigError, CorruptBlock, Unavailable
from core.kv.seals import SEAL_BYTES
from core.testing.clock import FakeClock
from kvstore.testing.blocks import BLOCK_BYTES, make_block
from kvstore.testing.store_suite import lookup, put, read
from kvstore.tiers.redis_tier import PAUSE_S, PREFIX, RedisTier


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def tier(redis_process, clock):
    tier = RedisTier(redis_process.url, timeout_s=0.5, clock=clock)
    yield tier
    tier.close()


def save(tier, block):
    return tier.save(block.key.pack(), block.seal, block.content)


def load(tier, block, size=BLOCK_BYTES):
    target = memoryview(bytearray(size))
    found = tier.load(block.key.pack(), target)
    return None if found is None else (bytes(target[: found.num_bytes]), found.seal)


def test_a_block_comes_back_with_its_seal(tier):
    block = make_block(1)
    assert save(tier, block)
    assert load(tier, block) == (bytes(block.content), block.seal)
    assert tier.locate([block.key.pack(), make_block(2).key.pack()]) == [True, False]
    assert tier.knows(block.key.pack()) is None


def test_what_is_not_there_is_a_miss(tier):
    assert load(tier, make_block(1)) is None


def test_value_that_does_not_fit_is_corrupt(tier):
    block = make_block(1)
    save(tier, block)
    with pytest.raises(CorruptBlock, match=f"a slot {BLOCK_BYTES - 8}"):
        load(tier, block, BLOCK_BYTES - 8)


def test_first_writer_wins(tier):
    block, other = make_block(1), make_block(2)
    save(tier, block)
    tier.save(block.key.pack(), other.seal, other.content)
    assert load(tier, block) == (bytes(block.content), block.seal)


def test_blocks_expire_if_told_to(redis_process):
    tier = RedisTier(redis_process.url, timeout_s=0.5, ttl_s=100.0)
    block = make_block(1)
    save(tier, block)
    with redis.Redis.from_url(redis_process.url) as client:
        assert 0 < client.pttl(PREFIX + block.key.pack()) <= 100_000
    tier.close()


def test_blocks_that_expire_at_once_are_not_kept_forever(redis_process):
    tier = RedisTier(redis_process.url, timeout_s=0.5, ttl_s=0.0004)
    block = make_block(1)
    save(tier, block)
    with redis.Redis.from_url(redis_process.url) as client:
        assert client.pttl(PREFIX + block.key.pack()) in (-2, 0, 1), "gone, or about to"
    tier.close()


def test_a_value_that_is_no_block_is_corrupt(tier, redis_process):
    block = make_block(1)
    with redis.Redis.from_url(redis_process.url) as client:
        client.set(PREFIX + block.key.pack(), b"short")
    with pytest.raises(CorruptBlock):
        load(tier, block)
    tier.remove(block.key.pack())
    assert tier.locate([block.key.pack()]) == [False]


def test_a_dead_server_is_left_alone_for_a_while_and_used_again(tier, redis_process, clock):
    block = make_block(1)
    redis_process.kill()
    with pytest.raises(Unavailable, match="Redis fails"):
        save(tier, block)
    with pytest.raises(Unavailable, match="a moment ago"):
        tier.locate([block.key.pack()])
    redis_process.start()
    clock.advance(PAUSE_S)
    assert save(tier, block)
    assert load(tier, block) == (bytes(block.content), block.seal)


@pytest.mark.slow
def test_a_frozen_server_costs_one_time_limit(tier, redis_process):
    redis_process.signal(signal.SIGSTOP)
    with pytest.raises(Unavailable):
        save(tier, make_block(1))
    with pytest.raises(Unavailable, match="a moment ago"):
        save(tier, make_block(1))


@pytest.mark.parametrize("reason", ["OOM", "READONLY"])
def test_a_server_that_refuses_writes_is_still_read(tier, redis_process, caplog, reason):
    kept, refused = make_block(1), make_block(2)
    assert save(tier, kept)
    with redis.Redis.from_url(redis_process.url) as client:
        if reason == "OOM":
            client.config_set("maxmemory", 1)
        else:
            client.replicaof("127.0.0.1", 1)
        assert not save(tier, refused)
        assert "kvstore_redis_refuses_blocks" in caplog.text
        assert load(tier, kept) == (bytes(kept.content), kept.seal)
        assert tier.locate([kept.key.pack(), refused.key.pack()]) == [True, False]
        client.config_set("maxmemory", 0)
        client.replicaof("no", "one")
    assert save(tier, refused)


def test_a_refused_lookup_of_one_block_costs_no_other(redis_process, caplog):
    kept, refused = make_block(1), make_block(2)
    with redis.Redis.from_url(redis_process.url) as client:
        own = b"~" + PREFIX + kept.key.pack()[:1] + b"*"
        client.execute_command("ACL", "SETUSER", "half", "on", "nopass", "+@all", own)
    tier = RedisTier(redis_process.url.replace("redis://", "redis://half@"), timeout_s=0.5)
    assert save(tier, kept)
    assert tier.locate([refused.key.pack(), kept.key.pack()]) == [False, True]
    assert "kvstore_redis_refuses_blocks" in caplog.text
    with pytest.raises(Unavailable, match="permission"):
        tier.locate([refused.key.pack()])
    assert load(tier, kept), "it is not left alone"
    tier.close()


def test_a_node_of_a_cluster_is_named(tier, caplog, monkeypatch):
    moved = "return redis.error_reply('MOVED 866 10.0.0.2:6379')"
    for command in ("set", "get"):
        monkeypatch.setattr(tier._redis, command, lambda *_, **__: tier._redis.eval(moved, 0))
    assert not save(tier, make_block(1))
    assert "a node of a Redis Cluster" in caplog.text
    with pytest.raises(Unavailable, match="a node of a Redis Cluster"):
        load(tier, make_block(1))


def test_a_replica_without_its_master_is_left_alone_for_a_while(tier, redis_process):
    with redis.Redis.from_url(redis_process.url) as client:
        client.config_set("replica-serve-stale-data", "no")
        client.replicaof("127.0.0.1", 1)
        with pytest.raises(Unavailable, match="Redis fails"):
            load(tier, make_block(1))
        with pytest.raises(Unavailable, match="a moment ago"):
            load(tier, make_block(1))


def test_two_stores_share_what_is_in_redis(redis_process, embedded_store):
    blocks = [make_block(number) for number in range(4)]
    keys = [block.key for block in blocks]
    with embedded_store(redis_url=redis_process.url) as first:
        put(first, blocks)
        assert first.flush()
    with embedded_store(redis_url=redis_process.url) as second:
        assert list(lookup(second, [*keys, make_block(9).key]).hits) == [True] * 4 + [False]
        assert read(second, keys) == [bytes(block.content) for block in blocks]


@pytest.mark.parametrize("part", ["seal", "content"])
def test_corruption_in_redis_is_found_counted_and_removed(redis_process, embedded_store, part):
    block = make_block(1)
    with embedded_store(redis_url=redis_process.url) as store:
        put(store, [block])
        store.flush()
    with redis.Redis.from_url(redis_process.url) as client:
        client.setrange(PREFIX + block.key.pack(), 20 if part == "seal" else SEAL_BYTES + 5000, b"\xff\x00\xff")
    with embedded_store(redis_url=redis_process.url) as store:
        assert read(store, [block.key]) == [None]
        assert store.workers[0].statistics().corrupt_blocks == 1
        assert list(lookup(store, [block.key]).hits) == [False]
        put(store, [block])
        assert read(store, [block.key]) == [bytes(block.content)]


def test_a_store_outlives_its_redis(redis_process, embedded_store):
    blocks = [make_block(number) for number in range(2)]
    with embedded_store(redis_url=redis_process.url) as store:
        redis_process.kill()
        assert put(store, blocks[:1]).stored == [True]
        assert read(store, [block.key for block in blocks]) == [bytes(blocks[0].content), None]
        assert list(lookup(store, [blocks[1].key]).hits) == [False]


def test_a_password_of_any_letters_is_used_as_it_is(redis_process, embedded_store):
    redis_process.kill()
    redis_process.password = "/#@:%2F?&=[ é"
    redis_process.start()
    block = make_block(1)
    with embedded_store(redis_url=redis_process.url, redis_password=redis_process.password) as store:
        put(store, [block])
        assert store.flush()
        assert store.workers[0].statistics().saved_blocks == 1
    with embedded_store(redis_url=redis_process.url, redis_password="another") as store:
        assert read(store, [block.key]) == [None]
    with embedded_store(redis_url=redis_process.url, redis_password=redis_process.password) as store:
        assert read(store, [block.key]) == [bytes(block.content)]


@pytest.mark.parametrize("mistake", ["a wrong password", "no password", "no server", "an option"])
def test_a_store_whose_redis_cannot_be_used_says_so_once_at_its_start(mistake, redis_process, embedded_store, caplog):
    redis_process.kill()
    redis_process.password = "right"
    if mistake != "no server":
        redis_process.start()
    url = redis_process.url + ("?socket_connect_timeout=-3" if mistake == "an option" else "")
    password = {"no password": "", "a wrong password": "wrong"}.get(mistake, "right")
    with embedded_store(redis_url=url, redis_password=password) as store:
        pass
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "event=kvstore_redis_unusable setting=kvstore.redis_url" in lines[0]
    assert "kvstore.redis_password, $KVFERRY_REDIS_PASSWORD" in lines[0]
    assert not any(word in lines[0] for word in ("right", "-3"))
    assert store.workers[0].statistics().errors == 0


def test_a_store_whose_redis_can_be_used_is_silent(redis_process, embedded_store, caplog):
    redis_process.kill()
    redis_process.password = "right"
    redis_process.start()
    with embedded_store(redis_url=redis_process.url, redis_password="right"):
        pass
    assert caplog.records == []


@pytest.mark.parametrize(
    "url",
    [
        "http://somewhere",
        "redis://:hunter/2@somewhere:6379/0",
        "redis://:hunter#2@somewhere:6379/0",
        "redis://user:hunter2@somewhere:6379/0",
        "redis://[hunter2@somewhere",
        "redis://somewhere:hunter2/0",
        "redis://somewhere:6379/0?password=hunter2",
    ],
)
def test_an_address_that_is_none_or_holds_a_password_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError, match="redis_url") as refusal:
        RedisTier(url, timeout_s=1.0)
    assert "hunter" not in str(refusal.value)
    assert "KVFERRY_REDIS_PASSWORD" in str(refusal.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://somewhere/0?hunter=2",
        "redis://somewhere/0?ssl_cert_reqs=none",
        "redis://somewhere/0?db=hunter",
        "redis://somewhere/0?protocol=9",
        "redis://somewhere/0?maint_notifications_config=hunter",
        "rediss://somewhere/0?ssl_cert_reqs=hunter",
        "unix:///run/redis.sock?port=1",
    ],
)
def test_an_option_that_the_library_does_not_take_is_refused_without_showing_it(url):
    with pytest.raises(ConfigError, match=r"kvstore\.redis_url: an option in it is unknown or has a wrong value") as refusal:
        RedisTier(url, timeout_s=1.0)
    assert "hunter" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["long", "list"])
def test_value_that_can_never_be_loaded_is_replaced(redis_process, embedded_store, kind):
    block = make_block(1)
    name = PREFIX + block.key.pack()
    with redis.Redis.from_url(redis_process.url) as client, embedded_store(redis_url=redis_process.url) as store:
        if kind == "long":
            client.set(name, block.seal + bytes(block.content) + bytes(8))
        else:
            client.rpush(name, "no block")
        assert read(store, [block.key]) == [None]
        assert client.exists(name) == 0
        put(store, [block])
        assert store.flush()
        assert client.get(name) == block.seal + bytes(block.content)
        assert store.workers[0].statistics().corrupt_blocks == 1
