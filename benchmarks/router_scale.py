"""What a router costs per token and per stream, with a worker that emits tokens without computing.

    python benchmarks/router_scale.py [--streams 10 100 400 1200] [--step-ms 25] [--seconds 6] [--processes 1]
                                      [--turnover 0] [--json FILE]

Processes on this machine: the router as an operator starts it, or several behind one port; a worker that answers every prompt
with one token per step, in frames of up to 100 streams, as engines do; and this one, whose clients read streams of events and
do nothing with them. CPU time of all router processes (user and system, as the kernel counts it) over the tokens that the
clients received in the same seconds gives microseconds per token; one core carries as many tokens per second as that allows,
and N cores N times as many, if the figure does not grow with the number of processes. Relay: from the moment at which the
worker sends a token until a client has its event, by the clock that all processes share; with many streams this includes the
time in which the router, the worker and the clients share the cores. The last row drives 70 % of the tokens per second that one
core carries by the row of the most tokens; where the clients are too slow for that, its relay misses its goal. With
``--turnover`` so many streams a second are given up and as many begin, others than those whose relay is measured. Memory:
growth of the routers' resident set by open streams that get no token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from common import Machine, Outcome, Table, at_least, at_most, goal_notes, make_parser, publish
from emitting_worker import FIRST_TOKEN_ID, PROMPT_TOKENS

from kvferry.cluster_plan import free_port_ranges, free_ports

TOKENS_GOAL, RELAY_GOAL_MS, STREAM_GOAL_KB = 35_000.0, 10.0, 50.0
DRIVEN_SHARE = 0.7  # of the tokens per second that a core carries, at which the relay is judged
REACHED_SHARE = 0.95  # of these, for the relay to count
READY_TIMEOUT_S = 120.0
MAX_CONNECTIONS = 12_000
NUM_WATCHED = 20
MIN_REPLACEABLE = 2 * NUM_WATCHED  # of fewer streams all are watched
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What some streams at a time cost. Times are medians over events where they are not named otherwise."""

    num_streams: int
    tokens_per_s: float
    router_us_per_token: float
    relay_p50_ms: float
    relay_p99_ms: float
    relay_max_ms: float


class Client(asyncio.Protocol):
    """Sends one request and counts the events of its answer; ``times`` holds when each came, if it is a watched one."""

    def __init__(self, port: int, number: int, num_tokens: int, *, is_watched: bool) -> None:
        self.num_events = 0
        self.times: list[float] = []
        self.error = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_watched = is_watched
        self._is_accepted = False
        prompt = [FIRST_TOKEN_ID + number] * PROMPT_TOKENS
        body = json.dumps({"model": "bench", "prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._is_accepted:
            self._is_accepted = data.startswith(b"HTTP/1.1 200")
            self.error = b"" if self._is_accepted else data[:300]
        found = data.count(b"data: {")
        self.num_events += found
        if self.is_watched and found:
            self.times += [time.monotonic()] * found
        if b"data: [DONE]" in data:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        self._transport.abort()


@contextlib.contextmanager
def served(step_ms: float, model: str, num_processes: int) -> Iterator[tuple[int, Routers, subprocess.Popen[str]]]:
    """Start routers and worker; yield the port, the routers, and the worker."""
    (port,), (worker_ports,) = free_ports(1), free_port_ranges(1, num_processes)
    addresses = [f"tcp://127.0.0.1:{worker_port}" for worker_port in worker_ports]
    settings = {"router.port": port, "router.worker_address": addresses[0], "model.name": model, "model.served_name": "bench"}
    settings |= {
        "router.processes": num_processes,
        "log.level": "WARNING",
        "router.max_connections": MAX_CONNECTIONS,
        "router.max_connections_per_address": 0,
        "router.max_requests": MAX_CONNECTIONS,
    }
    assignments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with tempfile.TemporaryFile() as log:
        router = subprocess.Popen([sys.executable, "-m", "kvferry", "router", *assignments], stdout=log, stderr=log)
        emitter = subprocess.Popen(
            [sys.executable, "-c", "import emitting_worker; emitting_worker.main()", ",".join(addresses), str(step_ms)],
            cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            wait_until_ready(port, router, num_answers=1 if num_processes == 1 else 20 * num_processes)
            yield port, Routers(router.pid), emitter
        finally:
            for process in (emitter, router):
                process.terminate()
                process.wait(30)
            if router.returncode not in (0, -15):
                log.seek(0)
                print(log.read().decode()[-2000:], file=sys.stderr)


class Routers:
    """The router's process, or the one that keeps several, and all of these."""

    def __init__(self, pid: int) -> None:
        process = psutil.Process(pid)
        self._processes = [process, *process.children(recursive=True)]

    def cpu_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return float(sum(each.user + each.system for each in times))

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._processes)


def wait_until_ready(port: int, router: subprocess.Popen[bytes], num_answers: int) -> None:
    """Wait for so many answers in a row that say so: each may come from another process."""
    import httpx

    end, num_ready = time.monotonic() + READY_TIMEOUT_S, 0
    while time.monotonic() < end and router.poll() is None:
        try:
            is_ready = httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            is_ready = False
        num_ready = num_ready + 1 if is_ready else 0
        if num_ready == num_answers:
            return
        if not is_ready:
            time.sleep(0.1)
    raise RuntimeError("the router does not become ready")


async def load(
    port: int, routers: Routers, emitter: subprocess.Popen[str], num_streams: int, arguments: argparse.Namespace
) -> Found:
    """Open the streams, wait until all have tokens, and count for some seconds."""
    loop = asyncio.get_running_loop()
    num_tokens = int((arguments.seconds + 4 * SETTLE_S + 0.02 * num_streams) * 1e3 / arguments.step_ms)
    clients: list[Client] = []

    async def begin_stream(*, is_watched: bool) -> None:
        _, client = await loop.create_connection(
            lambda: Client(port, len(clients), num_tokens, is_watched=is_watched), "127.0.0.1", port
        )
        clients.append(client)

    async def replace_streams() -> None:
        others = (client for client in clients if not client.is_watched)  # new ones as well
        while True:
            await asyncio.sleep(1 / arguments.turnover)
            next(others).close()
            await begin_stream(is_watched=False)

    for number in range(num_streams):
        await begin_stream(is_watched=number % max(1, num_streams // NUM_WATCHED) == 0)
    end = time.monotonic() + READY_TIMEOUT_S
    while not all(client.num_events for client in clients):
        failed = [client.error for client in clients if client.error]
        if failed:
            raise RuntimeError(f"a stream failed: {failed[0]!r}")
        if time.monotonic() > end:
            raise RuntimeError(f"some of {num_streams} streams get no token: more than {MAX_CONNECTIONS} are not taken")
        await asyncio.sleep(0.05)
    replacing = asyncio.create_task(replace_streams()) if arguments.turnover else None
    await asyncio.sleep(SETTLE_S)
    begin, events, cpu = time.monotonic(), sum(client.num_events for client in clients), routers.cpu_s()
    await asyncio.sleep(arguments.seconds)
    elapsed, events = time.monotonic() - begin, sum(client.num_events for client in clients) - events
    cpu = routers.cpu_s() - cpu
    if replacing is not None:
        if replacing.done():
            replacing.result()  # its error
        replacing.cancel()
    for client in clients:
        client.close()
    await asyncio.gather(*(client.done for client in clients))
    sent = await asyncio.to_thread(times_of_steps, emitter)
    relays = sorted(
        1e3 * (when - sent[number][position])
        for number, client in enumerate(clients)
        for position, when in enumerate(client.times)
        if begin <= when <= begin + elapsed and position < len(sent.get(number, ()))
    )
    p50, p99 = relays[len(relays) // 2], relays[int(0.99 * len(relays))]
    return Found(num_streams, events / elapsed, 1e6 * cpu / events, p50, p99, relays[-1])


def times_of_steps(emitter: subprocess.Popen[str]) -> dict[int, list[float]]:
    """Return by the number of each stream when the worker sent its tokens, and have it forget them."""
    assert emitter.stdin is not None
    assert emitter.stdout is not None
    print("times", file=emitter.stdin, flush=True)
    return {int(number): times for number, times in json.loads(emitter.stdout.readline()).items()}


async def idle_stream_bytes(port: int, routers: Routers, num_streams: int) -> float:
    """Return the growth of the router's memory by a stream that waits for its first token."""
    loop = asyncio.get_running_loop()
    before, clients = routers.resident_bytes(), []
    for _ in range(num_streams):
        _, client = await loop.create_connection(lambda: Client(port, -1, 1_000_000, is_watched=False), "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(2 * SETTLE_S)
    grown = routers.resident_bytes() - before
    for client in clients:
        client.close()
    await asyncio.gather(*(client.done for client in clients))
    return grown / num_streams


def tokens_per_core(found: Sequence[Found]) -> float:
    """Return how many tokens per second a core carries, by the row of the most tokens."""
    return 1e6 / max(found, key=lambda one: one.tokens_per_s).router_us_per_token


def outcome(found: Sequence[Found], driven: Found, stream_bytes: float, num_processes: int) -> Outcome:
    columns = ("streams", "tokens/s", "router us per token", "tokens/s and core", "relay p50 ms", "p99 ms", "longest ms")
    rows = [
        [str(one.num_streams), f"{one.tokens_per_s:,.0f}", f"{one.router_us_per_token:.1f}",
         f"{1e6 / one.router_us_per_token:,.0f}",
         *(f"{ms:.1f}" for ms in (one.relay_p50_ms, one.relay_p99_ms, one.relay_max_ms))]
        for one in (*found, driven)
    ]  # fmt: skip
    per_core, relay = tokens_per_core(found), driven.relay_p99_ms
    share = driven.tokens_per_s / (num_processes * per_core)
    is_reached = share >= REACHED_SHARE * DRIVEN_SHARE
    relayed = at_most(
        f"p99 of the relay at {100 * share:.0f} % of that ({100 * DRIVEN_SHARE:.0f} % wanted)", relay, RELAY_GOAL_MS, "ms"
    )
    goals = [
        at_least("tokens per second and core", per_core, TOKENS_GOAL, "1/s"),
        relayed | {"met": relayed["met"] and is_reached},
        at_most("memory of an idle stream", stream_bytes / 1e3, STREAM_GOAL_KB, "KB"),
    ]
    notes = goal_notes(goals)
    streams = [asdict(one) for one in (*found, driven)]
    figures = {"streams": streams, "idle_stream_bytes": stream_bytes}
    return Outcome([Table(columns, rows)], notes, figures, goals)


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=1)
    parser.add_argument("--streams", type=int, nargs="+", default=(10, 100, 400, 1200), metavar="N")
    parser.add_argument("--step-ms", type=float, default=25.0, help="between two tokens of a stream (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="that are counted (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="of the router, behind one port (default: %(default)s)")
    parser.add_argument("--turnover", type=int, default=0, help="streams that end and begin per second (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.streams, arguments.seconds = (3,), 0.5
    if arguments.turnover and min(arguments.streams) < MIN_REPLACEABLE:
        parser.error(f"--turnover replaces none of less than {MIN_REPLACEABLE} streams: all of them are measured")
    machine, found = Machine.now(), []
    with served(arguments.step_ms, arguments.model, arguments.processes) as (port, routers, emitter):
        stream_bytes = asyncio.run(idle_stream_bytes(port, routers, 5 if arguments.quick else 300))
        for num_streams in arguments.streams:
            found.append(asyncio.run(load(port, routers, emitter, num_streams, arguments)))
        wanted_per_s = DRIVEN_SHARE * arguments.processes * tokens_per_core(found)
        num_driven = 5 if arguments.quick else round(wanted_per_s * arguments.step_ms / 1e3)
        driven = asyncio.run(load(port, routers, emitter, num_driven, arguments))
    publish(outcome(found, driven, stream_bytes, arguments.processes), machine, arguments)


if __name__ == "__main__":
    main()
