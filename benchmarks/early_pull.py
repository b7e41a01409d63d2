"""Early pulls, old and new side by side: two clusters that differ in ``connector.early_pull`` alone, in one run.

Per transport each cluster has one prefill and one decode worker. Prompts of at least eight chunks go to the two in turn, each
with new tokens. *Exposed* is the decode worker's own time from the arrival of the finished prompt's request until all its KV
was verified (``usage.kv_transfer.exposed_ms``), on decode workers that do nothing else: beside a batch, both sides also wait
for the end of a step. Then prompts go to the two in turn while a fixed number of streams is decoded beside each: the batch is
the same with and without, and the mean gap between its tokens, from the arrival of the prompt to the end of its answer, is the
inter-token latency. The other cluster is idle meanwhile. Ratios are of neighbouring requests; the interval of their median is
from a bootstrap.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace

import httpx
from common import NothingMeasured, Outcome, Spread, Table, at_most, goal_notes

from core.config import load_config
from kvferry.bench.workload import SyntheticShape, synthetic_workload
from kvferry.local import LocalCluster

CHUNK_TOKENS = 128
IDLE_CHUNKS, BUSY_CHUNKS = 16, 8  # of the prompts to idle decode workers, and of those beside streams
CACHE_BYTES = "256MiB"  # few prompts: soon every block has been used before
NUM_STREAMS = 2
EXPOSED_GOALS = {"tcp": 0.20, "shm": 0.35, "nixl": 0.35}  # new / old, at most
ITL_GOAL = 1.03  # new / old, at most
REQUEST_TIMEOUT_S = 600.0
STREAMS_TIMEOUT_S = 60.0
NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Handoff:
    """One long prompt through one cluster."""

    exposed_ms: float
    early_tokens: int
    early_bytes: int
    transferred_bytes: int
    prefill_ms: float
    itl_ms: float = 0.0  # mean of the streams' gaps meanwhile
    itl_median_ms: float = 0.0
    num_streams: int = 0  # that had tokens meanwhile


@dataclass(slots=True)
class Pairs:
    """The handoffs of the two clusters, in pairs."""

    old: list[Handoff] = field(default_factory=list)
    new: list[Handoff] = field(default_factory=list)

    def ratios(self, name: str) -> list[float]:
        """Return new / old of a figure, pair by pair."""
        return [getattr(new, name) / getattr(old, name) for old, new in zip(self.old, self.new, strict=True)]


@dataclass(slots=True)
class Found:
    """One transport: handoffs to decode workers that are idle, and to those that decode streams."""

    idle: Pairs = field(default_factory=Pairs)
    busy: Pairs = field(default_factory=Pairs)


class Streams:
    """Requests that are decoded all the time, in a thread; ``gaps_ms`` returns the gaps between their tokens in a period."""

    def __init__(self, cluster: LocalCluster, model: str, prompt: Sequence[int]) -> None:
        self._url, self._model, self._prompt = f"{cluster.base_url}/v1/completions", model, list(prompt)
        self._arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(times,), daemon=True) for times in self._arrivals]

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        self._wait_for(lambda times: len(times) > 2)
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, times: list[float]) -> None:
        body = {"model": self._model, "prompt": self._prompt, "max_tokens": 1500, "ignore_eos": True, "stream": True}
        while not self._is_over.is_set():
            with httpx.stream("POST", self._url, json=body, timeout=REQUEST_TIMEOUT_S) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        times.append(time.perf_counter())
                    if self._is_over.is_set():
                        return

    def gaps_ms(self, start: float, end: float) -> tuple[list[float], int]:
        """Return all gaps that begin in a period, and how many streams had any; waits for the ends of the last ones."""
        self._wait_for(lambda times: times[-1] > end)
        gaps, num_streams = [], 0
        for times in self._arrivals:
            pairs = list(itertools.pairwise(list(times)))
            begun = [1e3 * (after - before) for before, after in pairs if start <= before <= end]
            num_streams += bool(begun)
            gaps += begun
        return gaps, num_streams

    def _wait_for(self, condition: Callable[[list[float]], bool]) -> None:
        deadline = time.monotonic() + STREAMS_TIMEOUT_S
        while not all(condition(times) for times in self._arrivals):
            if time.monotonic() > deadline:
                raise NothingMeasured(f"a stream had no token for {STREAMS_TIMEOUT_S} s")
            time.sleep(0.01)


class Side:
    """One cluster."""

    def __init__(self, cluster: LocalCluster, model: str) -> None:
        self.cluster = cluster
        self._url, self._model = f"{cluster.base_url}/v1/completions", model

    def hand_over(self, prompt: Sequence[int], streams: Streams | None = None) -> Handoff:
        """Send a prompt and return what became of its transfer, and of the streams meanwhile."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        response = httpx.post(self._url, json=body, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        usage = response.json()["usage"]["kv_transfer"]
        if usage["fallback_reason"]:
            raise RuntimeError(f"the prompt was not handed over: {usage}")
        prefill_ms = usage["timing"]["first_token"]["prefill_ms"]
        names = ("exposed_ms", "early_tokens", "early_bytes", "transferred_bytes")
        handoff = Handoff(**{name: usage[name] for name in names}, prefill_ms=prefill_ms)
        if streams is None:
            return handoff
        gaps, num_streams = streams.gaps_ms(start, time.perf_counter())
        if not gaps:
            raise NothingMeasured("no stream had tokens while a prompt was handed over")
        return replace(handoff, itl_ms=statistics.fmean(gaps), itl_median_ms=statistics.median(gaps), num_streams=num_streams)


def measure(arguments: argparse.Namespace) -> Outcome:
    """Measure every transport and return table and figures."""
    idle_chunks, repeats = (BUSY_CHUNKS, 1) if arguments.quick else (IDLE_CHUNKS, arguments.repeats)
    found = {name: _measure_transport(name, arguments.model, idle_chunks, repeats) for name in arguments.transports}
    return _outcome(found, idle_chunks)


def _measure_transport(name: str, model: str, idle_chunks: int, repeats: int) -> Found:
    settings = {
        "model.name": model,
        "model.dtype": "float32",
        "worker.cpu_threads": 1,
        "router.port": 0,
        "security.insecure": True,
        "cache.memory_bytes": CACHE_BYTES,
        "scheduler.max_num_batched_tokens": CHUNK_TOKENS,
        "connector.transports": [name],
    }
    found, seeds = Found(), itertools.count(1)
    with ExitStack() as stack:
        configs = [load_config(overrides=settings | {"connector.early_pull": is_new}) for is_new in (False, True)]
        sides = [Side(stack.enter_context(LocalCluster(config)), model) for config in configs]
        for side in sides:
            side.hand_over(_prompt(next(seeds), CHUNK_TOKENS * idle_chunks))  # connects, and is not counted
        for repeat in range(max(1, repeats - 1)):  # one less: a prompt takes twice as long, and its ratio spreads less
            for index in (0, 1) if repeat % 2 else (1, 0):
                handoff = sides[index].hand_over(_prompt(next(seeds), CHUNK_TOKENS * idle_chunks))
                (found.idle.new if index else found.idle.old).append(handoff)
        streamed = _prompt(next(seeds), 32)
        for repeat in range(repeats):
            for index in (0, 1) if repeat % 2 else (1, 0):
                with Streams(sides[index].cluster, model, streamed) as streams:
                    handoff = sides[index].hand_over(_prompt(next(seeds), CHUNK_TOKENS * BUSY_CHUNKS), streams)
                (found.busy.new if index else found.busy.old).append(handoff)
    return found


def _prompt(seed: int, num_tokens: int) -> tuple[int, ...]:
    shape = SyntheticShape(num_requests=1, prompt_low=num_tokens, prompt_high=num_tokens, output_low=2, output_high=2)
    (request,) = synthetic_workload(shape, seed)
    return tuple(token for token in request.prompt if isinstance(token, int))


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, by bootstrap with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(NUM_RESAMPLES))
    return medians[NUM_RESAMPLES // 40], medians[-NUM_RESAMPLES // 40]


def _num_streams(handoffs: Sequence[Handoff]) -> float:
    return statistics.median(handoff.num_streams for handoff in handoffs)


def goals(found: dict[str, Found]) -> list[dict[str, object]]:
    """Return the aims of every transport."""
    aims: list[dict[str, object]] = []
    for name, each in found.items():
        exposed, itl = each.idle.ratios("exposed_ms"), each.busy.ratios("itl_ms")
        for what, ratios, goal in (("exposed transfer", exposed, EXPOSED_GOALS[name]), ("ITL of streams", itl, ITL_GOAL)):
            aims.append(at_most(f"{name}: {what}, new / old", statistics.median(ratios), goal, "ratio"))
        old, new = _num_streams(each.busy.old), _num_streams(each.busy.new)
        aims.append(at_most(f"{name}: batch of the decode worker", new, old, "streams") | {"met": new == old})
    return aims


def _outcome(found: dict[str, Found], idle_chunks: int) -> Outcome:
    columns = (
        f"{idle_chunks} chunks of {CHUNK_TOKENS} tokens",
        "exposed old, ms",
        "exposed new, ms",
        "new / old",
        "95 %",
        "read early",
        "ITL old, ms",
        "new / old",
        "95 %",
        "streams old, new",
    )
    rows = []
    for name, each in found.items():
        exposed, itl = each.idle.ratios("exposed_ms"), each.busy.ratios("itl_ms")
        shares = [new.early_bytes / (new.early_bytes + new.transferred_bytes) for new in each.idle.new]
        rows.append(
            (
                name,
                Spread.of([old.exposed_ms for old in each.idle.old]).show(),
                Spread.of([new.exposed_ms for new in each.idle.new]).show(),
                Spread.of(exposed).show(0, 100) + " %",
                "{:.0f}..{:.0f} %".format(*(100 * end for end in interval(exposed))),
                Spread.of(shares).show(0, 100) + " %",
                Spread.of([old.itl_ms for old in each.busy.old]).show(),
                Spread.of(itl).show(3),
                "{:.3f}..{:.3f}".format(*interval(itl)),
                f"{_num_streams(each.busy.old):g}, {_num_streams(each.busy.new):g}",
            )
        )
    aims = goals(found)
    figures: dict[str, object] = {"transports": {name: asdict(each) for name, each in found.items()}}
    note = f"ITL: of {NUM_STREAMS} streams beside prompts of {BUSY_CHUNKS} chunks; one torch thread per worker"
    return Outcome([Table(columns, rows)], [*goal_notes(aims), note], figures, aims)
