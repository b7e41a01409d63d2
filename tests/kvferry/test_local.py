"""Local clusters that cannot start say why and leave nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket

import pytest

from core.config import load_config
from core.errors import ConfigError, StartFailed
from core.wire.curve import derive_keys
from kvferry import LocalCluster
from kvferry.local import ProcessOptions


@pytest.mark.parametrize("assignments", [["local.num_prefill=0"], ["local.num_decode=0"]])
def test_half_a_cluster_is_refused(assignments):
    with pytest.raises(ConfigError, match="at least one of each"):
        LocalCluster(load_config(assignments=assignments))


@pytest.mark.parametrize("assignments", [[], ["local.num_encode=1"]])
def test_aggregated_workers_of_which_there_are_none_are_refused(assignments):
    none = ["local.aggregated=true", "local.num_prefill=0", "local.num_decode=0"]
    with pytest.raises(ConfigError, match=r"local.num_prefill = 0 and local.num_decode = 0: .*; set one of them"):
        LocalCluster(load_config(assignments=[*none, *assignments]))
    for one in ("local.num_prefill=1", "local.num_decode=1"):
        assert "aggregated-0" in LocalCluster(load_config(assignments=[*none, *assignments, one]))._roles


def test_encode_workers_are_read_by_a_connector_even_if_none_was_named():
    cluster = LocalCluster(load_config(assignments=["local.num_encode=2"]))
    assert list(cluster._roles) == ["encode-0", "encode-1", "prefill-0", "decode-0"]
    assert cluster._config.ec_connector.name == "p2p"
    assert LocalCluster(load_config())._config.ec_connector.name == "none"
    named = load_config(assignments=["local.num_encode=1", "ec_connector.name=shared", "local.kvstore=true"])
    assert LocalCluster(named)._config.ec_connector.name == "shared"


def keys_of(cluster):
    """Return the keys that the processes of a cluster read from their standard input."""
    names = [*cluster._routers.names, *cluster._stores, *cluster._roles]
    return {json.loads(cluster._spec(name).read_input())["security"]["cluster_key"] for name in names}


def test_a_cluster_makes_one_key_of_its_own_for_all_its_processes():
    config = load_config(assignments=["local.kvstore=true", "local.num_encode=1"])
    first, second = LocalCluster(config), LocalCluster(config)
    (key,), (other,) = keys_of(first), keys_of(second)
    assert derive_keys(key) is not None
    assert key != other


def test_the_key_is_in_no_command_line_and_no_environment():
    cluster = LocalCluster(load_config(assignments=["local.kvstore=true"]))
    (key,) = keys_of(cluster)
    for name in [*cluster._routers.names, *cluster._stores, *cluster._roles]:
        assert not [part for part in cluster._spec(name).command if key in part]
    assert key not in os.environ.values()


def test_a_key_that_is_set_is_used_and_an_open_cluster_has_none():
    key = "the key of the cluster, which is long enough"
    assert keys_of(LocalCluster(load_config(assignments=[f"security.cluster_key={key}"]))) == {key}
    assert keys_of(LocalCluster(load_config(assignments=["security.insecure=true"]))) == {""}


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
def test_worker_that_cannot_start_fails_the_start_with_its_own_words(cluster_config, no_child_left, tmp_path):
    lines = ["from core.errors import ConfigError", "def make(_):", "    raise ConfigError('connector.extra: no folder')"]
    (tmp_path / "refusing.py").write_text("\n".join(lines))
    import_path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    options = ProcessOptions(environment={"PYTHONPATH": import_path})
    cluster = LocalCluster(cluster_config("connector.name=refusing:make"), options=options)
    with pytest.raises(ConfigError) as caught:
        cluster.start()
    *_, reason = caught.value.message.splitlines()
    end = r"did not start: it ended with exit code 2: connector\.extra: no folder"
    assert re.match(rf"(prefill|decode)-0 {end}", reason)
    assert cluster.pids == {}


@pytest.mark.slow
def test_start_that_is_cancelled_does_not_wait_for_the_router(cluster_config, no_child_left):
    cluster = LocalCluster(cluster_config())
    try:
        assert cluster.start(is_cancelled=lambda: True).base_url == ""
    finally:
        cluster.stop(grace_s=0.0)


QUICK_CHECKS = ("local.health_interval_s=0.2", "local.health_timeout_s=1", "local.health_max_silence_s=3")


class RouterAlone(LocalCluster):
    """A cluster without workers, which is ready once its router listens."""

    def __init__(self, config, log_dir):
        super().__init__(config, supervise=True, log_dir=log_dir)
        self._roles.clear()

    def _is_ready(self, name):
        child = self._live(name)
        return child is not None and child.addresses.done()


@pytest.mark.slow
def test_router_that_is_stopped_and_stays_so_is_replaced(cluster_config, eventually, no_child_left, tmp_path):
    """The supervisor's own checks find it, without another signal."""
    with RouterAlone(cluster_config(*QUICK_CHECKS), tmp_path) as cluster:
        pid = cluster.pids["router"]
        cluster.kill("router", signal.SIGSTOP)
        eventually(lambda: cluster.pids.get("router", pid) != pid, "the router's successor")
        (end,) = cluster.ends["router"]
        assert end.startswith("ended with signal SIGKILL: no answer to /health for ")


class RoutersThatDie(RouterAlone):
    """Two routers: the first is killed while the start asks whether the last one is ready, which is ``is_last_ready``."""

    def __init__(self, config, log_dir, is_last_ready):
        super().__init__(config, log_dir)
        self._is_last_ready = is_last_ready

    def _is_ready(self, name):
        if name == "router-1" and not self.ends:
            child = self._live("router")
            self.kill("router")
            child.ended.wait()
        return self._is_last_ready if name == "router-1" else super()._is_ready(name)


@pytest.mark.slow
@pytest.mark.parametrize("is_last_ready", [True, False])
def test_process_that_dies_after_it_was_ready_fails_the_start(cluster_config, no_child_left, tmp_path, is_last_ready):
    cluster = RoutersThatDie(cluster_config("router.processes=2", "local.ready_timeout_s=20"), tmp_path, is_last_ready)
    try:
        with pytest.raises(StartFailed, match="router did not start: it ended with signal SIGKILL"):
            cluster.start()
    finally:
        cluster.stop(grace_s=0.0)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.full
def test_worker_that_is_stopped_and_stays_so_is_replaced(cluster_config, eventually, no_child_left, tmp_path):
    name = "aggregated-0"
    with LocalCluster(cluster_config("local.aggregated=true", *QUICK_CHECKS), supervise=True, log_dir=tmp_path) as cluster:
        pids = cluster.pids
        cluster.kill(name, signal.SIGSTOP)
        eventually(lambda: cluster.pids.get(name, pids[name]) != pids[name], "the worker's successor")
        cluster.wait_until_ready()
        assert len(cluster.ends[name]) == 1
        assert cluster.pids["router"] == pids["router"]


def test_last_line_of_a_failed_start_is_the_reason(tmp_path):
    cluster = LocalCluster(log_dir=tmp_path)
    (tmp_path / "prefill-0.log").write_text("one line\nkvferry: out of luck\n")
    cluster._ends["prefill-0"] = ["ended with exit code 1: out of luck"]
    error = cluster._failed("prefill-0")
    assert isinstance(error, StartFailed)
    assert error.message.splitlines()[0] == "the end of the log of prefill-0:"
    assert error.message.splitlines()[-1] == "prefill-0 did not start: it ended with exit code 1: out of luck"
