"""Local clusters that cannot start say why and leave nothing."""

from __future__ import annotations

import pytest

from core.config import load_config
from core.errors import ConfigError, StartFailed
from kvferry import LocalCluster


@pytest.mark.parametrize("assignments", [["local.num_prefill=0"], ["local.num_decode=0"]])
def test_half_a_cluster_is_refused(assignments):
    with pytest.raises(ConfigError, match="at least one of each"):
        LocalCluster(load_config(assignments=assignments))


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
