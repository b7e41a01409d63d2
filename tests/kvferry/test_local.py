"""Local clusters that cannot start say why and leave nothing."""

from __future__ import annotations

import socket

import pytest

from core.config import load_config
from core.errors import ConfigError, StartFailed
from kvferry import LocalCluster
from kvferry.local import ProcessOptions


@pytest.mark.parametrize("assignments", [["local.num_prefill=0"], ["local.num_decode=0"]])
def test_half_a_cluster_is_refused(assignments):
    with pytest.raises(ConfigError, match="at least one of each"):
        LocalCluster(load_config(assignments=assignments))


def test_encode_workers_are_read_by_a_connector_even_if_none_was_named():
    cluster = LocalCluster(load_config(assignments=["local.num_encode=2"]))
    assert list(cluster._roles) == ["encode-0", "encode-1", "prefill-0", "decode-0"]
    assert cluster._config.ec_connector.name == "p2p"
    assert LocalCluster(load_config())._config.ec_connector.name == "none"
    named = load_config(assignments=["local.num_encode=1", "ec_connector.name=shared", "local.kvstore=true"])
    assert LocalCluster(named)._config.ec_connector.name == "shared"


@pytest.mark.parametrize(
    "assignment",
    [
        "worker.engine_id=p0",
        "worker.router_addresses=tcp://r1:5570",
        "worker.control_address=tcp://0.0.0.0:7000",
        "worker.ops_port=9100",
        "worker.workers_on_host=3",
    ],
)
def test_settings_that_the_cluster_chooses_are_refused_not_overwritten(assignment):
    with pytest.raises(ConfigError, match="a local cluster chooses it") as refused:
        LocalCluster(load_config(assignments=[assignment]))
    assert refused.value.param == assignment.partition("=")[0]


def test_settings_of_single_workers_come_before_those_that_the_cluster_chooses():
    own = {"advertise_host": "127.0.0.2", "router_addresses": ("tcp://127.0.0.1:7001",)}
    cluster = LocalCluster(load_config(), options=ProcessOptions(workers={"prefill-0": own}))
    found = {name: cluster._worker_config(name).worker for name in cluster._roles}
    assert (found["prefill-0"].advertise_host, found["prefill-0"].router_addresses) == ("127.0.0.2", ("tcp://127.0.0.1:7001",))
    assert found["prefill-0"].engine_id == "prefill-0"
    assert (found["decode-0"].advertise_host, found["decode-0"].router_addresses) == ("", ("tcp://127.0.0.1:5570",))


@pytest.mark.slow
@pytest.mark.full  # the cluster with a key in tests/e2e asks for an address, and is met there
def test_workers_find_the_router_at_the_address_that_was_asked_for(cluster_config):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with LocalCluster(cluster_config(f"router.worker_address={address}", "local.aggregated=true")) as cluster:
        assert address in cluster.log("router")


def test_unknown_model_is_refused_before_any_process_starts(tmp_path):
    config = load_config(assignments=["model.name=no-such-model", f"model.cache_dir={tmp_path}"])
    with pytest.raises(ConfigError, match="no-such-model"):
        LocalCluster(config).start()


def test_cluster_that_is_not_running_has_nothing_to_show():
    cluster = LocalCluster()
    assert cluster.workers == []
    assert cluster.pids == {}
    assert cluster.log("router") == ""
    with pytest.raises(KeyError):
        cluster.kill("decode-0")
    with pytest.raises(StartFailed, match="not running"):
        cluster.restart("decode-0")
    cluster.stop()


@pytest.mark.slow
def test_worker_that_cannot_start_fails_the_start_with_its_own_words(cluster_config, no_child_left):
    cluster = LocalCluster(cluster_config("connector.name=carrier-pigeon"))
    with pytest.raises(StartFailed, match="no such connector") as caught:
        cluster.start()
    assert "ended before it was ready" in caught.value.message
    assert cluster.pids == {}
