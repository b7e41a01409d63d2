"""How long ``kvferry serve`` takes until it serves, and what its processes cost while idle.

    python benchmarks/cluster.py [--transports shm tcp nixl] [--repeats 3] [--idle-s 10] [--json FILE] [--markdown] [--quick]

Start: seconds from the start of the process until it says where it serves, which it does once the router and every worker are
ready; the router's ``/ready`` is asked then. The model is in the cache (fetched before, if need be) and its file in memory. The
CPU time of all processes until then says what the start would take at least on these cores with nothing beside it.

Memory: the resident set of a decode worker with a pool of 128 MiB, for each dtype, when it is ready and after a handoff over
``tcp``. Over ``shm`` it would also hold the mapped pool of the other worker, which is the same memory a second time.

Idle: after one request with a handoff, so that every connection stands, the CPU time of each process over some seconds
(user + system, as the kernel counts it), as a share of one core; and that of the busiest thread of the process, which with
``nixl`` is the library's progress thread. The last cluster of each transport is measured.
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import httpx
import psutil  # type: ignore[import-untyped]
from common import Machine, Outcome, Spread, Table, at_most, make_parser, publish

from core.config_types import default_cache_dir
from core.model.hub import resolve_model

TRANSPORTS = ("shm", "tcp", "nixl")
START_GOAL_S = 6.0
POOL_BYTES = 128 << 20
MEMORY_GOALS = {"float32": 1.0e9, "bfloat16": 0.75e9}  # resident bytes of a worker with that pool
IDLE_GOAL = 0.01  # of a core, per worker, with shm and tcp
STOP_TIMEOUT_S = 60.0
SETTLE_S = 2.0
REQUEST_TIMEOUT_S = 300.0
ROLES = ("router", "prefill", "decode")


@dataclass(frozen=True, slots=True)
class Idle:
    """CPU time of one idle process, as a share of one core."""

    role: str
    share: float
    busiest_thread_share: float
    num_threads: int


@dataclass(frozen=True, slots=True)
class Served:
    """A running ``kvferry serve``."""

    process: psutil.Process
    base_url: str
    start_s: float
    start_cpu_s: float  # of all processes


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a decode worker."""

    dtype: str
    ready: int
    after_handoff: int


@contextlib.contextmanager
def serve(model: str, transport: str, *settings: str) -> Iterator[Served]:
    """Run ``kvferry serve`` until the end of the block.

    Raises:
        RuntimeError: it ended instead of serving, or is not ready when it says so.
    """
    command = [sys.executable, "-m", "kvferry", "serve", "--port", "0", "--model", model, "--transport", transport]
    command += ["--log-level", "ERROR", "--set", "worker.cpu_threads=1"]
    command += [part for setting in settings for part in ("--set", setting)]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            base_url = wait_until_serving(process.stdout)
            start_s = time.perf_counter() - begin
            if httpx.get(f"{base_url}/ready").status_code != http.client.OK:
                raise RuntimeError("the cluster says that it serves, but is not ready")
            supervisor = psutil.Process(process.pid)
            start_cpu_s = sum(cpu_times(each)[0] for each in (supervisor, *supervisor.children()))
            yield Served(supervisor, base_url, start_s, start_cpu_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()  # its children die with it


def wait_until_serving(stdout: IO[str] | None) -> str:
    """Read the line ``serving MODEL at URL/v1 (...)`` and return the URL."""
    for line in stdout or ():
        words = line.split()
        if words[:1] == ["serving"]:
            return next(word for word in words if word.startswith("http")).removesuffix("/v1")
    raise RuntimeError("kvferry serve ended before it served")


def make_one_handoff(base_url: str, model: str, transport: str) -> None:
    body = {"model": model, "prompt": list(range(1000, 1100)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{base_url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
    response.raise_for_status()
    used = response.json()["usage"]["kv_transfer"]["transport"]
    if used != transport:
        raise RuntimeError(f"the blocks went by {used} instead of {transport}")


def measure_memory(model: str, dtype: str) -> Memory:
    with serve(model, "tcp", f"model.dtype={dtype}", f"cache.memory_bytes={POOL_BYTES}") as served:
        (worker,) = (child for child in served.process.children() if role_of(child) == "decode")
        ready = worker.memory_info().rss
        make_one_handoff(served.base_url, model, "tcp")
        return Memory(dtype, ready, worker.memory_info().rss)


def measure_idle(supervisor: psutil.Process, idle_s: float) -> list[Idle]:
    processes = {role_of(child): child for child in supervisor.children()}
    before = {role: cpu_times(process) for role, process in processes.items()}
    begin = time.perf_counter()
    time.sleep(idle_s)
    found = []
    for role in ROLES:
        total, threads = cpu_times(processes[role])
        elapsed = time.perf_counter() - begin
        total_before, threads_before = before[role]
        busiest = max(seconds - threads_before.get(thread, 0.0) for thread, seconds in threads.items())
        found.append(Idle(role, (total - total_before) / elapsed, busiest / elapsed, len(threads)))
    return found


def role_of(process: psutil.Process) -> str:
    """Return what a child does: the command behind ``python -P -m kvferry``."""
    arguments: list[str] = process.cmdline()
    return arguments[arguments.index("kvferry") + 1]


def cpu_times(process: psutil.Process) -> tuple[float, dict[int, float]]:
    """Return the seconds of CPU that the process and each of its threads have used."""
    times = process.cpu_times()
    return times.user + times.system, {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def make_outcome(
    starts: Mapping[str, Sequence[tuple[float, float]]],
    memory: Sequence[Memory],
    idle: Mapping[str, Sequence[Idle]],
    idle_s: float,
) -> Outcome:
    start_rows = [
        (name, *(Spread.of(seconds).show() for seconds in zip(*each, strict=True)), f"{START_GOAL_S:g}")
        for name, each in starts.items()
    ]
    memory_rows = [
        (each.dtype, f"{each.ready / 1e9:.3f}", f"{each.after_handoff / 1e9:.3f}", f"{MEMORY_GOALS[each.dtype] / 1e9:g}")
        for each in memory
    ]
    idle_rows = [
        (
            f"{name}, {each.role}",
            f"{100 * each.share:.2f} %",
            f"{100 * each.busiest_thread_share:.2f} %",
            str(each.num_threads),
            f"{100 * IDLE_GOAL:.0f} %" if name != "nixl" and each.role != "router" else "",
        )
        for name, processes in idle.items()
        for each in processes
    ]
    tables = (
        Table(("start of 1P1D", "seconds until it serves", "of CPU, all processes", "goal, at most"), start_rows),
        Table(("decode worker, pool of 128 MiB", "GB resident, ready", "after a handoff", "goal, at most"), memory_rows),
        Table(("idle process", "share of a core", "busiest thread", "threads", "goal, below"), idle_rows),
    )
    notes = (f"idle for {idle_s:g} s; one torch thread per worker; start: median (smallest..largest)",)
    figures: dict[str, object] = {
        "start_s": {name: [seconds for seconds, _ in each] for name, each in starts.items()},
        "start_cpu_s": {name: [cpu_s for _, cpu_s in each] for name, each in starts.items()},
        "memory": [asdict(each) for each in memory],
        "idle": {name: [asdict(each) for each in processes] for name, processes in idle.items()},
    }
    return Outcome(tables, notes, figures, goals(starts, memory, idle))


def goals(
    starts: Mapping[str, Sequence[tuple[float, float]]], memory: Sequence[Memory], idle: Mapping[str, Sequence[Idle]]
) -> list[dict[str, object]]:
    """Return each goal with what was measured: the median start, the memory after a handoff, the share of a core."""
    values = [(f"start over {name}", statistics.median(s for s, _ in each), START_GOAL_S, "s") for name, each in starts.items()]
    values += [(f"memory in {each.dtype}", each.after_handoff, MEMORY_GOALS[each.dtype], "bytes") for each in memory]
    values += [
        (f"idle {each.role} with {name}", each.share, IDLE_GOAL, "cores")
        for name, processes in idle.items()
        for each in processes
        if name != "nixl" and each.role != "router"
    ]
    return [at_most(*value) for value in values]


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long to watch idle processes (default: %(default)s)")
    arguments = parser.parse_args()
    machine = Machine.now()
    repeats, idle_s = (1, 1.0) if arguments.quick else (arguments.repeats, arguments.idle_s)
    resolve_model(arguments.model, Path(default_cache_dir()))
    starts: dict[str, list[tuple[float, float]]] = {name: [] for name in arguments.transports}
    idle: dict[str, list[Idle]] = {}
    for repeat in range(repeats):
        for name in arguments.transports:
            with serve(arguments.model, name) as served:
                starts[name].append((served.start_s, served.start_cpu_s))
                if repeat == repeats - 1:
                    make_one_handoff(served.base_url, arguments.model, name)
                    time.sleep(SETTLE_S)
                    idle[name] = measure_idle(served.process, idle_s)
    memory = [measure_memory(arguments.model, dtype) for dtype in MEMORY_GOALS]
    publish(make_outcome(starts, memory, idle, idle_s), machine, arguments)


if __name__ == "__main__":
    main()
