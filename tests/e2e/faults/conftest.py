"""Clusters in which faults are made: the cells of the matrix, the networks between processes, and what must hold afterwards.

A test asks for the fixture ``faulty`` and says by ``@pytest.mark.quick_on(cell)`` on which transport ``make test`` runs it;
``make test-full`` runs it on all. A plan (``fault_connector.py``) tells the workers which reads go wrong; processes are killed
and stopped by signals, networks are cut by proxies. A test waits for states, which it sees in traces and metrics; nothing
sleeps and hopes.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config_router import RouterSection
from kvferry.cluster_plan import free_ports
from kvferry.local import ROUTER, LocalCluster, LocalWorker, ProcessOptions
from tests.support import shared_memory
from tests.support.streaming_client import Stream
from tests.support.tcp_proxy import TcpProxy
from tests.support.transport_cells import CELLS, HELD

MODEL = "smollm2-135m"
LEASE_S = 3.0
DEADLINE_S = 10.0
HEARTBEAT_TIMEOUT_S = RouterSection().heartbeat_timeout_s
SLACK_S = 10.0  # what a loaded machine adds to a bound of the protocol
_POLL_S = 0.05
_COMMON = (
    "connector.name=fault_connector:make_connector",
    "cache.block_size=16",
    f"connector.transfer_deadline_s={DEADLINE_S}",
    f"connector.lease_s={LEASE_S}",
    "connector.lease_renew_interval_s=0.5",
    "connector.max_quarantined_blocks=55",  # no fence but those that a test means
    "router.heartbeat_timeout_s=7",
    "local.restart_backoff_max_s=0.5",
)
PROFILES: Mapping[str, Sequence[str]] = {
    "two pairs": ("local.num_prefill=2", "local.num_decode=2", "cache.num_blocks=48"),
    # Leases end long before deadlines, though readers believe otherwise; a few prompts use every block of a pool.
    "one reader": (
        "local.num_prefill=2",
        "connector.lease_s=1.5",
        "connector.extra.boastful_leases=true",
        "connector.transfer_deadline_s=60",
        "connector.kv_verify=digest",
        "cache.num_blocks=28",
    ),
    # Proxies between the processes, see ``Network``; the router's heartbeat is the default one.
    "network": ("local.num_decode=2", "cache.num_blocks=48", f"router.heartbeat_timeout_s={HEARTBEAT_TIMEOUT_S}"),
    # Prompts are read by decode workers chunk by chunk.
    "early pulls": (
        "local.num_prefill=2",
        "local.num_decode=2",
        "cache.num_blocks=96",
        "scheduler.max_num_batched_tokens=64",
        "connector.early_pull=true",
    ),
    # Deadlines end long before ZeroMQ notices that the other end of a connection is gone.
    "short deadlines": ("connector.transfer_deadline_s=3", "cache.num_blocks=48"),
}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "quick_on(cell): the transport on which `make test` runs this fault")
    config.addinivalue_line("markers", "profile(name): the cluster that this fault needs, default 'two pairs'")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run every fault on every transport; all but one of them in the full matrix only."""
    if "fault_cluster" not in metafunc.fixturenames:
        return
    (quick_on,) = metafunc.definition.get_closest_marker("quick_on").args
    profile = metafunc.definition.get_closest_marker("profile")
    name = profile.args[0] if profile else "two pairs"
    cells = [pytest.param((cell, name), id=cell, marks=() if cell == quick_on else (pytest.mark.full,)) for cell in CELLS]
    metafunc.parametrize("fault_cluster", cells, indirect=True, scope="session")


# ---- a network that can be cut ---------------------------------------------------------------------------------------


class Network:
    """Proxies between the processes of a cluster: from each worker to the router, and from decode workers to ``prefill-0``.

    ``data`` is what carries blocks by transport tcp; those of the others go another way.
    """

    def __init__(self, proxies: contextlib.ExitStack) -> None:
        self._router, control, data = [("127.0.0.1", port) for port in free_ports(3)]
        self.control = proxies.enter_context(TcpProxy(control, ("127.0.0.2", control[1])))
        self.data = proxies.enter_context(TcpProxy(data, ("127.0.0.2", data[1])))
        names = ("prefill-0", "decode-0", "decode-1")
        self.to_router = {name: proxies.enter_context(TcpProxy(self._router)) for name in names}

    @property
    def router_address(self) -> str:
        """Where the router itself is."""
        return f"tcp://127.0.0.1:{self._router[1]}"

    def worker_settings(self) -> dict[str, dict[str, object]]:
        """Return what makes the workers talk through the proxies: other ports of the router, another host of the owner."""
        owner = {
            "control_address": f"tcp://127.0.0.1:{self.control.address[1]}",
            "data_port": self.data.address[1],
            "advertise_host": self.control.address[0],
        }
        routers = {name: (f"tcp://127.0.0.1:{proxy.address[1]}",) for name, proxy in self.to_router.items()}
        return {name: {"router_addresses": found} | (owner if name == "prefill-0" else {}) for name, found in routers.items()}

    def heal(self) -> None:
        """Let everything through again."""
        for proxy in (self.control, self.data, *self.to_router.values()):
            proxy.heal()


# ---- the cluster -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class FaultCluster:
    """A running cluster whose workers load the fault connector, and the folder by which they get their commands."""

    cell: str
    cluster: LocalCluster
    folder: Path
    corpus: Sequence[int]
    check_tokens: Callable[[Sequence[int], Sequence[int]], None]
    eventually: Callable[..., None]
    lease_s: float
    deadline_s: float
    network: Network | None  # of profile "network"
    name: str = ""  # of the test
    measured: list[tuple[str, object]] = field(default_factory=list)  # further lines of its report
    _epochs: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _salts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _plan: dict[str, Any] = field(default_factory=dict)
    _epoch_at: float = 0.0

    # ---- faults ------------------------------------------------------------------------------------------------------

    def plan(self, **faults: Any) -> None:
        """Number the reads of every decode worker from the start again, and let these go wrong.

        ``late``, ``stall``, ``corrupt``, ``fail`` and ``refuse`` are lists of numbers, ``ignore_cancel`` is a flag.
        """
        self._epoch_at = time.monotonic()
        self._write({"epoch": next(self._epochs), **faults})

    def end_deadlines(self) -> None:
        """Let the deadlines of all loads of this moment pass; kept and stalled reads stay so."""
        self._write({**self._plan, "end_deadlines": True})

    def let_go(self) -> float:
        """Let kept and stalled reads continue; the numbering stays. Returns when."""
        at = time.monotonic()
        self._write({key: self._plan[key] for key in ("epoch", "ignore_cancel") if key in self._plan})
        return at

    def _write(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        draft = self.folder / "draft"
        draft.write_text(json.dumps(plan))
        draft.replace(self.folder / "decode.json")

    def trace(self, event: str) -> list[dict[str, Any]]:
        """Return what decode workers noted since the plan was made, each with ``worker`` and ``pid``."""
        found = []
        for path in self.folder.glob("*.trace"):
            for line in path.read_text().splitlines(keepends=True):
                note = json.loads(line) if line.endswith("\n") else {}
                if note.get("event") == event and note["at"] >= self._epoch_at:
                    found.append(note | {"worker": path.stem})
        return sorted(found, key=lambda note: note["at"])

    def wait_for(self, event: str, timeout_s: float = 30.0) -> dict[str, Any]:
        """Wait until a decode worker notes the event, and return its first note."""
        self.eventually(lambda: self.trace(event), f"event {event!r} of a read", timeout_s)
        return self.trace(event)[0]

    def hang(self, name: str) -> float:
        """Let the engine of a worker hang; the rest of the process lives. Returns when."""
        at = time.monotonic()
        (self.folder / f"{name}.hang").touch()
        return at

    def unhang(self) -> None:
        """Let every engine continue."""
        for command in self.folder.glob("*.hang"):
            command.unlink()

    def squeeze(self, name: str) -> None:
        """Let a worker's pool have no block for a running request, once."""
        (self.folder / f"{name}.squeeze").touch()

    def was_squeezed(self, name: str) -> bool:
        """Return True if a worker has refused a request blocks as it was told; take the command back if not."""
        command = self.folder / f"{name}.squeeze"
        was_done = not command.exists()
        command.unlink(missing_ok=True)
        return was_done

    def kill(self, name: str, number: int) -> float:
        """Send a signal; returns when."""
        at = time.monotonic()
        self.cluster.kill(name, number)
        return at

    def has_restarted(self, name: str, pid: int) -> bool:
        """Return True if another process of this name serves."""
        with contextlib.suppress(KeyError, OSError):
            address = self.cluster.base_url if name == ROUTER else self.cluster.worker(name).ops_address
            return self.cluster.pids[name] != pid and _status(f"{address}/ready") == http.client.OK
        return False

    def wait_for_restart(self, name: str, pid: int) -> None:
        """Wait until another process of this name serves."""
        self.eventually(lambda: self.has_restarted(name, pid), f"restart of {name}", 120.0)

    def num_members(self, role: str) -> float:
        """Return how many workers of a role the router has."""
        return self.samples(ROUTER)["kvferry_workers", role]

    def wait_for_members(self, role: str, number: int) -> None:
        """Wait until the router has so many workers of a role."""
        self.eventually(lambda: self.num_members(role) == number, f"{number} {role} workers")

    # ---- requests ----------------------------------------------------------------------------------------------------

    def start(self, num_prompt_tokens: int = 120, max_tokens: int = 12, *, offset: int = 0, **fields: Any) -> Stream:
        """Send a request whose prompt no worker has in its cache."""
        body = {
            "model": MODEL,
            "prompt": self.corpus[offset : offset + num_prompt_tokens],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "cache_salt": f"{self.name}-{next(self._salts)}",
            **fields,
        }
        return Stream(self.cluster.base_url, body)

    def wait_for_tokens(self, stream: Stream, number: int) -> None:
        self.eventually(lambda: len(stream.token_ids) >= number or stream.has_ended, f"{number} tokens")
        assert len(stream.token_ids) >= number, (stream.status, stream.error, stream.broken)

    def assert_correct(self, stream: Stream, num_tokens: int = 12) -> None:
        """Hold a whole answer against the oracle."""
        stream.result()
        assert (stream.status, stream.error, stream.broken) == (200, None, "")
        assert (stream.is_done, stream.finish_reason, len(stream.token_ids)) == (True, "length", num_tokens)
        self.check_tokens(stream.prompt, stream.token_ids)

    # ---- what the cluster shows --------------------------------------------------------------------------------------

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a process's metrics: (name, label value, ...) → value."""
        families = text_string_to_metric_families(self.cluster.metrics(name))
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}

    def gauge(self, worker: str, name: str) -> float:
        """Return a gauge of a worker."""
        return self.samples(worker)[(name,)]

    def gauges(self, role: str, name: str) -> dict[str, float]:
        """Return a gauge of every worker of this role, by the worker's name."""
        return {worker.engine_id: self.gauge(worker.engine_id, name) for worker in self._workers(role)}

    def holder(self) -> str:
        """Wait until a prefill worker holds blocks for a reader, and return its name."""
        return self.busy("prefill", "kvferry_kv_leased_blocks")

    def busy(self, role: str, gauge: str) -> str:
        """Wait until a gauge of a worker of this role is not 0, and return the worker's name."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [worker for worker, value in self.gauges(role, gauge).items() if value]
            return bool(found)

        self.eventually(look, f"{gauge} of a {role} worker", 30.0)
        return found[0]

    def wait_for_steps(self, worker: str, number: int) -> None:
        """Wait until the engine of a worker has made so many more steps."""
        steps = self.gauge(worker, "kvferry_engine_steps_total")
        self.eventually(lambda: self.gauge(worker, "kvferry_engine_steps_total") >= steps + number, f"{number} steps")

    def held_leases(self) -> float:
        """Return how many blocks the prefill workers hold for readers."""
        return sum(self.gauges("prefill", "kvferry_kv_leased_blocks").values())

    def held(self) -> dict[str, float]:
        """Return every gauge of the workers that counts something held.

        A worker that is starting holds nothing, nor one that has ended; one that does not answer may hold anything.
        """
        found: dict[str, float] = {}
        for worker in self.cluster.workers:
            try:
                if _status(f"{worker.ops_address}/started") != http.client.OK:
                    continue
                samples = self.samples(worker.engine_id)
            except (OSError, http.client.HTTPException, KeyError):  # KeyError: it has ended
                if self.cluster.pids.get(worker.engine_id) == worker.pid:
                    found[f"{worker.engine_id}: no answer"] = math.nan
                continue
            found |= {f"{worker.engine_id}:{name}": samples[name,] for name in HELD if samples[name,]}
        return found

    def measure(self, what: str, seconds: float) -> None:
        """Note a duration for the table that the run prints at its end."""
        self.measured.append(("measured", (self.name, self.cell, what, seconds)))

    def assert_released(self, since: float | None = None, what: str = "fault to nothing held") -> None:
        """Wait until no process holds anything any more, within lease and deadline of a fault, else of now.

        ``since`` is when the fault was made; how long it took from there is noted as ``what``.
        """
        bound_s = self.lease_s + self.deadline_s + SLACK_S
        began = time.monotonic() if since is None else since
        while left := self.held():
            assert time.monotonic() < began + bound_s, f"still held {bound_s:g} s after the fault: {left}"
            time.sleep(_POLL_S)
        if since is not None:
            self.measure(what, time.monotonic() - since)

    def assert_settled(self) -> None:
        """Hold the cluster against what must be true after every fault: whole, healthy, nothing held, and it serves."""
        self.plan()
        self.cluster.wait_until_ready()
        self.assert_released()
        for address in (self.cluster.base_url, *(worker.ops_address for worker in self.cluster.workers)):
            assert _status(f"{address}/health") == http.client.OK
        self.assert_correct(self.start(40, 4), 4)
        self.assert_released()

    def _workers(self, role: str) -> list[LocalWorker]:
        return [worker for worker in self.cluster.workers if worker.role == role]


def _status(url: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=2)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    finally:
        connection.close()


@contextlib.contextmanager
def leaving_nothing(others: Sequence[LocalCluster]) -> Iterator[None]:
    """Fail if the processes that live inside leave one of them, shared memory, or a listening socket.

    Those of ``others``, the clusters that live at the moment, come and go as they like.
    """
    before, shared_before = _left_behind(others), shared_memory.files()
    known = {child.pid for child in _children(others)}
    yield
    psutil.wait_procs([child for child in _children(others) if child.pid not in known], timeout=20)
    assert _left_behind(others) == before
    assert not shared_memory.left_since(shared_before)


def _children(others: Sequence[LocalCluster]) -> list[psutil.Process]:
    theirs = {pid for cluster in others for pid in cluster.pids.values()}
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child.pid not in theirs:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                found += [child, *child.children(recursive=True)]
    return found


def _left_behind(others: Sequence[LocalCluster]) -> tuple[set[int], set[int]]:
    children = _children(others)
    listening = {
        connection.laddr.port
        for process in (psutil.Process(), *children)
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    return {child.pid for child in children}, listening


@pytest.fixture(scope="session")
def live_clusters() -> list[LocalCluster]:
    """The clusters of this session that run at the moment."""
    return []


@pytest.fixture(scope="session")
def fault_cluster(
    request, live_clusters, cluster_config, tmp_path_factory, corpus, assert_token_identical
) -> Iterator[FaultCluster]:
    """A supervised cluster on one transport, shared by all faults that need one like it."""
    cell, profile = request.param
    transport, environment = CELLS[cell]
    folder = tmp_path_factory.mktemp(f"faults-{cell}")
    settings = [*_COMMON, *PROFILES[profile], f"connector.transports=[{transport}]", f"connector.extra.faults={folder}"]
    import_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    options = ProcessOptions(environment={"PYTHONPATH": import_path, **environment}, keep_control_ports=True)
    failures_before = request.session.testsfailed
    with contextlib.ExitStack() as stack:
        network = None
        if profile == "network":
            network = Network(stack)
            settings.append(f"router.worker_address={network.router_address}")
            options = replace(options, workers=network.worker_settings())
        config = cluster_config(*settings)
        stack.enter_context(leaving_nothing(live_clusters))
        cluster = stack.enter_context(LocalCluster(config, supervise=True, log_dir=folder / "logs", options=options))
        live_clusters.append(cluster)
        stack.callback(live_clusters.remove, cluster)
        yield FaultCluster(
            cell=cell,
            cluster=cluster,
            folder=folder,
            corpus=corpus,
            check_tokens=assert_token_identical,
            eventually=request.getfixturevalue("eventually"),
            lease_s=config.connector.lease_s,
            deadline_s=config.connector.transfer_deadline_s,
            network=network,
        )
    if request.session.testsfailed > failures_before:
        for path in sorted((folder / "logs").glob("*.log")):
            print(f"---- {path.name}\n{path.read_text(errors='replace')[-6000:]}")


@pytest.fixture
def faulty(request, fault_cluster: FaultCluster) -> Iterator[FaultCluster]:
    """The cluster for one fault; after the test it must be as if nothing had been."""
    fault_cluster.name, fault_cluster.measured = request.node.originalname, request.node.user_properties
    fault_cluster.plan()
    yield fault_cluster
    if fault_cluster.network is not None:
        fault_cluster.network.heal()
    fault_cluster.unhang()
    for name in fault_cluster.cluster.pids:
        _thaw(fault_cluster.cluster, name)
    fault_cluster.assert_settled()


def _thaw(cluster: LocalCluster, name: str) -> None:
    process = psutil.Process(cluster.pids[name])
    if process.status() == psutil.STATUS_STOPPED:
        process.resume()
