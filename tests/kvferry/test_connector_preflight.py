"""Connectors of others are imported as a worker would import them, before any process starts."""

from __future__ import annotations

import os
import sys

import pytest

from core.config import load_config
from core.errors import ConfigError
from kvferry import LocalCluster
from kvferry.connector_preflight import check_factories
from kvferry.local import ProcessOptions
from kvferry.processes import ProcessKeeper

MODULE = """
import atexit
print("loaded")
atexit.register(print, "unloaded")
def make(context): ...
limit = 7
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("print('loaded')\nraise RuntimeError('no such device')\n")
    (tmp_path / "needy.py").write_text("import not_installed\n")
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.parametrize("setting", ["connector.name", "ec_connector.name"])
def test_factory_that_workers_can_import_is_accepted_and_not_imported_here(setting, environment):
    check_factories(load_config(assignments=[f"{setting}=mine:make"]), environment)
    assert "mine" not in sys.modules


@pytest.mark.parametrize(
    ("assignments", "reason"),
    [
        (["connector.name=mine:Nope"], "connector.name = 'mine:Nope': module 'mine' has no attribute 'Nope'"),
        (["connector.name=mine:limit"], "connector.name = 'mine:limit': limit is not callable"),
        (["ec_connector.name=mine:Nope"], "ec_connector.name = 'mine:Nope': module 'mine' has no attribute 'Nope'"),
        (
            ["connector.name=multi", "connector.connectors=[p2p, 'mine:Nope']"],
            "connector.connectors = 'mine:Nope': module 'mine' has no attribute 'Nope'",
        ),
        (["connector.name=broken:make"], "connector.name = 'broken:make': its import fails: RuntimeError: no such device"),
        (["connector.name=needy:make"], "connector.name = 'needy:make': No module named 'not_installed'"),
    ],
)
def test_factory_that_workers_cannot_import_is_refused_with_the_reason(assignments, reason, environment):
    with pytest.raises(ConfigError) as refusal:
        check_factories(load_config(assignments=assignments), environment)
    assert (refusal.value.message, refusal.value.param) == (reason, reason.partition(" ")[0])


def test_own_connectors_need_no_import(monkeypatch):
    monkeypatch.setattr("kvferry.connector_preflight.subprocess.run", None)
    check_factories(load_config(assignments=["connector.name=multi", "connector.connectors=[p2p, offload]"]))


@pytest.mark.parametrize("name", ["mine:Nope", "nowhere:make"])
def test_cluster_with_a_connector_that_cannot_be_imported_starts_nothing(name, environment, monkeypatch):
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    config = load_config(assignments=[f"connector.name={name}", "router.port=0"])
    with pytest.raises(ConfigError, match=rf"^connector\.name = '{name}': "):
        LocalCluster(config, options=ProcessOptions(environment={"PYTHONPATH": environment["PYTHONPATH"]})).start()
    assert started == []
