"""Drives a workload against a server: a closed loop of N clients, or arrivals at given times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import httpx

from kvferry.bench.client import RequestResult, Target, send
from kvferry.bench.workload import BenchRequest


async def run_load(
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int | None,
    timeout_s: float,
    on_done: Callable[[RequestResult], None] = lambda _result: None,
) -> tuple[list[RequestResult], float]:
    """Send all requests at their arrival times, at most ``concurrency`` at once (None = no bound).

    A request that arrives while ``concurrency`` others are in flight waits, and its latency counts from its arrival: without
    the wait, an overloaded server would look fast (coordinated omission). In a closed loop, where all arrive at 0, it counts
    from the sending.

    Returns the results in the order of the requests, and the duration of the run in seconds.
    """
    gate = asyncio.Semaphore(concurrency or len(requests) or 1)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency or 256)
    async with httpx.AsyncClient(timeout=httpx.Timeout(timeout_s), limits=limits) as client:
        is_open_loop = any(request.arrival_s > 0 for request in requests)
        begin = time.perf_counter()

        async def one(request: BenchRequest) -> RequestResult:
            try:
                origin = begin + request.arrival_s if is_open_loop else time.perf_counter()
                result = await send(client, target, request, origin - begin, origin)
            finally:
                gate.release()
            on_done(result)
            return result

        tasks: dict[int, asyncio.Task[RequestResult]] = {}
        async with asyncio.TaskGroup() as group:
            for index in sorted(range(len(requests)), key=lambda index: requests[index].arrival_s):
                await asyncio.sleep(max(0.0, begin + requests[index].arrival_s - time.perf_counter()))
                await gate.acquire()  # here, so that nobody overtakes another that waits
                tasks[index] = group.create_task(one(requests[index]))
        results = [tasks[index].result() for index in range(len(requests))]
        return results, time.perf_counter() - begin
