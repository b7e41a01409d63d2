"""A cluster of real processes with the real model and the real LMCache server."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.lmcache_server import LMCacheServer

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

CHUNK = 64


@pytest.fixture
def start_with_server(start_cluster, lmcache_server):
    """Start a cluster whose workers share a server, if none is named that of the session."""

    def start(*assignments: str, server: LMCacheServer = lmcache_server):
        return start_cluster(
            "connector.name=lmcache",
            f"connector.lmcache.server_address={server.server_address}",
            f"connector.lmcache.http_address={server.http_address}",
            f"connector.lmcache.staging_bytes={64 << 20}",
            "connector.lmcache.lookup_timeout_s=5",
            "connector.lmcache.request_timeout_s=2",
            "connector.lmcache.heartbeat_interval_s=0.5",
            "connector.lmcache.retry_interval_s=0.2",
            *assignments,
        )

    return start


@pytest.fixture
def mortal_server(tmp_path):
    """A server of the test's own. That of the session stays the process that other tests know."""
    with LMCacheServer(tmp_path / "server.log", options=["--separate-object-groups"]) as server:
        yield server


def events(served, worker: str) -> dict[str, float]:
    """Return what a worker's connector has counted."""
    families = text_string_to_metric_families(served.cluster.metrics(worker))
    found = [sample for family in families for sample in family.samples if sample.name == "kvferry_lmcache_events_total"]
    return {sample.labels["event"]: sample.value for sample in found}


def test_decode_loads_what_prefill_has_saved(start_with_server, serve, corpus, assert_token_identical, eventually):
    """No p2p here: the server is the only way from one worker to the other."""
    prompt = corpus[: 5 * CHUNK + 10]
    with serve("lmcache", start_with_server()) as served:
        body = served.complete(prompt, max_tokens=8)
        assert_token_identical(prompt, body["choices"][0]["token_ids"])
        transfer = body["usage"]["kv_transfer"]
        assert transfer["transport"] == "lmcache"
        assert transfer["transferred_tokens"] >= 4 * CHUNK  # all that the first step of two has computed
        assert not transfer.get("fallback_reason")
        eventually(lambda: events(served, "prefill-0").get("saved_tokens", 0) >= 5 * CHUNK)
        eventually(lambda: not served.held())


@pytest.mark.full
def test_the_death_of_the_server_is_not_seen_in_answers(
    start_with_server, serve, corpus, assert_token_identical, mortal_server, eventually
):
    prompts = {
        name: corpus[start : start + 3 * CHUNK + 9] for name, start in (("with", 400), ("without", 700), ("after", 1000))
    }
    with serve("lmcache", start_with_server(server=mortal_server)) as served:
        for name, prompt in prompts.items():
            body = served.complete(prompt, max_tokens=6)
            assert_token_identical(prompt, body["choices"][0]["token_ids"])
            if name == "with":
                mortal_server.kill()
            elif name == "without":
                mortal_server.start()
                for worker in ("prefill-0", "decode-0"):
                    eventually(lambda worker=worker: served.gauges(worker)["kvferry_lmcache_connected"])
            else:
                assert body["usage"]["kv_transfer"]["transport"] == "lmcache"
        eventually(lambda: not served.held())


@pytest.mark.full
def test_a_hybrid_model_s_prompt_passes_through_the_server(start_with_server, serve, corpus, gemma3_oracle, eventually):
    """Beyond the window: five groups of sliding layers get back the end of it, the full one everything."""
    prompt = [2, *(100 + token % 5000 for token in corpus[:700])]
    cluster = start_with_server("model.name=gemma3-270m", f"connector.lmcache.staging_bytes={256 << 20}")
    with serve("lmcache", cluster) as served:
        body = served.complete(prompt, model="gemma3-270m", max_tokens=6)
        gemma3_oracle.assert_token_identical(prompt, body["choices"][0]["token_ids"])
        transfer = body["usage"]["kv_transfer"]
        assert transfer["transport"] == "lmcache"
        assert transfer["transferred_tokens"] >= 8 * CHUNK
        assert not transfer.get("fallback_reason")
        eventually(lambda: not served.held())


@pytest.mark.full
def test_prefill_worker_with_p2p_finds_blocks_of_its_previous_incarnation(
    start_with_server, serve, corpus, assert_token_identical, eventually
):
    prompt = corpus[200 : 200 + 4 * CHUNK + 20]
    cluster = start_with_server("connector.name=multi", "connector.connectors=[p2p,lmcache]")
    with serve("multi", cluster) as served:
        body = served.complete(prompt, max_tokens=6)
        assert body["usage"]["kv_transfer"]["transport"] in ("shm", "tcp"), "p2p comes first"
        eventually(lambda: events(served, "prefill-0").get("saved_tokens", 0) >= 4 * CHUNK)
        cluster.restart("prefill-0", grace_s=0.0)
        again = served.complete(prompt, max_tokens=6)
        assert_token_identical(prompt, again["choices"][0]["token_ids"])
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 4 * CHUNK
        assert events(served, "prefill-0")["loaded_tokens"] >= 4 * CHUNK
        eventually(lambda: not served.held())
