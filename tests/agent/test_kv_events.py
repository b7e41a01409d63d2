"""A server's blocks get the names that a router computes for a prompt, and lost events cost hits only."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq.asyncio

from agent.kv_events import KVEventReader, RenamedBlocks, replay
from core.engine.kv_events import KVEventPublisher
from core.errors import ProtocolError
from core.kv.content_feed import ContentFeed
from core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from core.kv.hashing import BlockHasher
from router.contents.keys import prompt_chain
from tests.support.polling import until

MODEL = b"fingerprint"
TOKENS = tuple(range(500, 628))
ANY = "tcp://127.0.0.1:0"


def keys(tokens=TOKENS):
    return {value[:8] for value in prompt_chain(BlockHasher(MODEL), (*tokens, 0))}


def engine_hash(number):
    return number.to_bytes(32, "big")


def stored(first=0, last=8, *, size=16, parent=None, **fields):
    hashes = tuple(engine_hash(number) for number in range(first, last))
    parent_hash = engine_hash(first - 1) if first and parent is None else parent
    tokens = TOKENS[first * size : last * size]
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent_hash, "token_ids": tokens} | {
        "block_size": size,
        "medium": "GPU",
        **fields,
    }


def removed(*numbers, **fields):
    return {"type": "BlockRemoved", "block_hashes": [engine_hash(number) for number in numbers], "medium": "GPU", **fields}


def apply(blocks, *events):
    blocks.apply(msgspec.msgpack.encode([0.0, list(events), 0]))


@pytest.fixture
def feed():
    return ContentFeed("w", 1)


@pytest.fixture
def blocks(feed):
    return RenamedBlocks(MODEL, feed)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_blocks_get_the_names_of_the_prompt_s_prefixes(blocks, feed, size):
    apply(blocks, stored(0, 1, size=size), stored(1, 128 // size, size=size))
    assert feed.contents() == keys()
    apply(blocks, removed(128 // size - 1))
    assert feed.contents() == keys(TOKENS[: 128 - size])


def test_hashes_may_be_integers(blocks, feed):
    event = stored() | {"block_hashes": list(range(8)), "parent_block_hash": None}
    apply(blocks, event, {"type": "BlockRemoved", "block_hashes": [7], "medium": "GPU"})
    assert feed.contents() == keys(TOKENS[:112])


def test_a_cleared_cache_is_empty(blocks, feed):
    apply(blocks, stored(), {"type": "AllBlocksCleared"})
    assert feed.contents() == set()
    assert len(blocks) == 0


@pytest.mark.parametrize(
    "event",
    [
        stored(extra_keys=[["tenant"], *[None] * 7]),
        stored(lora_id=1),
        stored(medium="CPU"),
        stored(3, 5),
        stored() | {"token_ids": TOKENS[:100]},
        stored(0, 10, size=12) | {"token_ids": TOKENS[:120]},
    ],
    ids=["salt", "adapter", "host memory", "unknown parent", "missing tokens", "block size"],
)
def test_what_routers_could_not_name_is_left_out(blocks, feed, event, caplog):
    apply(blocks, event, event)
    assert feed.contents() == set()
    assert caplog.text.count("event=kv_events_left_out") == 1


def test_a_model_without_a_group_that_routers_could_name_is_said_once(blocks, feed, caplog):
    window = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    for number in range(3):
        apply(blocks, stored(group_idx=number % 2, **window))
    assert feed.contents() == set()
    assert caplog.text.count("event=kv_events_left_out") == 1
    assert "kind=sliding_window" in caplog.text


def test_only_the_first_group_with_full_attention_counts(blocks, feed):
    apply(blocks, stored(group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=64))
    apply(blocks, stored(0, 4, group_idx=1, kv_cache_spec_kind="full_attention"))
    apply(blocks, removed(0, 1, group_idx=0))
    assert feed.contents() == keys(TOKENS[:64])


def test_a_hybrid_whose_full_attention_is_followed_warns_of_nothing(blocks, feed, caplog):
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 64}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    apply(blocks, stored(0, 4, **window), stored(0, 4, **full))
    apply(blocks, stored(4, 8, **window), stored(0, 4, **full | {"medium": "CPU"}))
    assert feed.contents() == keys(TOKENS[:64])
    assert not caplog.records


def test_an_eviction_does_not_choose_the_group_that_is_followed(blocks, feed):
    """A reader that has missed the beginning may hear first that a block of another group is gone."""
    apply(blocks, removed(9, group_idx=0))
    apply(blocks, stored(group_idx=1, kv_cache_spec_kind="full_attention"))
    assert feed.contents() == keys()


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 0.0}),
        msgspec.msgpack.encode([0.0, [{}], 0]),
        msgspec.msgpack.encode([0.0, [stored() | {"token_ids": [2**31, *TOKENS[1:]]}], 0]),
        msgspec.msgpack.encode([0.0, [stored() | {"token_ids": [-(2**31) - 1, *TOKENS[1:]]}], 0]),
        msgspec.msgpack.encode([0.0, [stored() | {"block_size": 0}], 0]),
    ],
)
def test_other_bytes_are_refused(blocks, payload):
    with pytest.raises(ProtocolError, match="KV events"):
        blocks.apply(payload)


# ---- on sockets ------------------------------------------------------------------------------------------------------

NAMES = prompt_chain(BlockHasher(MODEL), (*TOKENS, 0))


def stored_here(first, last):
    parent = NAMES[first - 1] if first else None
    return BlockStored(tuple(NAMES[first:last]), parent, 16, 0, TOKENS[16 * first : 16 * last])


class Server:
    """Publishes as vLLM 0.32 does, byte for byte."""

    def __init__(self, address=ANY, replay_address=ANY):
        self.publisher = KVEventPublisher(address, "kv@w@m", replay_address=replay_address)

    def say(self, *events):
        self.publisher.publish(list(events))


@pytest.fixture
def server():
    server = Server()
    yield server
    server.publisher.close()


async def reader_of(server, blocks, feed, *, has_replay=True):
    """Return a reader that has got an event: a subscription takes a moment."""
    reader = KVEventReader(server.publisher.address, server.publisher.replay_address if has_replay else "", blocks)
    reader.start()

    def has_arrived():
        server.say(AllBlocksCleared())
        return reader._next_number > 0

    await until(has_arrived)
    server.say(stored_here(0, 2))
    await until(lambda: feed.contents() == keys(TOKENS[:32]))
    return reader


async def test_events_of_a_server_are_followed(server, blocks, feed):
    reader = await reader_of(server, blocks, feed)
    server.say(stored_here(2, 8), BlockRemoved(tuple(NAMES[6:]), 0))
    await until(lambda: feed.contents() == keys(TOKENS[:96]))
    await reader.close()


async def test_what_came_before_the_reader_is_replayed(server, blocks, feed):
    server.say(stored_here(0, 4))
    reader = KVEventReader(server.publisher.address, server.publisher.replay_address, blocks)
    reader.start()

    def is_known():
        server.say(BlockRemoved((bytes(16),), 0))
        return feed.contents() == keys(TOKENS[:64])

    await until(is_known)
    await reader.close()


async def test_a_quiet_server_is_known_at_once(server, blocks, feed):
    server.say(stored_here(0, 4))
    reader = KVEventReader(server.publisher.address, server.publisher.replay_address, blocks)
    reader.start()
    await until(lambda: feed.contents() == keys(TOKENS[:64]))
    await reader._on_frames([b"", bytes(8), reader._replayed[0]])  # it comes once more by subscription
    assert feed.contents() == keys(TOKENS[:64])
    await reader.close()


@pytest.mark.parametrize("bad", [[b"alone"], [b"", b"no number", b"payload"]])
async def test_a_replayed_message_that_is_no_batch_ends_the_replay(bad):
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        async def answer():
            peer, *_ = await socket.recv_multipart()
            await socket.send_multipart([peer, b"", bytes(8), b"first"])
            await socket.send_multipart([peer, *bad])

        async with asyncio.timeout(20):
            found, _ = await asyncio.gather(replay(context, f"tcp://127.0.0.1:{port}", 0), answer())
    assert found == [(0, b"first")]


async def test_a_replay_whose_end_was_dropped_brings_what_came(monkeypatch):
    monkeypatch.setattr("agent.kv_events.REPLAY_PAUSE_S", 0.05)
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")

        async def answer():
            peer, *_ = await socket.recv_multipart()
            await socket.send_multipart([peer, b"", bytes(8), b"first"])

        async with asyncio.timeout(20):
            found, _ = await asyncio.gather(replay(context, f"tcp://127.0.0.1:{port}", 0), answer())
    assert found == [(0, b"first")]


async def test_missed_events_are_replayed(server, blocks, feed):
    reader = await reader_of(server, blocks, feed)
    reader._next_number -= 1  # as if the last batch had not come
    blocks.clear()
    server.say(stored_here(2, 4))
    await until(lambda: feed.contents() == keys(TOKENS[:64]))
    await reader.close()


async def test_events_that_are_lost_for_good_leave_nothing_known(server, blocks, feed, caplog):
    reader = await reader_of(server, blocks, feed, has_replay=False)
    reader._next_number -= 1
    server.say(BlockRemoved(tuple(NAMES[1:2]), 0))
    await until(lambda: not feed.contents())
    assert "event=kv_events_lost" in caplog.text
    server.say(stored_here(0, 1))
    await until(lambda: feed.contents() == keys(TOKENS[:16]))
    await reader.close()


async def test_a_server_that_begins_anew_has_an_empty_cache(blocks, feed):
    reader = KVEventReader("tcp://127.0.0.1:1", "", blocks)
    for number, event in ((0, stored(0, 4)), (1, stored(4, 8)), (0, stored(0, 1))):
        await reader._on_frames([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [event], 0])])
    assert feed.contents() == keys(TOKENS[:16])
    await reader.close()


@pytest.mark.parametrize("first", [1, 2], ids=["all missed batches", "the oldest ones are forgotten"])
async def test_batches_that_a_replay_has_brought_are_no_new_server(blocks, feed, caplog, monkeypatch, first):
    """Under load a replay returns newer batches than the one that showed the gap, and they come by subscription, too."""
    events = [{"type": "AllBlocksCleared"}, *(stored(0, last) for last in range(1, 8))]
    batches = [msgspec.msgpack.encode([0.0, [happened], 0]) for happened in events]
    asked = []

    async def replay(number):
        asked.append(number)
        return list(enumerate(batches))[first:6]

    reader = KVEventReader("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", blocks)
    monkeypatch.setattr(reader, "_replay", replay)
    for number in (0, 3, 4, 5, 6, 7):
        await reader._on_frames([b"", number.to_bytes(8, "big"), batches[number]])
    assert asked == [1]
    assert caplog.text.count("event=kv_events_lost") == first - 1
    assert feed.contents() == keys(TOKENS[:112])
    await reader.close()


@pytest.mark.parametrize("bad", [0, 1], ids=["before the reader", "missed"])
async def test_what_follows_an_unreadable_batch_of_a_replay_is_known(blocks, feed, caplog, monkeypatch, bad):
    """The others come once more by subscription, and then the server falls silent."""
    batches = [msgspec.msgpack.encode([0.0, [stored(0, last)], 0]) for last in range(1, 7)]
    batches[bad] = b"bad"
    reader = KVEventReader("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", blocks)

    async def replay(number):
        return list(enumerate(batches))[number:]

    monkeypatch.setattr(reader, "_replay", replay)
    if bad == 0:
        await reader._read_past()
    for number in (0, *range(bad + 1, 6)):
        await reader._on_frames([b"", number.to_bytes(8, "big"), batches[number]])
    assert feed.contents() == keys(TOKENS[:96])
    assert len(caplog.records) == 1
    assert "event=kv_events_lost" in caplog.text
    await reader.close()


@pytest.mark.parametrize("is_kept", [True, False], ids=["dropped once", "dropped for good"])
@pytest.mark.parametrize("is_at_start", [True, False], ids=["before the reader", "missed"])
async def test_a_replay_with_holes_leaves_no_blocks_that_are_gone(blocks, feed, caplog, monkeypatch, is_kept, is_at_start):
    """A server drops batches of a replay silently, when they do not fit into its queue."""
    nothing = {"type": "BlockRemoved", "block_hashes": [], "medium": "GPU"}
    batches = [msgspec.msgpack.encode([0.0, [it], 0]) for it in (nothing, stored(0, 2), removed(1), nothing, nothing)]
    first, last, hole = 0 if is_at_start else 1, 3, 2
    asked = []

    async def replay(number):
        asked.append(number)
        is_dropped = not is_kept or len(asked) == 1
        return [item for item in list(enumerate(batches))[number : last + 1] if item[0] != hole or not is_dropped]

    reader = KVEventReader("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", blocks)
    monkeypatch.setattr(reader, "_replay", replay)
    if is_at_start:
        await reader._read_past()
    for number in (0, last + 1):
        await reader._on_frames([b"", number.to_bytes(8, "big"), batches[number]])
    assert asked == [first, hole]
    assert ("event=kv_events_lost" in caplog.text) is not is_kept
    assert feed.contents() == (keys(TOKENS[:16]) if is_kept else set())
    assert reader._next_number == len(batches)
    await reader.close()


async def test_losses_are_logged_at_most_once_a_minute(blocks, caplog):
    reader = KVEventReader("tcp://127.0.0.1:1", "", blocks)
    for number in range(1, 9, 2):
        await reader._on_frames([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([0.0, [stored(0, 1)], 0])])
    assert caplog.text.count("event=kv_events_lost") == 1
    await reader.close()
