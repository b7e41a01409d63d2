"""``vllm serve`` with the plug-in, alone and behind our router and agents; several files share them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.vllm_pair import vllm_pair, write_served_model
from tests.support.vllm_server import VllmServer
from tests.vllm.conftest import settings
from tests.vllm.http.relayed_cluster import RelayedCluster, relayed_cluster

HTTP_LEASE_S = 6.0
HTTP_DEADLINE_S = 20.0  # no load fails here, however busy the machine is


@pytest.fixture(scope="session")
def served_model(tmp_path_factory) -> Path:
    """Return the folder of a tiny model with a tokenizer."""
    return write_served_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def servers(tmp_path_factory, served_model) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Yield two ``vllm serve`` with the plug-in from its wheel, P and D, which serve."""
    plugin = settings("tcp", lease_s=HTTP_LEASE_S, transfer_deadline_s=HTTP_DEADLINE_S, transfer_stall_s=HTTP_DEADLINE_S)
    with vllm_pair(tmp_path_factory.mktemp("http"), served_model, plugin) as pair:
        yield pair


@pytest.fixture(scope="session")
def lasting_fault_cluster(tmp_path_factory, served_model) -> Iterator[RelayedCluster]:
    """Yield two prefill and two decode servers with their router, and relays before the plug-in of ``p0``."""
    with relayed_cluster(tmp_path_factory.mktemp("four"), served_model, settings("tcp", lease_s=HTTP_LEASE_S)) as cluster:
        yield cluster


@pytest.fixture
def faulty(lasting_fault_cluster, request) -> Iterator[RelayedCluster]:
    """Yield these servers; afterwards they are whole and hold nothing."""
    lasting_fault_cluster.name, lasting_fault_cluster.measured = request.node.name, request.node.user_properties
    yield lasting_fault_cluster
    lasting_fault_cluster.make_whole()
    lasting_fault_cluster.assert_whole()
