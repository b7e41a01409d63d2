"""The cost of the way through router and HTTP, against the engine alone, on the same workloads, interleaved in one run.

    python benchmarks/through_router.py [--rounds 2] [--repeats 3] [--json FILE] [--markdown] [--quick]

Three sides, all with one torch thread per worker and the same settings:

* engine      ``EngineCore`` stepped by hand in a child process that is pinned to one core
* router      HTTP, through a cluster with one aggregated worker whose engine thread has that core; the router and the load
              generator share the last one
* 1P1D        HTTP, through a prefill and a decode worker, each with a core of its own; on two cores router and load generator
              have to share these, so read this as information and not as a ratio of software

Three cases:

* decode      one stream: prompt 128, then 64 tokens; time per token after the first (1P1D: the handoff is among them)
* throughput  16 prompts of 256 tokens, 64 tokens out, all sent at once; time until the last one ends
* prefill     one prompt of 1,024 tokens to its first token

Every repeat has new prompts (no prefix is cached), the same for all sides, and the side that goes first rotates. Figures are
medians (smallest..largest); ratios are medians of the ratios within a repeat. An idle side sleeps while another is measured.
Two processes that run the same code differ by a few per cent, for as long as they live; so each round starts all of them again,
in another order.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Protocol, Self

import psutil  # type: ignore[import-untyped]
import torch
from common import Machine, Outcome, Spread, Table, at_most, goal_notes, make_parser, publish

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import build_engine
from core.engine.core import EngineCore
from core.request import NewRequest
from core.wire.sampling import SamplingParams
from kvferry.bench.client import Target
from kvferry.bench.load import run_load
from kvferry.bench.workload import BenchRequest, SyntheticShape, synthetic_workload
from kvferry.local import ROUTER, LocalCluster

GOAL = 1.05  # through the router / engine
REQUEST_TIMEOUT_S = 600.0
CHILD_TIMEOUT_S = 600.0
Prompts = Sequence[tuple[int, ...]]
Seconds = dict[str, dict[str, list[float]]]  # by case and side


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the start of a case to its first token and to its end."""

    first_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """A workload, the figure that is made of its timing, and how it is shown."""

    kind: str
    num_streams: int
    num_prompt_tokens: int
    num_tokens: int  # per stream
    seconds: Callable[[Timing, Case], float]
    unit: str
    shown: Callable[[float, Case], float]  # seconds → what is shown, in ``unit``

    @property
    def name(self) -> str:
        streams = f"{self.num_streams} stream{'s' if self.num_streams > 1 else ''}"
        return f"{self.kind}: {streams}, {self.num_prompt_tokens:,} in, {self.num_tokens} out"

    def prompts(self, seed: int) -> Prompts:
        shape = SyntheticShape(
            num_requests=self.num_streams,
            prompt_low=self.num_prompt_tokens,
            prompt_high=self.num_prompt_tokens,
            output_low=self.num_tokens,
            output_high=self.num_tokens,
        )
        return [tuple(request.prompt) for request in synthetic_workload(shape, seed) if not isinstance(request.prompt, str)]


CASES = (
    Case(
        kind="decode",
        num_streams=1,
        num_prompt_tokens=128,
        num_tokens=64,
        seconds=lambda timing, case: (timing.total_s - timing.first_s) / (case.num_tokens - 1),
        unit="ms per token",
        shown=lambda seconds, case: seconds * 1e3,
    ),
    Case(
        kind="throughput",
        num_streams=16,
        num_prompt_tokens=256,
        num_tokens=64,
        seconds=lambda timing, case: timing.total_s,
        unit="tokens/s",
        shown=lambda seconds, case: case.num_streams * case.num_tokens / seconds,
    ),
    Case(
        kind="prefill",
        num_streams=1,
        num_prompt_tokens=1024,
        num_tokens=1,
        seconds=lambda timing, case: timing.first_s,
        unit="ms to the first token",
        shown=lambda seconds, case: seconds * 1e3,
    ),
)


def quick_cases() -> list[Case]:
    return [
        replace(case, num_prompt_tokens=32, num_tokens=min(4, case.num_tokens), num_streams=min(2, case.num_streams))
        for case in CASES
    ]


class Side(Protocol):
    """Something that answers prompts greedily, ``num_tokens`` tokens each."""

    def run(self, prompts: Prompts, num_tokens: int) -> Timing: ...


# ---- the engine alone ------------------------------------------------------------------------------------------------


class EngineSide:
    """An engine in a child process, pinned to a core like the engine thread of a worker."""

    def __init__(self, settings: Mapping[str, object], core: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=run_engine_child, args=(theirs, dict(settings), core), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()  # the model is loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()  # the child leaves at the end of its input
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def run(self, prompts: Prompts, num_tokens: int) -> Timing:
        self._connection.send((prompts, num_tokens))
        return self._receive()

    def _receive(self) -> Timing:
        if not self._connection.poll(CHILD_TIMEOUT_S):
            raise TimeoutError("the engine does not answer")
        timing = self._connection.recv()
        assert isinstance(timing, Timing)
        return timing


def run_engine_child(connection: Connection, settings: dict[str, object], core: int) -> None:
    """Answer (prompts, number of tokens) with the timing until the pipe is closed; the first message says that it can."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    engine = build_engine(load_config(overrides=settings), SystemClock()).engine
    connection.send(Timing(0.0, 0.0))
    with contextlib.suppress(EOFError):
        for number in itertools.count():
            prompts, num_tokens = connection.recv()
            connection.send(time_engine(engine, f"case{number}", prompts, num_tokens))
    engine.shutdown()


def time_engine(engine: EngineCore, name: str, prompts: Prompts, num_tokens: int) -> Timing:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
    num_seen, token_at = 0, []
    begin = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(NewRequest(request_id=f"{name}/{number}", prompt_token_ids=prompt, sampling=sampling))
    while engine.has_work():
        outputs = engine.step()
        if outputs:
            token_at.append(time.perf_counter())
            num_seen += sum(len(output.new_token_ids) for output in outputs)
    check_count(num_seen, prompts, num_tokens)
    return Timing(token_at[0] - begin, token_at[-1] - begin)


def check_count(num_seen: int, prompts: Prompts, num_tokens: int) -> None:
    if num_seen != len(prompts) * num_tokens:
        raise RuntimeError(f"{num_seen} tokens came back instead of {len(prompts)} x {num_tokens}")


# ---- through HTTP ----------------------------------------------------------------------------------------------------


class ClusterSide:
    """A local cluster under the load generator of ``kvferry bench``, which runs in this process."""

    def __init__(self, cluster: LocalCluster, model: str) -> None:
        self._cluster = cluster
        self._target = Target(base_url=cluster.base_url, model=model)

    def run(self, prompts: Prompts, num_tokens: int) -> Timing:
        requests = [BenchRequest(0.0, prompt, num_tokens) for prompt in prompts]
        load = run_load(self._target, requests, concurrency=len(requests), timeout_s=REQUEST_TIMEOUT_S)
        results, duration_s = asyncio.run(load)
        for result in results:
            if result.error or result.ttft_s is None:
                raise RuntimeError(f"a request failed: {result.error}")
        check_count(sum(result.num_output_tokens for result in results), prompts, num_tokens)
        first_s = min(result.ttft_s or 0.0 for result in results)
        # Of a single request the last token counts, not the end of the response.
        total_s = first_s + sum(results[0].itl_s) if len(results) == 1 else duration_s
        return Timing(first_s, total_s)

    def pin(self, worker_core: int, router_core: int, warm_up: Callable[[], object]) -> None:
        """Put the worker's engine thread, the one that ``warm_up`` keeps busy, on one core and the router on another."""
        (worker,) = self._cluster.workers
        process = psutil.Process(worker.pid)
        before = cpu_times_by_thread(process)
        warm_up()
        spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in cpu_times_by_thread(process).items()}
        os.sched_setaffinity(max(spent, key=lambda thread: spent[thread]), {worker_core})
        for thread in psutil.Process(self._cluster.pids[ROUTER]).threads():
            os.sched_setaffinity(thread.id, {router_core})


def cpu_times_by_thread(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


# ---- the benchmark ---------------------------------------------------------------------------------------------------


def measure(sides: Mapping[str, Side], cases: Sequence[Case], repeats: int, seed: int) -> Seconds:
    """Return the seconds of every case by case and side. One more repeat before the others is not counted."""
    found: Seconds = {case.name: {name: [] for name in sides} for case in cases}
    names = list(sides)
    for repeat in range(repeats + 1):
        for number, case in enumerate(cases):
            prompts = case.prompts(seed + 100 * repeat + number)
            for position in range(len(names)):
                name = names[(repeat + position) % len(names)]
                timing = sides[name].run(prompts, case.num_tokens)
                if repeat:
                    found[case.name][name].append(case.seconds(timing, case))
    return found


def run_round(model: str, cases: Sequence[Case], repeats: int, number: int) -> Seconds:
    """Start all sides, the engine first in every other round, measure them, and end them."""
    settings: dict[str, object] = {"model.name": model, "model.dtype": "float32", "cache.memory_bytes": 512 << 20}
    settings |= {"worker.cpu_threads": 1, "router.port": 0}
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        engine = stack.enter_context(EngineSide(settings, cores[0])) if number % 2 == 0 else None
        aggregated = LocalCluster(load_config(overrides=settings | {"local.aggregated": True}))
        router = ClusterSide(stack.enter_context(aggregated), model)
        pair = ClusterSide(stack.enter_context(LocalCluster(load_config(overrides=settings))), model)
        engine = engine or stack.enter_context(EngineSide(settings, cores[0]))
        os.sched_setaffinity(0, {cores[-1]})
        router.pin(cores[0], cores[-1], lambda: router.run(cases[1].prompts(seed=-1), cases[1].num_tokens))
        return measure({"engine": engine, "router": router, "1P1D": pair}, cases, repeats, seed=10_000 * number)


def merge(rounds: Sequence[Seconds]) -> Seconds:
    return {
        case: {name: [value for each in rounds for value in each[case][name]] for name in sides}
        for case, sides in rounds[0].items()
    }


def make_outcome(cases: Sequence[Case], found: Mapping[str, Mapping[str, Sequence[float]]]) -> Outcome:
    rows, goals = [], []
    for case in cases:
        seconds = found[case.name]
        shown = {name: Spread.of([case.shown(value, case) for value in values]).show() for name, values in seconds.items()}
        ratios = {name: Spread.of_ratios(values, seconds["engine"]) for name, values in seconds.items()}
        cells = (cell for name in ("router", "1P1D") for cell in (shown[name], ratios[name].show(3)))
        rows.append((case.name, case.unit, shown["engine"], *cells))
        goals.append(at_most(f"{case.name}: time through the router / engine", ratios["router"].median, GOAL, "ratio"))
    columns = ("case", "unit", "engine", "router", "router / engine, time", "1P1D", "1P1D / engine, time")
    notes = (
        *goal_notes(goals),
        "1P1D is information",
        "one torch thread per engine; medians (smallest..largest), ratios within a repeat",
    )
    return Outcome([Table(columns, rows)], notes, {"seconds": found}, goals)


def main() -> None:
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--rounds", type=int, default=2, help="how often all processes are started anew (default: %(default)s)")
    arguments = parser.parse_args()
    machine = Machine.now()
    cases = quick_cases() if arguments.quick else list(CASES)
    num_rounds, repeats = (1, 1) if arguments.quick else (arguments.rounds, arguments.repeats)
    found = merge([run_round(arguments.model, cases, repeats, number) for number in range(num_rounds)])
    publish(make_outcome(cases, found), machine, arguments)


if __name__ == "__main__":
    main()
