"""Conversations over workers that share a store, and a worker with a host memory tier: real processes, real model."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from kvferry.local import LocalCluster

BLOCK_SIZE = 64
BOUND_S = 30.0  # of an answer whose store is dead: a lookup or a save that is under way ends after 2 s

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def samples(served, name, metric):
    """Return the samples of one metric of a process, by their only label's value, or by ""."""
    families = text_string_to_metric_families(served.cluster.metrics(name))
    found = [sample for family in families for sample in family.samples if sample.name == metric]
    return {next(iter(sample.labels.values()), ""): sample.value for sample in found}


def prefilled(served):
    """Return how many prompt tokens each prefill worker has looked up: it changes where a request lands."""
    return {
        worker.engine_id: samples(served, worker.engine_id, "kvferry_prefix_cache_queries_total")[""]
        for worker in served.cluster.workers_of("prefill")
    }


def wait_until_saved(served, connector, eventually):
    def is_saved():
        names = [worker.engine_id for worker in served.cluster.workers]
        return not any(samples(served, name, f"kvferry_{connector}_saving_blocks")[""] for name in names)

    eventually(is_saved, "the end of all saves")


@pytest.fixture
def start(cluster_config, tmp_path, serve, eventually):
    """Start clusters; at their ends nothing may be held by anyone."""
    opened = []

    def start_cluster(kind, *assignments):
        cluster = LocalCluster(cluster_config(*assignments), log_dir=tmp_path / kind).start()
        client = serve(kind, cluster)
        opened.append((cluster, client))
        return client.__enter__()

    yield start_cluster
    for cluster, client in opened:
        client.__exit__(None, None, None)
        cluster.stop()


def test_every_turn_computes_only_what_is_new_on_whichever_worker_it_lands(start, corpus, eventually, assert_token_identical):
    served = start(
        "2p1d-store",
        "connector.name=multi",
        "connector.connectors=[p2p,store]",
        "connector.transports=[shm]",
        "local.num_prefill=2",
        "local.kvstore=true",
        f"kvstore.memory_bytes={256 << 20}",
    )
    history, num_known, landed = list(corpus[:180]), 0, []
    for turn in range(3):
        before = prefilled(served)
        body = served.complete(history, max_tokens=24)
        output = body["choices"][0]["token_ids"]
        assert_token_identical(history, output)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == num_known - num_known % BLOCK_SIZE
        assert body["usage"]["kv_transfer"]["fallback_reason"] == ""
        after = prefilled(served)
        (worker,) = [name for name in after if after[name] > before.get(name, 0)]
        landed.append(worker)
        wait_until_saved(served, "store", eventually)
        num_known = len(history) + len(output) - 1  # the last token was put out and not computed
        history += [*output, *corpus[1000 + 30 * turn : 1030 + 30 * turn]]
        if turn == 0:
            served.cluster.kill(worker)  # all that it knew is gone, but for the store
            eventually(lambda worker=worker: worker not in served.cluster.pids, "death of the worker")
    assert landed[1] != landed[0]
    eventually(lambda: not served.held(), f"release of {served.held()}")

    served.cluster.kill("kvstore")
    eventually(lambda: "kvstore" not in served.cluster.pids, "death of the store")
    started = time.monotonic()
    body = served.complete(corpus[400:500], max_tokens=4)
    assert time.monotonic() - started < BOUND_S
    assert_token_identical(corpus[400:500], body["choices"][0]["token_ids"])
    eventually(lambda: not served.held(), f"release of {served.held()}")


def test_cluster_finds_in_redis_what_another_has_computed(start, redis_process, corpus, eventually, assert_token_identical):
    def start_one(name):
        settings = (
            "connector.name=store",
            "local.aggregated=true",
            "local.kvstore=true",
            f"kvstore.redis_url={redis_process.url}",
        )
        return start(name, *settings, f"kvstore.memory_bytes={128 << 20}")

    def ask(served, start):
        prompt = corpus[start : start + 280]
        body = served.complete(prompt, max_tokens=8)
        assert_token_identical(prompt, body["choices"][0]["token_ids"])
        return body["usage"]

    with ThreadPoolExecutor() as pool:  # one of them keeps a single processor busy, mostly
        first, second = pool.map(start_one, ("first", "second"))
    with redis.Redis.from_url(redis_process.url) as client:
        assert ask(first, 0)["prompt_tokens_details"]["cached_tokens"] == 0
        eventually(lambda: client.dbsize() >= 4, "four blocks in Redis")
        whole = set(client.scan_iter())
        usage = ask(second, 0)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 4 * BLOCK_SIZE
        assert "kv_transfer" not in usage
        ask(first, 500)
        eventually(lambda: client.dbsize() >= len(whole) + 4, "the blocks of another prompt")
        for key in set(client.scan_iter()) - whole:
            stored = client.get(key)
            client.set(key, stored[:-1] + bytes([stored[-1] ^ 1]))
    transfer = ask(second, 500)["kv_transfer"]  # found, refused, and computed
    assert (transfer["recomputed_tokens"], transfer["fallback_reason"]) == (4 * BLOCK_SIZE, "store_miss")
    assert samples(second, "kvstore", "kvferry_kvstore_tier_corrupt_blocks_total") == {"redis": 4}
    (worker,) = second.cluster.workers
    assert samples(second, worker.engine_id, "kvferry_store_events_total")["failed_blocks"] == 4
    for served in (first, second):
        eventually(lambda served=served: not served.held(), f"release of {served.held()}")


@pytest.mark.full
def test_worker_finds_in_its_host_memory_what_its_pool_has_lost(start, corpus, eventually, assert_token_identical):
    served = start(
        "offload",
        "connector.name=offload",
        f"connector.offload.memory_bytes={128 << 20}",
        "local.aggregated=true",
        "cache.num_blocks=12",
        "model.max_model_len=512",
    )
    prompts = [corpus[200 * number : 200 * number + 400] for number in range(3)]
    for turn in range(2):
        for prompt in prompts:
            body = served.complete(prompt, max_tokens=3)
            cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (6 * BLOCK_SIZE if turn else 0)
            assert_token_identical(prompt, body["choices"][0]["token_ids"])
            wait_until_saved(served, "offload", eventually)
        eventually(lambda: served.gauges("router")["kvferry_routing_indexed_blocks"] >= 18, "report of the host memory")
    gauges = served.gauges("router")
    expected, real = (gauges[f"kvferry_routing_{name}_hit_tokens"] for name in ("predicted", "real"))
    assert expected == real == 3 * 6 * BLOCK_SIZE
    (worker,) = served.cluster.workers
    events = samples(served, worker.engine_id, "kvferry_offload_events_total")
    assert events["loaded_blocks"] >= 12
    assert events.get("failed_blocks", 0) == 0
    eventually(lambda: not served.held(), f"release of {served.held()}")
