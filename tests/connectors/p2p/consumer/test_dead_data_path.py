"""Two real connectors whose data port is a black hole while their control connection works."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import create_transport
from connectors.p2p.transport.tcp_client import TcpTransport
from connectors.p2p.transport.tcp_server import TcpMetadata
from connectors.testing.connector_pair import PROMPT, Pair, Side
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection
from core.wire.sockets import join_tcp, split_tcp
from tests.support.polling import until
from tests.support.tcp_proxy import TcpProxy

TIMEOUT_S = 30.0


class ProxiedTransport(TcpTransport):
    """Tells readers the address of a proxy instead of its own."""

    proxy: TcpProxy | None = None

    def describe(self):
        truth = msgspec.msgpack.decode(super().describe(), type=TcpMetadata)
        self.proxy = TcpProxy(split_tcp(truth.address))
        return msgspec.msgpack.encode(msgspec.structs.replace(truth, address=join_tcp(*self.proxy.address)))

    def close(self):
        super().close()
        if self.proxy is not None:
            self.proxy.close()


class World:
    """A pair of connectors, and the proxy between their data ports."""

    def __init__(self, transports):
        self.registries = {role: CollectorRegistry() for role in ("prefill", "decode")}
        self.sides = {role: Side(role, P2PConnector(self.context(role, transports), self.create)) for role in self.registries}
        self.pair = Pair(self.sides["prefill"], self.sides["decode"])
        self.created = []
        self.num_loads = 0

    def context(self, role, transports):
        return connector_context(
            role,
            connector=ConnectorSection(
                transports=transports,
                transfer_deadline_s=10 * TIMEOUT_S,
                transfer_stall_s=1.0,
                transport_retry_s=0.1,
                transport_retry_max_s=0.2,
            ),
            metrics=self.registries[role],
        )

    def create(self, name, settings):
        if name != "tcp":
            return create_transport(name, settings)
        self.created.append(ProxiedTransport(settings.ids, settings.bind_address, settings.advertise_host, settings.keys))
        return self.created[-1]

    @property
    def proxy(self):
        (proxy,) = [transport.proxy for transport in self.created if transport.proxy is not None]
        return proxy

    async def load(self):
        """Make a handoff of a prompt, load it and release it; return how the load ended."""
        self.num_loads += 1
        name, prompt = f"r{self.num_loads}", [token + 1000 * self.num_loads for token in PROMPT]
        engine = self.pair.consumer.engine
        request = self.pair.load(name, prompt, self.pair.producer.engine.prefill(name, prompt))
        async with asyncio.timeout(TIMEOUT_S):
            await self.pair.ended(name)
            assert engine.loads[name].error or engine.has_content(request)
            if engine.loads[name].error:
                engine.abort(request)
            else:
                engine.finish(request)
            await self.pair.drained()
        return engine.loads[name]

    async def load_until(self, is_wanted):
        """Load one prompt after the other until one ends as wanted."""
        async with asyncio.timeout(TIMEOUT_S):
            while not is_wanted(ended := await self.load()):
                pass  # the back-off of a probe is over soon
        return ended

    def metric(self, name, **labels):
        return self.registries["decode"].get_sample_value(name, labels)


@pytest.fixture
async def make_world():
    worlds = []

    async def make(*transports):
        worlds.append(world := World(transports))
        for side in world.sides.values():
            await side.connector.start()
        return world

    yield make
    for world in worlds:
        for side in world.sides.values():
            await side.close()


def lines(caplog, name):
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(f"event={name} ")]


@pytest.mark.slow
async def test_handoffs_go_by_another_transport_while_the_data_port_is_dead(make_world, caplog):
    caplog.set_level("INFO")
    world = await make_world("tcp", "shm")
    assert (await world.load()).usage.transport == "tcp"
    world.proxy.silence()
    for _ in range(4):
        ended = await world.load()
        assert (ended.error, ended.usage.transport) == (None, "shm")
    assert world.metric("kvferry_kv_broken_transports", transport="tcp") == 1
    world.proxy.heal()
    await world.load_until(lambda ended: ended.usage.transport == "tcp")
    assert world.metric("kvferry_kv_broken_transports", transport="tcp") == 0
    assert world.metric("kvferry_kv_handoff_events_total", event="broken_transports") == 1
    (line,) = lines(caplog, "kv_transport_broken")
    assert "transport=tcp" in line
    assert len(lines(caplog, "kv_transport_restored")) == 1


async def test_a_data_connection_that_broke_while_idle_costs_no_handoff(make_world, caplog):
    caplog.set_level("INFO")
    world = await make_world("tcp")
    assert (await world.load()).error is None
    world.proxy.reset()
    await until(lambda: any("lost=tcp" in line for line in lines(caplog, "kv_transport")))
    assert (await world.load()).error is None
    assert world.metric("kvferry_kv_handoff_events_total", event="handshakes") == 2
    assert not lines(caplog, "kv_transport_broken")


@pytest.mark.slow
async def test_handoffs_are_refused_while_the_only_data_port_is_dead(make_world):
    world = await make_world("tcp")
    assert (await world.load()).error is None
    world.proxy.silence()
    assert (await world.load()).error.code == "deadline"
    for _ in range(3):
        ended = await world.load()
        assert ended.error.code == "peer_lost"
        assert "no transport to" in ended.error.message
    assert world.metric("kvferry_kv_handoff_events_total", event="loads_without_transport") == 3
    assert world.metric("kvferry_kv_transfer_failures_total", reason="peer_lost") == 3
    world.proxy.heal()
    ended = await world.load_until(lambda ended: ended.error is None)
    assert ended.usage.transport == "tcp"
    await world.pair.consumer.settle()
    assert world.pair.consumer.connector.num_quarantined_blocks() == 0
