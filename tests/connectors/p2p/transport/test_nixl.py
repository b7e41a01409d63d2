import dataclasses
import os
import subprocess
import sys
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from connectors.p2p.transport.interface import PeerId, RowRegion
from connectors.p2p.transport.nixl import NixlTransport, installed_module
from connectors.testing.torn_read_suite import RewrittenRowsSuite
from connectors.testing.transport_suite import TransportSuite
from core.errors import PeerUnreachable
from core.ids import RandomIds
from core.kv.seals import SEAL_BYTES

pytestmark = pytest.mark.slow

FACTORIES = Path(__file__).with_name("transport_factories.py")
OVER_TCP = Path(__file__).with_name("nixl_over_tcp.py")


class TestNixlTransport(TransportSuite):
    factory = f"{FACTORIES}:make_nixl"


class TestNixlOverRewrittenRows(RewrittenRowsSuite):
    factory = f"{FACTORIES}:make_nixl"


@pytest.mark.gpu
class TestNixlOnGpu(TransportSuite):
    """Rows lie in video memory on both ends: by CUDA IPC between the processes."""

    factory = f"{FACTORIES.with_name('device_factories.py')}:make_nixl_on_gpu"


LOAD = f"""
from pathlib import Path
from connectors.testing.transport_owner import HostRows, load_factory
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


def test_a_reader_has_an_agent_per_peer_and_none_beside_them(agents, make_nixl):
    owners = [make_nixl("owner").describe() for _ in range(2)]
    assert [name.partition("-")[0] for name in agents] == ["owner", "owner"]
    reader = make_nixl("reader")
    for incarnation, metadata in enumerate(owners):
        reader.add_peer(PeerId("tcp://127.0.0.1:1", incarnation), metadata)
    assert [name.partition("-")[0] for name in agents[2:]] == ["reader", "reader"]
    assert len(set(agents)) == 4


def test_an_owner_that_reads_as_well_has_an_agent_for_each(agents, make_nixl):
    other = make_nixl("other").describe()
    both = make_nixl("both")
    both.add_peer(PeerId("tcp://127.0.0.1:1", 1), other)
    both.describe()
    assert both.describe() == both.describe()
    assert sum(name.startswith("both") for name in agents) == 2


# ---- a library that fails


class FakeError(Exception):
    """The library's exception."""


class FakeXfer:
    """As the library's: it knows its agent, and keeps it alive."""

    def __init__(self, agent):
        self.agent = agent

    def release(self):
        self.agent.plan("release")


class FakeAgent:
    """Transfers nothing. ``plan(call)`` returns the state that a call reports, or raises."""

    def __init__(self, plan):
        self.plan = plan
        self.itself = self  # a cycle: only the collector frees it
        self.registered, self.lists = [], []

    def get_agent_metadata(self):
        return b"agent"

    def add_remote_agent(self, metadata):
        return b"owner"

    def prep_xfer_dlist(self, name, rows, mem_type):
        self.lists.append((name, mem_type, [tuple(map(int, row)) for row in rows]))
        return (self, name)

    def make_prepped_xfer(self, *descriptors):
        self.plan("make")
        return FakeXfer(self)

    def transfer(self, xfer):
        return self.plan("transfer")

    def check_xfer_state(self, xfer):
        return self.plan("check")

    def create_backend(self, *anything):
        pass

    def register_memory(self, entries, mem_type, backends):
        self.registered.append((mem_type, *entries))


class FakeLibrary:
    """Agents in the order in which they were made, held weakly; ``answers`` says what calls report, "PROC" if nothing."""

    def __init__(self):
        self.agents = []
        self.answers = {}

    def make_agent(self, name, config):
        agent = FakeAgent(self.plan)
        self.agents.append(weakref.ref(agent))
        return agent

    def plan(self, call):
        answer = self.answers.get(call, "PROC")
        if answer == "raise":
            raise FakeError(call)
        return answer


@pytest.fixture
def library(monkeypatch):
    library, package = FakeLibrary(), ModuleType("nixl_cu12")
    package.__spec__ = ModuleSpec("nixl_cu12", None)
    api, bindings = ModuleType("nixl_cu12._api"), ModuleType("nixl_cu12._bindings")
    api.nixl_agent, api.nixl_agent_config = library.make_agent, SimpleNamespace
    api.nixlBind = SimpleNamespace(nixlAgent=None)
    for name in ("nixlBackendError", "nixlMismatchError", "nixlInvalidParamError", "nixlNotAllowedError"):
        setattr(bindings, name, FakeError)
    for module in (package, api, bindings):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library


def on_device(device, base_address, num_rows=4):
    """Return the regions of a worker whose pool is on a device."""
    seals = RowRegion(0x1000, 2 * num_rows, SEAL_BYTES, memoryview(bytearray(2 * num_rows * SEAL_BYTES)))
    return [RowRegion(base_address, num_rows, 256, device=device), seals]


def test_a_pool_on_a_gpu_is_video_memory_on_both_sides_and_seals_are_not(library):
    owner, reader = NixlTransport(RandomIds(), "owner"), NixlTransport(RandomIds(), "reader")
    owner.register(on_device("cuda:1", 0x7000))
    reader.register(on_device("cuda:0", 0x9000))
    owning, reading = (agent() for agent in library.agents)
    assert owning.registered == [("VRAM", (0x7000, 1024, 1, "")), ("DRAM", (0x1000, 8 * SEAL_BYTES, 0, ""))]
    reader.add_peer(PeerId("tcp://127.0.0.1:1", 1), owner.describe())
    ours, theirs, our_seals, their_seals = reading.lists
    assert ours == ("", "VRAM", [(0x9000 + 256 * row, 256, 0) for row in range(4)])
    assert theirs == ("owner", "VRAM", [(0x7000 + 256 * row, 256, 1) for row in range(4)])
    assert (our_seals[1], their_seals[1]) == ("DRAM", "DRAM")
    owner.close()
    reader.close()


def test_agent_for_loopback_is_gone_when_one_for_the_network_takes_its_place(library):
    transport = NixlTransport(RandomIds(), "reader")
    transport.register(on_device("cpu", 0x7000))
    (spare,) = library.agents
    metadata = transport.describe()
    assert spare() is not None, "the owner has it"
    transport.close()
    transport.register(on_device("cpu", 0x7000))
    transport.add_peer(PeerId("tcp://10.0.0.7:5600", 1), metadata)
    assert [agent() is None for agent in library.agents] == [True, True, False]
    transport.close()


def test_reads_between_gpus_are_looked_at_sooner(library):
    waits = {}
    for device in ("cpu", "cuda:0"):
        transport = NixlTransport(RandomIds(), device)
        regions = on_device(device, 0x7000)
        transport.register(regions)
        transport.add_peer(FIRST, transport.describe())
        transport.post_read(FIRST, 0, [0], [1])
        waits[device] = [transport.max_wait_s()]
        for _ in range(10):
            transport.poll()
        waits[device].append(transport.max_wait_s())
        transport.close()
    assert waits["cuda:0"][0] < waits["cpu"][0]
    assert waits["cuda:0"][1] < waits["cpu"][1]


def test_reads_of_a_fenced_peer_end_once_the_device_has_done_its_copies(library):
    pool, seals = on_device("cuda:0", 0x7000)
    transport = NixlTransport(RandomIds(), "reader")
    seen = []

    def synchronize():
        agents_are_gone = all(agent() is None for agent in library.agents[1:])
        seen.append((agents_are_gone, transport.poll()))

    transport.register([dataclasses.replace(pool, synchronize=synchronize), seals])
    transport.add_peer(FIRST, transport.describe())
    handle = transport.post_read(FIRST, 0, [0], [1])
    transport.remove_peer(FIRST)
    assert seen == [(True, [])]
    (ended,) = transport.poll()
    assert (ended.handle, type(ended.error)) == (handle, PeerUnreachable)
    transport.close()


def test_library_for_the_newer_cuda_is_taken_where_both_are_installed(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    assert installed_module() == "nixl_cu13"


FIRST, SECOND = PeerId("first", 1), PeerId("second", 1)


@pytest.fixture
def reader(library, make_nixl):
    """A reader of two peers, whose agents are the last two that were made."""
    metadata = make_nixl("owner").describe()
    reader = make_nixl("reader")
    for peer in (FIRST, SECOND):
        reader.add_peer(peer, metadata)
    return reader


@pytest.mark.parametrize(
    ("call", "answer"), [("transfer", "raise"), ("transfer", "ERR"), ("make", "raise"), ("check", "raise"), ("check", "ERR")]
)
def test_a_failed_read_is_reported_when_its_peer_is_fenced_and_no_sooner(library, reader, call, answer):
    agent, other = library.agents[-2:]
    handles = {reader.post_read(FIRST, 0, [row], [row]) for row in (0, 1)}
    untouched = reader.post_read(SECOND, 0, [0], [0]) if call != "check" else None
    assert reader.poll() == []
    library.answers[call] = answer
    if call != "check":
        handles.add(reader.post_read(FIRST, 0, [0], [0]))
    results = reader.poll()
    assert agent() is None, "something of the peer could still write"
    assert {result.handle for result in results} == handles
    assert all(isinstance(result.error, PeerUnreachable) for result in results)
    assert other() is not None
    library.answers.clear()
    with pytest.raises(PeerUnreachable):
        reader.post_read(FIRST, 0, [0], [0])
    assert untouched not in {result.handle for result in reader.poll()}
    reader.remove_peer(FIRST)
    reader.add_peer(FIRST, reader.describe())
    library.answers["transfer"] = "DONE"
    again = reader.post_read(FIRST, 0, [0], [0])
    assert [(result.handle, result.error) for result in reader.poll()] == [(again, None)]


def test_a_read_that_cannot_be_released_fences_its_peer(library, reader):
    library.answers |= {"transfer": "DONE", "release": "raise"}
    handle = reader.post_read(FIRST, 0, [0], [0])
    (result,) = reader.poll()
    assert (result.handle, type(result.error)) == (handle, PeerUnreachable)
    assert library.agents[-2]() is None


@pytest.mark.full
def test_the_suite_passes_over_tcp_between_owner_and_reader():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "60", str(OVER_TCP)]
    environment = os.environ | {"UCX_TLS": "tcp"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stdout
