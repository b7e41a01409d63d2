"""Tiers below the workers' pools in the cost of a placement."""

from __future__ import annotations

import pytest

from core.kv.hashing import BlockHasher
from core.wire.contents import HOST, STORE, ContentPart, ContentReport
from core.wire.messages import Generate, PrefillDone, TransferUsage
from core.wire.sampling import SamplingParams
from router.dispatch.route_costs import RouteCosts
from tests.router.dispatch.test_policy import member
from tests.router.dispatch.test_route_costs import replace_facts
from tests.support.prompt_keys import prompt_keys

PROMPT = tuple(range(2000))
KEYS = prompt_keys(BlockHasher(b"w"), PROMPT, (), 64)
OFFLOAD = ContentPart(medium=HOST, connector="offload", num_blocks=500)
SHARED = ContentPart(medium=STORE, connector="store", num_blocks=500, store="tcp://store:5580")
OTHER = ContentPart(medium=STORE, connector="store", num_blocks=500, store="tcp://other:5580")


class Bench:
    """Workers with a pool and a tier each, whose reports the test writes."""

    def __init__(self, **tiers):
        self.costs = RouteCosts()
        self.workers = [
            replace_facts(member("prefill", name), num_blocks=1000, content_parts=(ContentPart(), *parts))
            for name, parts in tiers.items()
        ]
        self.numbers = dict.fromkeys(tiers, 0)
        for worker in self.workers:
            self.costs.join(worker)
            self.report(worker.key.engine_id, 0, (), is_snapshot=True)

    def worker(self, name):
        return next(worker for worker in self.workers if worker.key.engine_id == name)

    def report(self, name, part, stored, removed=(), *, is_snapshot=False):
        stored, removed = (b"".join(key.to_bytes(8, "little") for key in keys) for keys in (stored, removed))
        report = ContentReport(
            engine_id=name,
            incarnation=1,
            number=self.numbers[name],
            part=part,
            is_snapshot=is_snapshot,
            stored=stored,
            removed=removed,
        )
        self.numbers[name] += 1
        self.costs.on_report(self.worker(name).key, report)

    def offers(self, prompt=PROMPT):
        return {key.engine_id: offer for key, offer in self.costs.offers(self.workers, prompt, (), 0.0).items()}

    def load(self, name, num_tokens, load_ms):
        """Let a worker compute a prompt with a load."""
        sampling = SamplingParams(max_tokens=5)
        message = Generate(request_id="r", prompt_token_ids=tuple(range(9000, 9500)), sampling=sampling, handoff=True)
        self.costs.on_sent(self.worker(name), message, 0.0)
        done = PrefillDone(
            request_id="r",
            choices=(),
            prefill_ms=load_ms + 50,
            num_cached_tokens=num_tokens,
            kv_transfer=TransferUsage(transport="offload", transferred_tokens=num_tokens, transfer_ms=load_ms),
        )
        self.costs.on_prefill_done(done, 1.0)


def test_the_pool_is_cheaper_than_host_memory_and_that_than_computing():
    bench = Bench(p0=(OFFLOAD,), p1=(OFFLOAD,), p2=(OFFLOAD,))
    bench.report("p0", 0, KEYS)
    bench.report("p1", 1, KEYS)
    found = bench.offers()
    assert found["p0"].own_ms < found["p1"].own_ms < found["p2"].own_ms
    assert found["p0"].hit_tokens == found["p1"].hit_tokens > found["p2"].hit_tokens == 0


def test_a_tier_continues_what_the_pool_begins():
    bench = Bench(p0=(OFFLOAD,))
    bench.report("p0", 0, KEYS[:10])
    bench.report("p0", 1, KEYS[10:20])
    assert bench.offers()["p0"].hit_tokens == 20 * 64
    bench.report("p0", 1, (), KEYS[10:11])
    assert bench.offers()["p0"].hit_tokens == 10 * 64


def test_a_shared_store_counts_for_all_its_workers_and_for_no_others():
    bench = Bench(p0=(SHARED,), p1=(SHARED,), p2=(OTHER,), p3=())
    bench.report("p0", 1, KEYS[:20])
    bench.report("p1", 1, KEYS[20:])
    found = {name: offer.hit_tokens for name, offer in bench.offers().items()}
    assert found == {"p0": len(KEYS) * 64, "p1": len(KEYS) * 64, "p2": 0, "p3": 0}
    bench.costs.forget(bench.worker("p1").key)
    assert bench.offers()["p0"].hit_tokens == 20 * 64


def test_the_price_of_loads_is_learned_and_kept_out_of_the_prefill_time():
    bench = Bench(p0=(OFFLOAD,), p1=(OFFLOAD,))
    bench.report("p0", 1, KEYS)
    cheap = bench.offers()["p0"].own_ms
    for _ in range(30):
        bench.load("p1", 400, load_ms=4000.0)
    found = bench.offers()
    assert found["p0"].own_ms == pytest.approx(found["p1"].own_ms), "loading takes longer than computing"
    assert found["p1"].own_ms < 2000
    assert cheap < found["p0"].own_ms


def test_a_snapshot_replaces_all_parts():
    bench = Bench(p0=(OFFLOAD,))
    bench.report("p0", 0, KEYS[:4])
    bench.report("p0", 1, KEYS[4:])
    bench.report("p0", 0, KEYS[:2], is_snapshot=True)
    assert bench.offers()["p0"].hit_tokens == 2 * 64


def test_images_and_salts_keep_tiers_apart():
    bench = Bench(p0=(SHARED,))
    bench.report("p0", 1, KEYS)
    offers = bench.costs.offers(bench.workers, PROMPT, (("cache_salt", "tenant"),), 0.0)
    assert [offer.hit_tokens for offer in offers.values()] == [0]
