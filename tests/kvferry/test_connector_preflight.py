"""Connectors of others are imported as a worker would import them, before any process starts."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import psutil
import pytest

from connectors.p2p.transport.nixl import MODULES
from core.config import load_config
from core.errors import ConfigError
from kvferry import LocalCluster, connector_preflight, doctor_transports
from kvferry.cluster_plan import workers_here
from kvferry.connector_preflight import (
    check_connectors,
    check_factories,
    check_nixl,
    check_p2p,
    check_prefix_caching,
    why_no_nixl,
)
from kvferry.doctor_checks import check_connector
from kvferry.local import ProcessOptions
from kvferry.preflight import check_process
from kvferry.processes import ProcessKeeper
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts

MODULE = """
import atexit
print("loaded")
atexit.register(print, "unloaded")
def make(context): ...
limit = 7
"""
LAUNCHING = """
import pathlib, subprocess
helper = subprocess.Popen(["sleep", "600"])
pathlib.Path(__file__).with_name("pid").write_text(str(helper.pid))
def make(context): ...
"""
OTHERS = {
    "broken": "print('loaded')\nraise RuntimeError('no such device')",
    "wordy": "raise RuntimeError('no such device\\nlook at the cable')",
    "needy": "import not_installed",
    "leaving": "import sys; sys.exit(0)",
    "gone": "import os; os._exit(0)",
    "dead": "import os; os.kill(os.getpid(), 9)",
    "bye": "import sys; sys.exit('no such device')",
    "quiet": "import io, sys; sys.stdout = io.StringIO()\ndef make(context): ...",
    "launching": LAUNCHING,
}
ENDS = "its import ends the process with exit code"


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    for name, text in OTHERS.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["connector.name", "ec_connector.name"])
def test_factory_that_workers_can_import_is_accepted_and_not_imported_here(setting, environment):
    check_factories(load_config(assignments=[f"{setting}=mine:make"]), environment)
    assert "mine" not in sys.modules


@pytest.mark.slow
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
        (
            ["connector.name=wordy:make"],
            "connector.name = 'wordy:make': its import fails: RuntimeError: no such device look at the cable",
        ),
        (["connector.name=leaving:make"], f"connector.name = 'leaving:make': {ENDS} 0"),
        (["connector.name=gone:make"], f"connector.name = 'gone:make': {ENDS} 0"),
        (["connector.name=bye:make"], f"connector.name = 'bye:make': {ENDS} 1: no such device"),
        (["connector.name=dead:make"], f"connector.name = 'dead:make': {ENDS} -9"),
        (["connector.name=needy:make"], "connector.name = 'needy:make': No module named 'not_installed'"),
    ],
)
def test_factory_that_workers_cannot_import_is_refused_with_the_reason(assignments, reason, environment):
    with pytest.raises(ConfigError) as refusal:
        check_factories(load_config(assignments=assignments), environment)
    assert (refusal.value.message, refusal.value.param) == (reason, reason.partition(" ")[0])


def test_factory_whose_module_replaces_stdout_is_accepted(environment):
    check_factories(load_config(assignments=["connector.name=quiet:make"]), environment)


@pytest.mark.slow
def test_import_that_starts_a_process_is_not_waited_for_and_leaves_none(environment, tmp_path, monkeypatch, eventually):
    monkeypatch.setattr(connector_preflight, "_IMPORT_TIMEOUT_S", 30.0)  # of the 600 that its process would live
    check_factories(load_config(assignments=["connector.name=launching:make"]), environment)
    started = int((tmp_path / "pid").read_text())
    eventually(lambda: not psutil.pid_exists(started) or psutil.Process(started).status() == psutil.STATUS_ZOMBIE)


def test_import_that_takes_too_long_is_ended(environment, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(connector_preflight, "_IMPORT_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match=r"its import takes more than 0\.1 s$"):
        check_factories(load_config(assignments=["connector.name=slow:make"]), environment)


def test_own_connectors_need_no_import(monkeypatch):
    monkeypatch.setattr(connector_preflight, "_why_not_loadable", None)
    check_factories(load_config(assignments=["connector.name=multi", "connector.connectors=[p2p, offload]"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine:Nope", "nowhere:make"])
def test_cluster_with_a_connector_that_cannot_be_imported_starts_nothing(name, environment, monkeypatch):
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    config = load_config(assignments=[f"connector.name={name}", "router.port=0"])
    with pytest.raises(ConfigError, match=rf"^connector\.name = '{name}': "):
        LocalCluster(config, options=ProcessOptions(environment={"PYTHONPATH": environment["PYTHONPATH"]})).start()
    assert started == []


@pytest.fixture
def broken_nixl(tmp_path):
    """An import path on which NIXL is installed and cannot be loaded."""
    for name in MODULES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libcudart.so: not found')")
    return os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))


def test_cluster_of_nixl_alone_that_cannot_be_loaded_starts_nothing(broken_nixl, monkeypatch):
    monkeypatch.setattr(connector_preflight, "installed_module", lambda: MODULES[0])
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    config = load_config(assignments=["connector.transports=nixl", "router.port=0"])
    said = r"^connector\.transports = nixl: the library's import fails: ImportError: libcudart\.so: not found; pip install .*"
    with pytest.raises(ConfigError, match=said):
        LocalCluster(config, options=ProcessOptions(environment={"PYTHONPATH": broken_nixl})).start()
    assert started == []


@pytest.mark.parametrize(("transports", "verdict"), [("nixl", "failure"), ("nixl,tcp", "warning")])
def test_nixl_that_cannot_be_loaded_is_found(transports, verdict, broken_nixl, monkeypatch):
    monkeypatch.setattr(doctor_transports, "installed_module", lambda: MODULES[0])
    monkeypatch.setenv("PYTHONPATH", broken_nixl)
    found = verdicts(doctor_transports.check_transports, f"connector.transports={transports}")["transport nixl"]
    assert (found.verdict, found.text) == (verdict, "the library's import fails: ImportError: libcudart.so: not found")
    assert found.fix.startswith("pip install")


def test_nixl_that_can_be_loaded_is_in_order(tmp_path):
    for name in MODULES:
        (tmp_path / name).mkdir()
        for part in ("__init__", "_api", "_bindings"):
            (tmp_path / name / f"{part}.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    check_nixl(workers_here(load_config(assignments=["connector.transports=nixl"])), environment)


NIXL = "connector.transports=nixl"
NIXL_EMBEDDINGS = ("connector.transports=tcp", "ec_connector.name=p2p", "ec_connector.transports=nixl")


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        (["local.aggregated=true", NIXL], False),
        (["local.aggregated=true", NIXL, "connector.peer_prefixes=true"], True),
        (NIXL_EMBEDDINGS, False),
        ([*NIXL_EMBEDDINGS, "local.num_encode=1"], True),
    ],
)
def test_nixl_is_not_missed_in_a_cluster_that_does_not_load_it(settings, is_refused, monkeypatch):
    config = load_config(assignments=settings)
    workers = workers_here(config)
    monkeypatch.setattr(connector_preflight, "why_no_nixl", lambda _: "broken")
    with pytest.raises(ConfigError, match=r"transports = nixl: broken") if is_refused else nullcontext():
        check_nixl(workers)
    monkeypatch.setattr(connector_preflight, "installed_module", lambda: None)
    with pytest.raises(ConfigError, match=r"transports = nixl: .* not installed") if is_refused else nullcontext():
        check_connectors(config, workers, are_all=True)
    found = verdicts(doctor_transports.check_transports, *settings)
    assert ("transport nixl" in found) == is_refused


def test_nixl_that_needs_what_torch_brings_is_in_order(tmp_path):
    for name in MODULES:
        (tmp_path / name).mkdir()
        for part in ("_api", "_bindings"):
            (tmp_path / name / f"{part}.py").touch()
        text = "import sys\nif 'torch' not in sys.modules:\n    raise ImportError('libcudart.so: not found')"
        (tmp_path / name / "__init__.py").write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    assert why_no_nixl(environment) == ""


@pytest.mark.parametrize(
    ("role", "assignments", "is_refused"),
    [
        ("prefill", [], True),
        ("decode", [], True),
        ("aggregated", ["connector.peer_prefixes=true"], True),
        ("aggregated", ["worker.can_switch_role=true"], True),
        ("aggregated", ["connector.name=multi", "connector.connectors=[p2p, offload]"], True),
        ("aggregated", [], False),
        ("encode", [], False),
        ("prefill", ["connector.name=offload"], False),
    ],
)
def test_no_transport_is_refused_where_blocks_would_be_read_by_p2p(role, assignments, is_refused):
    config = load_config(assignments=["connector.transports=[]", *assignments])
    with pytest.raises(ConfigError, match=r"connector\.transports is empty") if is_refused else nullcontext():
        check_p2p({"worker": (role, config)})


def test_a_worker_without_a_transport_does_not_start():
    config = load_config(assignments=["connector.transports=[]", "worker.ops_port=0"])
    with pytest.raises(ConfigError, match=r"connector\.transports is empty"):
        check_process("prefill", config)
    check_process("aggregated", config)


def test_prefixes_of_peers_are_refused_where_no_worker_keeps_any(monkeypatch):
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    settings = ["connector.peer_prefixes=true", "cache.enable_prefix_caching=false"]
    said = r"^connector\.peer_prefixes = true with cache\.enable_prefix_caching = false: .* leave one of them out"
    with pytest.raises(ConfigError, match=said) as refused:
        LocalCluster(load_config(assignments=[*settings, "router.port=0"])).start()
    assert started == []
    found = verdicts(check_connector, *settings)["connector"]
    assert (found.verdict, found.text) == ("failure", refused.value.message)
    assert verdicts(check_connector, *settings, "worker.engine_id=p0")["connector"].verdict == "ok", "others may keep some"


@pytest.mark.parametrize("name", ["lmcache", "mine:make"])
def test_prefixes_of_peers_are_no_matter_of_other_connectors_than_p2p(name):
    settings = [f"connector.name={name}", "connector.peer_prefixes=true", "cache.enable_prefix_caching=false"]
    check_prefix_caching(workers_here(load_config(assignments=settings)))


@pytest.mark.parametrize(
    ("tier", "said"),
    [
        ("connector={name: multi, connectors: [p2p, store]}", r"connector\.connectors with store"),
        ("connector.name=offload", r"connector\.name with offload"),
    ],
)
def test_a_tier_without_the_prefix_cache_that_it_prolongs_is_refused(tier, said, monkeypatch):
    started = []
    monkeypatch.setattr(ProcessKeeper, "start", lambda _keeper, spec: started.append(spec.name))
    said = rf"^{said} and cache\.enable_prefix_caching = false: .*; leave cache\.enable_prefix_caching out"
    settings = ["cache.enable_prefix_caching=false", tier, "worker.ops_port=0"]
    with pytest.raises(ConfigError, match=said) as refused:
        LocalCluster(load_config(assignments=[*settings, "router.port=0"])).start()
    assert (started, refused.value.param) == ([], "cache.enable_prefix_caching")
    for role in ("prefill", "decode", "aggregated"):
        with pytest.raises(ConfigError, match=said):
            check_process(role, load_config(assignments=settings))
    for run_by, verdict in (("log.level=INFO", "failure"), ("worker.engine_id=p0", "warning"), (OF_ANY_PROCESS, "warning")):
        found = verdicts(check_connector, *settings, run_by)["connector"]
        assert (found.verdict, found.text) == (verdict, refused.value.message)


@pytest.mark.parametrize("role", ["router", "kvstore", "encode", "agent"])
def test_a_process_without_a_pool_takes_settings_of_tiers_that_it_shares(role):
    addresses = ["worker.ops_port=0", "router.port=0", "kvstore.bind_address=tcp://127.0.0.1:0", "kvstore.ops_port=0"]
    addresses += ["router.worker_address=tcp://127.0.0.1:0", "worker.control_address=tcp://127.0.0.1:0"]
    tier = ["cache.enable_prefix_caching=false", "connector.name=store"]
    check_process(role, load_config(assignments=[*addresses, *tier, "model.name=never-fetched/model"]))
