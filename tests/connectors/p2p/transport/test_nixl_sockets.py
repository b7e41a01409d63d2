"""Where UCX listens: what another machine can reach of it. Real agents, each set in a process of its own."""

import ipaddress
import json
import socket
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from connectors.p2p.transport.interface import PeerId
from connectors.p2p.transport.nixl import installed_module

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed_module() is None, reason="NIXL is not installed"),
]

# An owner at argv[1], and a reader at argv[2] of that owner at argv[3]. Tells where they listen, and waits for its end.
AGENTS = """
import json, sys
import psutil
from connectors.p2p.transport.nixl import NixlTransport
from core.ids import RandomIds
from connectors.testing.transport_owner import HostRows
from connectors.p2p.transport.interface import PeerId

def transport(name, address):
    made = NixlTransport(RandomIds(), name, address)
    made.register([HostRows(2, 4096).region])
    return made

owner, reader = transport("owner", sys.argv[1]), transport("reader", sys.argv[2])
reader.add_peer(PeerId(sys.argv[3], 1), owner.describe())
found = psutil.Process().net_connections("inet")
print(json.dumps([tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN]), flush=True)
sys.stdin.read()
"""
LOCAL, ELSEWHERE = "tcp://127.0.0.1:5600", "tcp://10.0.0.7:5600"


def addresses_of_this_machine():
    found = [each.address for name in psutil.net_if_addrs().values() for each in name if each.family == socket.AF_INET]
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


class Agents:
    """The process of the two agents."""

    def __init__(self, owner, reader, owner_as_reached):
        command = [sys.executable, "-c", AGENTS, owner, reader, owner_as_reached]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.listening = json.loads(self.process.stdout.readline())

    def exposed(self):
        return [host for host, _ in self.listening if not ipaddress.ip_address(host).is_loopback]

    def close(self):
        self.process.communicate(timeout=30)


@pytest.fixture
def agents():
    with closing(Agents(LOCAL, LOCAL, LOCAL)) as agents:
        yield agents


def test_agents_of_a_loopback_configuration_listen_on_loopback_only(agents):
    assert agents.listening
    assert agents.exposed() == []


@pytest.mark.skipif(not addresses_of_this_machine(), reason="no address besides loopback")
def test_bytes_from_another_interface_reach_no_agent(agents):
    for address in addresses_of_this_machine():
        for _, port in agents.listening:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), timeout=5)
    assert agents.process.poll() is None


@pytest.mark.skipif(not addresses_of_this_machine(), reason="no address besides loopback")
@pytest.mark.parametrize(
    "at", [(ELSEWHERE, LOCAL, LOCAL), (LOCAL, LOCAL, ELSEWHERE), (LOCAL, ELSEWHERE, LOCAL)], ids=["owner", "peer", "reader"]
)
def test_agents_for_other_machines_can_be_reached_from_them(at):
    with closing(Agents(*at)) as agents:
        assert agents.exposed()


@pytest.fixture(autouse=True)
def no_devices_of_this_machine(monkeypatch):
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


def test_exposure_is_logged_once_for_each_worker(make_nixl, caplog):
    transport = make_nixl("owner", ELSEWHERE)
    transport.add_peer(PeerId(ELSEWHERE, 1), make_nixl("owner").describe())
    transport.describe()
    (line,) = [record.getMessage() for record in caplog.records if "exposed_socket" in record.getMessage()]
    assert "UCX" in line


@pytest.mark.parametrize(("devices", "is_told"), [("all", True), ("lo", False)])
def test_devices_of_the_environment_are_reported_if_they_are_more_than_loopback(
    make_nixl, caplog, monkeypatch, devices, is_told
):
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    make_nixl("owner", LOCAL)
    assert ("exposed_socket" in caplog.text) == is_told


def test_local_agents_are_no_exposure_to_log(make_nixl, caplog):
    make_nixl("owner").add_peer(PeerId(LOCAL, 1), make_nixl("owner").describe())
    assert "exposed_socket" not in caplog.text
