"""What a router costs per token and per stream, with a worker that emits tokens without computing.

    python benchmarks/router_scale.py [--streams 10 100 1000] [--step-ms 25] [--seconds 6] [--json FILE] [--markdown] [--quick]

Three processes on this machine: the router as an operator starts it, a worker that answers every prompt with one token per
step for all streams in one frame, as an engine does, and this one, whose clients read streams of events and do nothing with
them. CPU time of the router's process (user and system, as the kernel counts it) over the tokens that its clients received in
the same seconds gives microseconds per token; one core carries as many tokens per second as that allows. Relay: from the moment
at which the worker sends a token until a client has its event, by the clock that all processes share; with many streams this
includes the time in which the router, the worker and the clients share the cores. Memory: growth of the router's resident set
by open streams that get no token.
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
from typing import Any

import psutil  # type: ignore[import-untyped]
from common import Machine, Outcome, Table, make_parser, publish
from emitting_worker import FIRST_TOKEN_ID, PROMPT_TOKENS

from kvferry.cluster_plan import free_ports

TOKENS_GOAL, RELAY_GOAL_MS, STREAM_GOAL_KB = 35_000.0, 10.0, 50.0
READY_TIMEOUT_S = 120.0
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """What some streams at a time cost. Times are medians over events where they are not named otherwise."""

    num_streams: int
    tokens_per_s: float
    router_us_per_token: float
    relay_p50_ms: float
    relay_p99_ms: float


class Client(asyncio.Protocol):
    """Sends one request and counts the events of its answer; ``times`` holds when each came, if it is a watched one."""

    def __init__(self, port: int, number: int, num_tokens: int, *, is_watched: bool) -> None:
        self.num_events = 0
        self.times: list[float] = []
        self.error = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_watched = is_watched
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
        if self._is_watched and found:
            self.times += [time.monotonic()] * found
        if b"data: [DONE]" in data:
            self._transport.close()

    def connection_lost(self, _: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def close(self) -> None:
        self._transport.abort()


@contextlib.contextmanager
def served(step_ms: float, model: str) -> Iterator[tuple[int, psutil.Process, subprocess.Popen[str]]]:
    """Start router and worker; yield the port, the router's process, and the worker."""
    port, worker_port = free_ports(2)
    address = f"tcp://127.0.0.1:{worker_port}"
    settings = {"router.port": port, "router.worker_address": address, "model.name": model, "model.served_name": "bench"}
    settings |= {
        "log.level": "WARNING",
        "router.max_connections": 12_000,
        "router.max_connections_per_address": 0,
        "router.max_requests": 12_000,
    }
    assignments = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    with tempfile.TemporaryFile() as log:
        router = subprocess.Popen([sys.executable, "-m", "kvferry", "router", *assignments], stdout=log, stderr=log)
        emitter = subprocess.Popen(
            [sys.executable, "-c", "import emitting_worker; emitting_worker.main()", address, str(step_ms)],
            cwd=Path(__file__).parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            wait_until_ready(port, router)
            yield port, psutil.Process(router.pid), emitter
        finally:
            for process in (emitter, router):
                process.terminate()
                process.wait(30)
            if router.returncode not in (0, -15):
                log.seek(0)
                print(log.read().decode()[-2000:], file=sys.stderr)


def wait_until_ready(port: int, router: subprocess.Popen[bytes]) -> None:
    import httpx

    end = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end and router.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError("the router does not become ready")


async def load(
    port: int, router: psutil.Process, emitter: subprocess.Popen[str], num_streams: int, arguments: argparse.Namespace
) -> Found:
    """Open the streams, wait until all have tokens, and count for some seconds."""
    loop = asyncio.get_running_loop()
    num_tokens = int((arguments.seconds + 4 * SETTLE_S + 0.02 * num_streams) * 1e3 / arguments.step_ms)
    clients = []
    for number in range(num_streams):
        watched = number % max(1, num_streams // 20) == 0
        _, client = await loop.create_connection(
            lambda number=number, watched=watched: Client(port, number, num_tokens, is_watched=watched), "127.0.0.1", port
        )
        clients.append(client)
    while not all(client.num_events for client in clients):
        failed = [client.error for client in clients if client.error]
        if failed:
            raise RuntimeError(f"a stream failed: {failed[0]!r}")
        await asyncio.sleep(0.05)
    await asyncio.sleep(SETTLE_S)
    begin, events, cpu = time.monotonic(), sum(client.num_events for client in clients), cpu_s(router)
    await asyncio.sleep(arguments.seconds)
    elapsed, events = time.monotonic() - begin, sum(client.num_events for client in clients) - events
    cpu = cpu_s(router) - cpu
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
    return Found(num_streams, events / elapsed, 1e6 * cpu / events, relays[len(relays) // 2], relays[int(0.99 * len(relays))])


def times_of_steps(emitter: subprocess.Popen[str]) -> dict[int, list[float]]:
    """Return by the number of each stream when the worker sent its tokens, and have it forget them."""
    assert emitter.stdin is not None
    assert emitter.stdout is not None
    print("times", file=emitter.stdin, flush=True)
    return {int(number): times for number, times in json.loads(emitter.stdout.readline()).items()}


async def idle_stream_bytes(port: int, router: psutil.Process, num_streams: int) -> float:
    """Return the growth of the router's memory by a stream that waits for its first token."""
    loop = asyncio.get_running_loop()
    before, clients = router.memory_info().rss, []
    for _ in range(num_streams):
        _, client = await loop.create_connection(lambda: Client(port, -1, 1_000_000, is_watched=False), "127.0.0.1", port)
        clients.append(client)
    await asyncio.sleep(2 * SETTLE_S)
    grown = router.memory_info().rss - before
    for client in clients:
        client.close()
    await asyncio.gather(*(client.done for client in clients))
    return grown / num_streams


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def outcome(found: Sequence[Found], stream_bytes: float) -> Outcome:
    columns = ("streams", "tokens/s", "router us per token", "tokens/s and core", "relay p50 ms", "p99 ms")
    rows = [
        [str(one.num_streams), f"{one.tokens_per_s:,.0f}", f"{one.router_us_per_token:.1f}",
         f"{1e6 / one.router_us_per_token:,.0f}", f"{one.relay_p50_ms:.1f}", f"{one.relay_p99_ms:.1f}"]
        for one in found
    ]  # fmt: skip
    most = max(found, key=lambda one: one.tokens_per_s)
    per_core = 1e6 / most.router_us_per_token
    in_reach = [one for one in found if one.tokens_per_s <= 0.75 * per_core]
    relay = max(in_reach or found[:1], key=lambda one: one.tokens_per_s).relay_p99_ms
    goals: list[dict[str, Any]] = [
        {"name": "tokens per second and core", "value": per_core, "goal": TOKENS_GOAL, "unit": "1/s",
         "met": per_core >= TOKENS_GOAL},
        {"name": "p99 of the relay at up to three quarters of that", "value": relay, "goal": RELAY_GOAL_MS, "unit": "ms",
         "met": relay <= RELAY_GOAL_MS},
        {"name": "memory of an idle stream", "value": stream_bytes / 1e3, "goal": STREAM_GOAL_KB, "unit": "KB",
         "met": stream_bytes / 1e3 <= STREAM_GOAL_KB},
    ]  # fmt: skip
    notes = [f"{goal['name']}: {goal['value']:,.1f} {goal['unit']} (goal {goal['goal']:,.0f}): "
             f"{'met' if goal['met'] else 'MISSED'}" for goal in goals]  # fmt: skip
    figures = {"goals": goals, "streams": [asdict(one) for one in found], "idle_stream_bytes": stream_bytes}
    return Outcome([Table(columns, rows)], notes, figures)


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=1)
    parser.add_argument("--streams", type=int, nargs="+", default=(10, 100, 400), metavar="N")
    parser.add_argument("--step-ms", type=float, default=25.0, help="between two tokens of a stream (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=6.0, help="that are counted (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.streams, arguments.seconds = (3,), 0.5
    machine, found = Machine.now(), []
    with served(arguments.step_ms, arguments.model) as (port, router, emitter):
        stream_bytes = asyncio.run(idle_stream_bytes(port, router, 5 if arguments.quick else 300))
        for num_streams in arguments.streams:
            found.append(asyncio.run(load(port, router, emitter, num_streams, arguments)))
    publish(outcome(found, stream_bytes), machine, arguments)


if __name__ == "__main__":
    main()
