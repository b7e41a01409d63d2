"""Two prefill and two decode servers behind our router and agents, with relays on the way of the blocks of ``p0``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx

from kvferry.cluster_plan import free_ports
from tests.support.routed_servers import RoutedServers
from tests.support.tcp_proxy import TcpProxy
from tests.support.vllm_pair import vllm_servers
from tests.support.vllm_server import VllmServer
from tests.vllm.http.fault_cluster import FaultCluster

NAMES = ("p0", "p1", "d0", "d1")
PATIENCE_S = 3.0
RELAY_HOST = "127.0.0.2"  # what peers of p0 connect to; it binds 127.0.0.1
_CONNECTOR = Path(__file__).parent / "relayed/relayed_connector.py"


class RelayedCluster(FaultCluster):
    """``relays``: ``control`` and ``data`` of ``p0``, which decode servers connect to."""

    def __init__(
        self,
        routed: RoutedServers,
        servers: Mapping[str, VllmServer],
        relays: Mapping[str, TcpProxy],
        folder: Path,
        model: Path,
    ) -> None:
        super().__init__(routed, servers)
        self.relays, self.folder, self.model = relays, folder, model

    @contextlib.contextmanager
    def silent(self, name: str) -> Iterator[None]:
        """Let nothing pass a relay until the end."""
        self.relays[name].silence()
        try:
            yield
        finally:
            self.relays[name].heal()

    @contextlib.contextmanager
    def paused(self, name: str, mode: str) -> Iterator[None]:
        """Pause the generation of a server until the end, as for an update of its weights."""
        url = self.servers[name].base_url
        httpx.post(f"{url}/pause", params={"mode": mode, "clear_cache": False}, timeout=60).raise_for_status()
        try:
            yield
        finally:
            httpx.post(f"{url}/resume", timeout=60).raise_for_status()

    @contextlib.contextmanager
    def without(self, *names: str) -> Iterator[None]:
        """Drain agents, and start them again at the end."""
        for name in names:
            assert self.routed.drain_agent(name) == 0
        try:
            yield
        finally:
            self.make_whole()


@contextlib.contextmanager
def relayed_cluster(folder: Path, model: Path, plugin: Mapping[str, Any]) -> Iterator[RelayedCluster]:
    """Start all, and end it. ``plugin`` are the settings of the plug-in by their full names."""
    control, data, *ports = free_ports(2 + 2 * len(NAMES))  # all at once: none of them is bound for a minute
    relayed = {"kvferry.port": control, "relayed.host": RELAY_HOST, "relayed.data_port": data}
    settings = {name: {**plugin, **(relayed if name == "p0" else {})} for name in NAMES}
    with contextlib.ExitStack() as stack:
        relayed_ports = {"control": control, "data": data}
        relays = {
            name: stack.enter_context(TcpProxy(("127.0.0.1", port), (RELAY_HOST, port))) for name, port in relayed_ports.items()
        }
        started = vllm_servers(folder, model, settings, _CONNECTOR, ports=ports, VLLM_SERVER_DEV_MODE="1")
        servers = stack.enter_context(started)
        roles = {name: (server, "prefill" if name[0] == "p" else "decode") for name, server in servers.items()}
        routed = stack.enter_context(RoutedServers(folder, model, roles, f"agent.patience_s={PATIENCE_S}"))
        yield RelayedCluster(routed, servers, relays, folder, model)
