"""The connector with the real server: what one engine saves another loads, byte for byte, or computes itself.

The engines' model is a hash of its own KV cache, so that any wrong byte shows in the tokens, which ``HashEngine.run`` checks.
"""

from __future__ import annotations

import asyncio

import pytest

from connectors.lmcache.staging import SHM_FOLDER
from connectors.lmcache.wire import RequestType
from core.errors import PeerUnreachable
from core.request import NewRequest, Request
from core.testing.hash_model import HashAttention, expected_kv, expected_tokens
from core.wire.sampling import SamplingParams
from tests.connectors.lmcache.conftest import is_idle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio]

CHUNK = 64  # tokens, the server's
BLOCK = 32
PROMPT = list(range(1000, 1300))  # four chunks and a part of one
OTHER = list(range(5000, 5300))


async def test_what_one_engine_saves_another_loads_byte_for_byte(start_engine):
    async with start_engine() as writer, start_engine() as reader:
        assert await writer.run("a", PROMPT) is None
        await writer.settled()
        reader.add("b", PROMPT)
        await reader.until(lambda: reader.core.scheduler.running)
        block_ids = reader.manager.get_block_ids("b")[0]
        loaded = expected_kv(PROMPT[: 4 * CHUNK])
        assert reader.model.rows[block_ids].tobytes()[: len(loaded)] == loaded
        await reader.until(lambda: "b" in reader.ended)
        reader.check("b", PROMPT)
        assert reader.usage["b"].transferred_tokens == 4 * CHUNK
        assert reader.usage["b"].verified_blocks == 4 * CHUNK // BLOCK
        await reader.settled()


async def test_a_common_prefix_is_loaded_in_whole_chunks(start_engine):
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT)
        await writer.settled()
        usage = await reader.run("b", [*PROMPT[: 2 * CHUNK + 2], *OTHER])
        assert usage.transferred_tokens == 2 * CHUNK
        await reader.settled()


async def test_local_hits_in_the_middle_of_a_chunk_are_left_alone(start_engine):
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT)
        await writer.settled()
        await reader.run("first", PROMPT[: CHUNK + BLOCK])  # three blocks stay, half of the second chunk
        hits, _ = reader.manager.get_computed_blocks(Request(NewRequest(**_fields(PROMPT)), reader.hasher))
        before = {block_id: reader.model.read_block(block_id) for block_id in hits.get_block_ids()[0]}
        assert len(before) == 3
        usage = await reader.run("second", PROMPT)
        assert usage.transferred_tokens == 4 * CHUNK - CHUNK - BLOCK
        assert usage.transferred_bytes == 5 * BLOCK * 8
        assert {block_id: reader.model.read_block(block_id) for block_id in before} == before
        await reader.settled()


async def test_a_second_turn_loads_the_output_of_the_first(start_engine):
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT, num_tokens=100)
        await writer.settled()
        conversation = [*PROMPT, *expected_tokens(PROMPT, 100), 1, 2, 3]
        usage = await reader.run("b", conversation)
        assert usage.transferred_tokens == 399 // CHUNK * CHUNK  # the last token was sampled, not computed
        await reader.settled()


async def test_prompts_alone_are_saved_if_output_is_not_wanted(start_engine):
    async with start_engine(save_decode_cache=False) as writer, start_engine() as reader:
        await writer.run("a", PROMPT, num_tokens=100)
        await writer.settled()
        usage = await reader.run("b", [*PROMPT, *expected_tokens(PROMPT, 100)])
        assert usage.transferred_tokens == 4 * CHUNK


async def test_a_tenant_finds_only_what_is_its_own(start_engine):
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT, cache_salt="tenant/1@x")
        await writer.settled()
        assert await reader.run("other", PROMPT, cache_salt="tenant/2@x") is None
        assert await reader.run("nobody", PROMPT) is None
        await reader.settled()
    async with start_engine() as reader:
        usage = await reader.run("same", PROMPT, cache_salt="tenant/1@x")
        assert usage.transferred_tokens == 4 * CHUNK


async def test_another_model_finds_nothing(start_engine, settings):
    async with start_engine() as writer:
        await writer.run("a", PROMPT)
        await writer.settled()
        stranger = type(writer)(settings, b"another model", 9)
        await stranger.connector.start()
        assert await stranger.run("b", PROMPT) is None
        await stranger.connector.stop()


async def test_many_requests_at_once_keep_their_bytes_apart(start_engine):
    prompts = {f"r{n}": [*PROMPT[: CHUNK * (n % 4)], *range(4000 * n, 4000 * n + 150)] for n in range(12)}
    async with start_engine() as writer, start_engine() as reader:
        for engine in (writer, reader):
            for request_id, prompt in prompts.items():
                engine.add(request_id, prompt)
            await engine.until(lambda engine=engine: engine.ended.keys() == prompts.keys())
            for request_id, prompt in prompts.items():
                engine.check(request_id, prompt)
            await engine.settled()
        assert reader.counts()["loads"] >= 11


async def test_preempted_requests_are_looked_up_again(start_engine):
    async with start_engine(num_blocks=24) as engine:
        prompts = {name: [seed + token for token in range(200)] for name, seed in (("a", 0), ("b", 1000), ("c", 2000))}
        for request_id, prompt in prompts.items():
            engine.add(request_id, prompt, num_tokens=120)
        await engine.until(lambda: engine.ended.keys() == prompts.keys())
        assert engine.core.stats.num_preemptions
        for request_id, prompt in prompts.items():
            engine.check(request_id, prompt)
        counts = engine.counts()
        assert counts.get("lookup_hits", 0) + counts.get("lookup_misses", 0) > len(prompts)
        await engine.settled()


# ---- several KV cache groups -------------------------------------------------------------------------------------------

LONG = list(range(2000, 2700))
HYBRIDS = {
    "windows": (HashAttention(), HashAttention(window=100), HashAttention(window=100)),
    "a full group between windows": (HashAttention(window=100), HashAttention(), HashAttention(window=90)),
    "a window below a chunk": (HashAttention(window=20), HashAttention()),
    "windows of two sizes": (HashAttention(window=150), HashAttention(window=40), HashAttention()),
    "local chunks": (HashAttention(chunk=128), HashAttention()),
    "nothing but windows": (HashAttention(window=70),),
}


@pytest.mark.parametrize("attentions", HYBRIDS.values(), ids=HYBRIDS)
async def test_each_group_gets_back_what_the_next_token_needs(start_engine, attentions):
    async with start_engine(attentions=attentions) as writer:
        await writer.run("a", LONG)
        await writer.settled()
        for num_common in (700, 640, 300):
            async with start_engine(attentions=attentions) as reader:
                usage = await reader.run("b", [*LONG[:num_common], *OTHER[:50]])
                assert usage.transferred_tokens == num_common // CHUNK * CHUNK
                assert not usage.fallback_reason
                await reader.settled()


@pytest.mark.parametrize("attentions", HYBRIDS.values(), ids=HYBRIDS)
async def test_s4_what_windows_have_left_behind_is_not_saved_as_something(start_engine, raw_client, attentions):
    """Saved from local hits: windowed groups have null blocks there. A shorter prompt must not take these for its own."""
    async with start_engine(attentions=attentions) as writer:
        await writer.run("a", LONG)
        await writer.settled()
        raw_client.clear()
        await writer.run("b", [*LONG, 1, 2, 3])
        await writer.settled()
        for num_common in (300, 130, 700):
            async with start_engine(attentions=attentions) as reader:
                usage = await reader.run("c", [*LONG[:num_common], *OTHER[:50]])
                assert usage is None or not usage.fallback_reason
                await reader.settled()


# ---- what the server remembers of us ---------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before the answer", "before admission", "while loading", "while running"])
async def test_an_abort_leaves_neither_locks_nor_sessions(start_engine, server_status, moment):
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT)
        await writer.settled()
        reader.add("b", PROMPT, num_tokens=50)
        reader.step()
        if moment == "before admission":
            await reader.answered()
        elif moment == "while loading":
            await reader.until(lambda: reader.core.stats.num_loading)
        elif moment == "while running":
            await reader.until(lambda: reader.core.scheduler.running)
        reader.core.abort_requests(["b"])
        await reader.settled()
        await until_idle(reader, server_status)


async def test_a_worker_that_stops_with_a_save_under_way_leaves_no_session(start_engine, server_status):
    async with start_engine() as observer:
        for number in range(10):
            async with start_engine() as engine:
                await engine.run("a", [number, *range(900)])
        await until_idle(observer, server_status)


async def test_a_worker_that_stops_after_it_has_left_a_slow_server_leaves_nothing(start_engine, lmcache_server, server_status):
    async with start_engine() as writer:
        try:
            async with start_engine(request_timeout_s=1.0) as reader:
                await find_what_is_saved(writer, reader)
                lmcache_server.freeze()
                await until_left(reader)
        finally:
            lmcache_server.thaw()
        await writer.until(lambda: writer.connector.is_connected)
        await until_idle(writer, server_status)


async def test_a_server_that_was_slow_for_a_while_keeps_no_locks_and_no_sessions(start_engine, lmcache_server, server_status):
    async with start_engine() as writer, start_engine(request_timeout_s=1.0) as reader:
        await find_what_is_saved(writer, reader)
        lmcache_server.freeze()
        try:
            await until_left(reader)
        finally:
            lmcache_server.thaw()
        await reader.until(lambda: reader.connector.is_connected)
        await until_idle(reader, server_status)
        await reader.until(lambda: "b" in reader.ended)


async def test_no_session_name_is_ever_used_twice(start_engine):
    async with start_engine(num_blocks=24) as engine:
        seen: list[str] = []
        look_up = engine.connector.server.look_up
        engine.connector.server.look_up = lambda lookup: (seen.append(lookup.span.session_id), look_up(lookup))[1]
        for round_number in range(3):
            for name in ("a", "b", "c"):
                engine.add(name, [ord(name) * 100 + token for token in range(200)], num_tokens=120)
            await engine.until(lambda: len(engine.ended) == 3)
            engine.ended.clear()
            assert len(seen) >= 3 * (round_number + 1)
        assert engine.core.stats.num_preemptions
        assert len(set(seen)) == len(seen)


# ---- silently wrong KV: the four ways of the server ------------------------------------------------------------------


async def test_s1_blocks_filed_under_another_prompts_key_are_refused(start_engine, raw_client):
    """A session name used twice: the server believes that the new tokens are the old ones."""
    raw_client.call(RequestType.LOOKUP, raw_client.key("s", PROMPT[:256], None), 1)
    raw_client.call(RequestType.QUERY_PREFETCH_STATUS, "s")
    pages = raw_client.staging.take_to_save(8)
    raw_client.fill(pages, PROMPT[:256])
    assert raw_client.store("s", PROMPT[:256], pages)  # the server has hashed this prompt in this session now
    raw_client.clear()
    raw_client.fill(pages, OTHER[:256])
    assert raw_client.store("s", OTHER[:256], pages)
    async with start_engine() as engine:
        usage = await engine.run("a", PROMPT)  # the server has something for it: the other prompt's KV
        assert usage.fallback_reason == "stale"
        assert usage.transferred_tokens == 0
        assert engine.counts()["failed_loads_stale"] == 1
        await engine.settled()


async def test_s2_a_list_that_is_too_short_is_refused_by_the_server(start_engine, raw_client):
    pages = raw_client.staging.take_to_save(8)
    raw_client.fill(pages, PROMPT[:256])
    assert not raw_client.store("s", PROMPT[:256], pages[:3])
    async with start_engine() as engine:
        assert await engine.run("a", PROMPT) is None


async def test_s3_blocks_may_be_reused_while_the_server_still_has_to_read_them(start_engine, lmcache_server):
    async with start_engine(num_blocks=16, request_timeout_s=20.0) as writer, start_engine(request_timeout_s=20.0) as reader:
        writer.add("a", PROMPT)
        await writer.until(lambda: writer.core.scheduler.running)  # looked up
        lmcache_server.freeze()
        try:
            await writer.until(lambda: "a" in writer.ended)
            pool = writer.manager.block_pool
            await writer.until(lambda: not writer.core.has_requests())
            writer.model.rows[1:] = 0xAB  # the next owner of the blocks
            assert pool.num_free_blocks == pool.num_usable_blocks
        finally:
            lmcache_server.thaw()
        await writer.settled()
        assert writer.counts()["saved_tokens"] == 4 * CHUNK
        usage = await reader.run("b", PROMPT)
        assert usage.transferred_tokens == 4 * CHUNK


async def test_s4_pages_that_stand_for_no_block_are_refused(start_engine, raw_client):
    pages = raw_client.staging.take_to_save(8)
    raw_client.fill(pages, PROMPT[:256])
    raw_client.staging.rows[0] = 0xEE
    assert raw_client.store("s", PROMPT[:256], [*pages[:5], 0, pages[6], 0])  # of a chunk of them it would keep nothing
    async with start_engine() as engine:
        usage = await engine.run("a", PROMPT)
        assert usage.transferred_tokens == 5 * BLOCK
        assert usage.fallback_reason == "stale"
        await engine.settled()


@pytest.mark.parametrize("where", [0, 100, 255])
async def test_a_flipped_bit_is_found_and_what_precedes_it_is_used(start_engine, raw_client, where):
    pages = raw_client.staging.take_to_save(8)
    raw_client.fill(pages, PROMPT[:256])
    raw_client.staging.rows[pages[5], where] ^= 16
    assert raw_client.store("s", PROMPT[:256], pages)
    async with start_engine() as engine:
        usage = await engine.run("a", PROMPT)
        assert usage.fallback_reason == "digest"
        assert usage.transferred_tokens == 5 * BLOCK
        assert engine.counts()["failed_loads_digest"] == 1
        await engine.settled()


async def test_blocks_of_another_place_in_the_prompt_are_refused(start_engine, raw_client):
    pages = raw_client.staging.take_to_save(8)
    raw_client.fill(pages, PROMPT[:256])
    assert raw_client.store("s", PROMPT[:256], [*pages[:2], *reversed(pages[2:])])
    async with start_engine() as engine:
        usage = await engine.run("a", PROMPT)
        assert usage.transferred_tokens == 2 * BLOCK
        assert usage.fallback_reason == "stale"


# ---- a server that forgets, is full, hangs, or dies --------------------------------------------------------------------


async def test_what_is_gone_between_lookup_and_load_is_computed(start_engine, raw_client):
    async with start_engine() as writer, start_engine() as reader:
        await find_what_is_saved(writer, reader)
        raw_client.clear()
        await reader.until(lambda: "b" in reader.ended)
        reader.check("b", PROMPT)
        assert reader.usage["b"].fallback_reason == "store_miss"
        await reader.settled()


async def test_a_full_server_costs_hits_and_nothing_else(start_engine, full_server):
    """It says that it has kept what it has not; and it is used again when it has room."""
    async with start_engine() as writer, start_engine() as reader:
        await writer.run("a", PROMPT)
        await writer.settled()
        assert writer.counts()["saved_tokens"] == 4 * CHUNK, "so it says"
        assert await reader.run("b", PROMPT) is None
        assert reader.counts()["lookup_misses"] == 1
        full_server()
        await writer.run("c", [*OTHER, 1])
        await writer.settled()
        assert (await reader.run("d", [*OTHER, 2])).transferred_tokens == 4 * CHUNK
        await reader.settled()


async def test_memory_that_is_not_there_costs_hits_and_nothing_else(start_engine):
    async with start_engine(staging_bytes=500) as engine:
        assert not engine.connector.is_connected
        assert await engine.run("a", PROMPT) is None
        await engine.settled()


async def test_nothing_has_a_name_in_shared_memory_once_the_server_has_mapped_it(start_engine):
    async with start_engine() as engine:
        assert not (SHM_FOLDER / engine.connector.scheduler.server.staging.pages.shm_name).exists()
        assert (await engine.run("a", PROMPT)) is None
        await engine.settled()
        assert engine.counts()["saved_tokens"] == 4 * CHUNK


async def test_a_frozen_server_stops_nobody_and_is_used_again(start_engine, lmcache_server):
    async with start_engine(request_timeout_s=1.0, lookup_timeout_s=0.5) as engine:
        await engine.run("before", PROMPT)
        await engine.settled()
        old = engine.connector.scheduler.server
        lmcache_server.freeze()
        try:
            assert await engine.run("lookup", OTHER) is None
            await engine.until(lambda: not engine.connector.is_connected)
            assert await engine.run("without", [*OTHER, 1]) is None
        finally:
            lmcache_server.thaw()
        await engine.until(lambda: engine.connector.is_connected)
        new = engine.connector.scheduler.server
        assert new is not old
        assert new.staging is not old.staging, "memory that the server may still write is not used again"
    async with start_engine() as reader:
        assert (await reader.run("after", PROMPT)).transferred_tokens == 4 * CHUNK


async def test_a_worker_may_stop_in_the_moment_in_which_the_server_is_lost(start_engine, monkeypatch):
    async with start_engine() as engine:
        connector, server = engine.connector, engine.connector.server

        async def lose(_timeout_s: float) -> None:
            server.leave(PeerUnreachable("lost"))

        monkeypatch.setattr(server, "say_goodbye", lose)
        assert connector.is_connected
        await asyncio.wait_for(connector.stop(), 10.0)
        assert not connector.is_connected


async def test_a_load_that_a_frozen_server_does_not_end_is_computed(start_engine, lmcache_server):
    async with start_engine() as writer, start_engine(request_timeout_s=1.0) as reader:
        await find_what_is_saved(writer, reader)
        lmcache_server.freeze()
        try:
            await reader.until(lambda: "b" in reader.ended)
        finally:
            lmcache_server.thaw()
        reader.check("b", PROMPT)
        assert reader.usage["b"].fallback_reason == "peer_lost"
        await reader.until(lambda: reader.connector.is_connected)
        await reader.settled()


async def test_a_killed_server_is_noticed_and_its_successor_used(start_engine, lmcache_server):
    """The last of the file: it costs a start of the server."""
    async with start_engine() as writer, start_engine() as reader:
        await find_what_is_saved(writer, reader)
        lmcache_server.kill()
        await reader.until(lambda: "b" in reader.ended, timeout_s=10.0)
        reader.check("b", PROMPT)
        assert reader.usage["b"].fallback_reason == "peer_lost"
        await writer.until(lambda: not writer.connector.is_connected)
        assert await writer.run("without", OTHER) is None
        await asyncio.to_thread(lmcache_server.start)
        for engine in (writer, reader):
            await engine.until(lambda engine=engine: engine.connector.is_connected)
        await writer.run("c", [*OTHER, 7])  # its memory is gone: saved anew, from local hits
        await writer.settled()
        assert (await reader.run("d", OTHER)).transferred_tokens == 4 * CHUNK
        await reader.settled()


async def find_what_is_saved(writer, reader) -> None:
    """Have one engine save a prompt, and the other ask for it as "b": it has the answer, and its load has not begun."""
    await writer.run("a", PROMPT)
    await writer.settled()
    reader.add("b", PROMPT)
    reader.step()
    await reader.answered()


async def until_left(engine) -> None:
    """Wait until an engine has left the server, without a step, which would begin the load."""
    async with asyncio.timeout(30.0):
        while engine.connector.is_connected:  # noqa: ASYNC110 - the connector's own tasks go on
            await asyncio.sleep(0.05)


async def until_idle(engine, server_status) -> None:
    """Wait until the server holds no lock and no session."""
    await engine.until(lambda: is_idle(server_status()))


def _fields(prompt: list[int]) -> dict[str, object]:
    return {"request_id": "asked", "prompt_token_ids": prompt, "sampling": SamplingParams()}
