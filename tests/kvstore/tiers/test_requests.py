"""Effects of the tiers below a worker's store on requests: damage is found, counted and recomputed; tenants stay apart."""

import pytest
import redis

from connectors.store.shared import store_connector
from connectors.testing.connector_pair import PROMPT
from connectors.testing.contexts import connector_context
from connectors.testing.tier_suite import FULL_BLOCKS, TierWorker
from core.config_workers import KVStoreSection
from core.kv.seals import SEAL_BYTES
from kvstore.segment_file import PAGE_BYTES, RECORD_HEADER_BYTES
from kvstore.tiers.redis_tier import PREFIX


class Worker(TierWorker):
    """A worker with a store of its own."""

    def __init__(self, name, **settings):
        self.context = connector_context(
            "prefill", engine_id=name, incarnation=5, kvstore=KVStoreSection(memory_bytes=4 << 20, **settings)
        )
        super().__init__(name, store_connector(self.context))

    async def __aenter__(self):
        await self.connector.start()
        return self

    async def __aexit__(self, *_):
        await self.close()

    @property
    def num_corrupt(self):
        return sum(
            sample.value
            for metric in self.context.metrics.collect()
            for sample in metric.samples
            if sample.name == "kvferry_kvstore_tier_corrupt_blocks_total"
        )


async def compute_again_what_is_corrupt(worker):
    """Run a prompt of which one block is damaged below: what does not come is computed, and stored in place of the bad one."""
    worker.engine.recomputes = True
    request = await worker.start("again", PROMPT)
    await worker.ended("again")
    assert worker.num_corrupt == 1
    assert worker.engine.loads["again"].error is not None
    assert worker.engine.loads["again"].usage.verified_blocks < FULL_BLOCKS
    worker.engine.admit(request)
    worker.engine.compute_rest(request)
    assert worker.engine.has_content(request)  # every byte is what it must be
    worker.engine.finish(request)
    await worker.saved()
    worker.forget()
    worker.engine.finish(await worker.run("once more", PROMPT))
    assert (worker.num_loaded("once more"), worker.num_corrupt) == (FULL_BLOCKS, 1)
    worker.assert_is_empty()


async def test_corruption_on_disk_is_found_counted_and_computed_again(tmp_path):
    async with Worker("first", disk_path=str(tmp_path)) as worker:
        await worker.save("a", PROMPT)
    async with Worker("second", disk_path=str(tmp_path)) as worker:
        (path,) = tmp_path.glob("segment-*.kv")
        with path.open("r+b") as file:  # opened before: a start would notice it
            file.seek(PAGE_BYTES + RECORD_HEADER_BYTES + 1000)
            file.write(b"\xff\x00\xff")
        await compute_again_what_is_corrupt(worker)


@pytest.mark.parametrize("offset", [20, SEAL_BYTES + 1000], ids=["seal", "content"])
async def test_corruption_in_redis_is_found_counted_and_computed_again(redis_process, offset):
    async with Worker("first", redis_url=redis_process.url) as worker:
        await worker.save("a", PROMPT)
    with redis.Redis.from_url(redis_process.url) as client:
        keys = client.keys(PREFIX + b"*")
        assert len(keys) == FULL_BLOCKS
        client.setrange(keys[0], offset, b"\xff\x00\xff")
    async with Worker("second", redis_url=redis_process.url) as worker:
        await compute_again_what_is_corrupt(worker)


async def test_a_tenant_finds_nothing_of_another_in_redis(redis_process):
    async with Worker("first", redis_url=redis_process.url) as worker:
        await worker.save("a", PROMPT, cache_salt="one")
    async with Worker("second", redis_url=redis_process.url) as worker:
        for request_id, salt, num_loaded in (("b", "two", 0), ("c", "", 0), ("d", "one", FULL_BLOCKS)):
            worker.engine.finish(await worker.run(request_id, PROMPT, salt))
            assert worker.num_loaded(request_id) == num_loaded
            await worker.saved()
