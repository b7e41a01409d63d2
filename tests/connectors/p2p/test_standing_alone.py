"""The transport agent can be imported without the engine, its configuration and the libraries that they load."""

import subprocess
import sys

import pytest

FORBIDDEN = (
    "core.engine",
    "core.worker",
    "core.sched",
    "core.request",
    "core.connector",
    "core.config",
    "core.kv.manager",
    "torch",
    "yaml",
    "litestar",
)
PROGRAM = """
import importlib, pkgutil, sys
for name in sys.argv[1].split(","):
    module = importlib.import_module(name)
    for found in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        importlib.import_module(found.name)
print(*sys.modules)
"""


def modules_loaded_by(*names):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(names)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    return {name for name in run.stdout.split() if name.startswith(FORBIDDEN)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        ("connectors.p2p.agent", "connectors.p2p.actions", "connectors.p2p.settings"),
        ("connectors.p2p.driver", "connectors.p2p.control"),
        ("connectors.p2p.consumer",),
        ("connectors.p2p.producer",),
        ("connectors.p2p.transfer",),
        ("connectors.p2p.transport",),
        ("core.kv.seals", "core.digest", "core.wire"),
    ],
    ids=lambda names: names[0],
)
def test_agent_is_imported_without_engine_configuration_or_tensors(names):
    assert modules_loaded_by(*names) == set()


@pytest.mark.slow
def test_connector_of_the_engine_loads_what_the_agent_does_not():
    assert {"core.config", "core.connector", "core.request", "yaml"} <= modules_loaded_by("connectors.p2p.connector")
