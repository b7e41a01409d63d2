import os
import subprocess
import sys
from pathlib import Path

import pytest

from connectors.p2p.transport.nixl import NixlTransport
from core.ids import RandomIds
from core.testing.transport_owner import HostRows
from core.testing.transport_suite import TransportSuite
from core.transport import PeerId

FACTORIES = Path(__file__).with_name("transport_factories.py")
OVER_TCP = Path(__file__).with_name("nixl_over_tcp.py")


class TestNixlTransport(TransportSuite):
    factory = f"{FACTORIES}:make_nixl"


LOAD = f"""
from pathlib import Path
from core.testing.transport_owner import HostRows, load_factory
transport, memory = load_factory({str(FACTORIES)!r} + ":make_nixl")(), HostRows(2, 4096)
transport.register([memory.region])
transport.describe()
transport.close()
"""


@pytest.mark.parametrize(("environment", "is_quiet"), [({}, True), ({"NIXL_LOG_LEVEL": "INFO"}, False)])
def test_library_is_quiet_on_stdout_unless_the_user_wants_to_hear_it(environment, is_quiet):
    inherited = {name: value for name, value in os.environ.items() if name != "NIXL_LOG_LEVEL"}
    result = subprocess.run(
        [sys.executable, "-c", LOAD], env=inherited | environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert ("NIXL" not in result.stdout) == is_quiet, result.stdout


@pytest.fixture
def agents(monkeypatch):
    """The names of the agents that are made."""
    names = []
    api = pytest.importorskip("nixl_cu12._api")

    def make(name, config):
        names.append(name)
        return original(name, config)

    original = api.nixl_agent
    monkeypatch.setattr(api, "nixl_agent", make)
    return names


@pytest.fixture
def transports():
    """Make transports around two rows."""
    made = []

    def make(name):
        transport, memory = NixlTransport(RandomIds(), name), HostRows(2, 4096)
        made.append((transport, memory))
        transport.register([memory.region])
        return transport

    yield make
    for transport, memory in made:
        transport.close()
        memory.close()


def test_a_reader_has_an_agent_per_peer_and_none_beside_them(agents, transports):
    owners = [transports("owner").describe() for _ in range(2)]
    assert [name.partition("-")[0] for name in agents] == ["owner", "owner"]
    reader = transports("reader")
    for incarnation, metadata in enumerate(owners):
        reader.add_peer(PeerId("owner", incarnation), metadata)
    assert [name.partition("-")[0] for name in agents[2:]] == ["reader", "reader"]
    assert len(set(agents)) == 4


def test_an_owner_that_reads_as_well_has_an_agent_for_each(agents, transports):
    other = transports("other").describe()
    both = transports("both")
    both.add_peer(PeerId("other", 1), other)
    both.describe()
    assert both.describe() == both.describe()
    assert sum(name.startswith("both") for name in agents) == 2


@pytest.mark.slow
def test_the_suite_passes_over_tcp_between_owner_and_reader():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", str(OVER_TCP)]
    environment = os.environ | {"UCX_TLS": "tcp"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout
