"""One pair whose processes die and come back: answers all the same, no leak, and a cluster that serves again.

What goes wrong in the midst of a read is in ``faults``.
"""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

MODEL = "smollm2-135m"

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module", params=["tcp"])
def supervised(request, cluster_config, serve, tmp_path_factory):
    """One pair that is restarted when it dies, with short leases; shared, as every test leaves it whole."""
    from kvferry.local import LocalCluster

    config = cluster_config(
        f"connector.transports=[{request.param}]",
        "connector.lease_s=4",
        "connector.lease_renew_interval_s=1",
        "router.heartbeat_timeout_s=7",
        "router.worker_wait_s=60",
    )
    logs = tmp_path_factory.mktemp("supervised")
    with LocalCluster(config, supervise=True, log_dir=logs) as cluster, serve(request.param, cluster) as found:
        yield found


def post(served, prompt, **fields):
    body = {"model": MODEL, "prompt": prompt, "temperature": 0, **fields}
    return served.client.post("/v1/completions", json=body)


def assert_serves(served, corpus, eventually):
    served.cluster.wait_until_ready()
    eventually(lambda: post(served, corpus[:70], max_tokens=3).status_code == 200, "serving again")
    eventually(lambda: not served.held(), f"release of {served.held()}")


@pytest.mark.full
@pytest.mark.parametrize("name", ["router", "decode-0", "prefill-0"])
def test_killed_process_is_restarted_and_the_cluster_serves_again(supervised, corpus, eventually, name):
    pid = supervised.cluster.pids[name]
    supervised.cluster.kill(name)
    eventually(lambda: supervised.cluster.pids.get(name, pid) != pid, f"restart of {name}")
    assert_serves(supervised, corpus, eventually)


@pytest.mark.full
@pytest.mark.parametrize("supervised", ["tcp", "shm", "nixl"], indirect=True)
def test_prefill_worker_killed_between_prefill_and_read_is_not_needed_any_more(supervised, corpus, eventually):
    cluster = supervised.cluster
    pid = cluster.pids["prefill-0"]
    cluster.kill("decode-0", signal.SIGSTOP)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = pool.submit(post, supervised, corpus[100:300], max_tokens=8)
        eventually(lambda: supervised.gauges("prefill-0")["kvferry_kv_leased_blocks"] > 0, "a lease", 10.0)
        cluster.kill("prefill-0")
        cluster.kill("decode-0", signal.SIGCONT)
        response = pending.result()
    assert response.status_code == 200, response.text
    transfer = response.json()["usage"]["kv_transfer"]
    assert transfer["fallback_reason"] == "peer_lost"
    assert transfer["recomputed_tokens"] > 0
    eventually(lambda: cluster.pids.get("prefill-0", pid) != pid, "restart")
    assert_serves(supervised, corpus, eventually)


@pytest.mark.full
def test_decode_worker_killed_before_it_reads_has_its_handoff_read_by_its_successor(supervised, corpus, eventually):
    cluster = supervised.cluster
    pid = cluster.pids["decode-0"]
    cluster.kill("decode-0", signal.SIGSTOP)
    with ThreadPoolExecutor(max_workers=1) as pool:
        pending = pool.submit(post, supervised, corpus[100:300], max_tokens=8)
        eventually(lambda: supervised.gauges("prefill-0")["kvferry_kv_leased_blocks"] > 0, "a lease", 10.0)
        cluster.kill("decode-0")
        response = pending.result()
    assert response.status_code == 200, response.text
    transfer = response.json()["usage"]["kv_transfer"]
    assert (transfer["retries"], transfer["replays"], transfer["fallback_reason"]) == (1, 0, "")
    assert transfer["transferred_tokens"] > 0
    eventually(lambda: supervised.gauges("prefill-0")["kvferry_kv_leased_blocks"] == 0, "the end of the lease")
    eventually(lambda: cluster.pids.get("decode-0", pid) != pid, "restart")
    assert_serves(supervised, corpus, eventually)


@pytest.mark.full
def test_worker_that_drains_finishes_its_request_and_leaves(start_cluster, serve, corpus, eventually):
    cluster = start_cluster("connector.transports=[shm]")
    with serve("1p1d-shm", cluster) as served, ThreadPoolExecutor(max_workers=1) as pool:
        process = psutil.Process(cluster.pids["decode-0"])
        pending = pool.submit(post, served, corpus[:50], max_tokens=40, ignore_eos=True)
        eventually(lambda: served.gauges("decode-0")["kvferry_num_requests_running"] > 0, "a running request")
        assert httpx.post(f"{cluster.worker('decode-0').ops_address}/drain").status_code == 202
        refused = post(served, corpus[:50], max_tokens=4)
        assert refused.status_code == 503
        assert pending.result().json()["usage"]["completion_tokens"] == 40
        eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE, "the end of the process")
