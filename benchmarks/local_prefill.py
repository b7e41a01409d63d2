"""Prompts that decode workers compute themselves: what they gain and cost, on request traces, in a simulation.

    python benchmarks/local_prefill.py --traces DIR                  # all set-ups, under both cost models, 3 seeds
    python benchmarks/local_prefill.py --traces DIR --limit 2000     # the first requests only
    python benchmarks/local_prefill.py --traces DIR --model mocker   # one cost model

Runs the router's own functions (``router.routing``): cost of a placement, backlog, and the decision for a local prefill, once
with ``router.local_prefill_itl_ms`` and once without, with the same arrivals. The prefill workers are those of
``routing_simulation.py``. A decode worker adds up to 2,048 tokens of a local prompt to a step, and holds contexts of 300,000
tokens. Its steps take 14 ms + 0.05 ms per request + 0.05 us per token of context under the first cost model (``qwen``), and
5.74 + 54.01 u - 25.74 u^2 ms under the second (``mocker``), where contexts take the share u of its capacity. A handoff takes
8 ms and the time of its bytes, at 25 or 64 GB/s. Exact times and contents. The traces are those of ``routing.py``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from common import Table, at_most, goal_notes, quantile
from cost_models import CONTEXT_TOKENS, MODELS, CostModel
from routing_simulation import PrefillMs, PrefillWorker

from kvferry.advise.trace import TraceRequest, read_trace, spread_arrivals
from router.routing.backlog import Backlog, QueuedPrompt
from router.routing.cost import score
from router.routing.local import LocalPrompt, StepTime, finish_ms, pays

NUM_BLOCKS = 6000
CHUNK_TOKENS = 2048
COLUMNS = (
    "set-up, trace",
    "workers, speed",
    "local",
    "mean TTFT ms",
    "ratio",
    "in SLO, change",
    "ITL p99 ms",
    "ratio of it",
    "without steps of local prompts",
)
MOST_WORSE = 0.02  # the goal: nothing is worse by more


@dataclass(frozen=True, slots=True)
class SetUp:
    """How many workers of each role serve which trace, at which multiple of its own speed, under which cost model."""

    model: str
    name: str
    trace: str
    num_prefill: int
    num_decode: int
    speed: float


SET_UPS = (
    SetUp("qwen", "prefill-bound", "conversation", 3, 6, 0.6),
    SetUp("qwen", "decode-bound", "conversation", 6, 2, 1.0),
    SetUp("qwen", "balanced", "conversation", 6, 4, 1.0),
    SetUp("qwen", "prefill-bound", "synthetic", 3, 6, 0.7),
    SetUp("qwen", "decode-bound", "synthetic", 6, 1, 0.6),
    SetUp("mocker", "prefill-bound", "conversation", 3, 12, 2.4),
    SetUp("mocker", "decode-bound", "conversation", 6, 6, 4.0),
    SetUp("mocker", "balanced", "conversation", 6, 12, 4.0),
    SetUp("mocker", "prefill-bound", "synthetic", 3, 12, 2.4),
    SetUp("mocker", "decode-bound", "synthetic", 6, 3, 2.4),
)


@dataclass(slots=True)
class Served:
    """One request on its way: its output and what is reserved for it at its decode worker."""

    number: int
    request: TraceRequest
    arrival_ms: float
    num_new: int = 0  # of a local prompt: tokens to compute
    hit: int = 0
    num_done: int = 0  # of these

    @property
    def num_reserved(self) -> int:
        return self.request.num_tokens + self.request.num_output_tokens


@dataclass(slots=True)
class Results:
    """What one run measured."""

    prefill_ms: PrefillMs
    ttft_ms: list[float] = field(default_factory=list)
    num_ok: int = 0
    num_local: int = 0
    itl_ms: dict[float, int] = field(default_factory=dict)  # rounded to 0.1 ms: how many
    plain_itl_ms: dict[float, int] = field(default_factory=dict)  # those of steps without a local prompt

    def note_first(self, served: Served, now: float) -> None:
        ttft = now - served.arrival_ms
        self.ttft_ms.append(ttft)
        self.num_ok += ttft <= max(2000.0, 1.5 * self.prefill_ms(served.request.num_tokens, 0))

    def note_step(self, step_ms: float, num_running: int, *, is_plain: bool) -> None:
        rounded = round(step_ms, 1)
        for counts in (self.itl_ms, self.plain_itl_ms) if is_plain else (self.itl_ms,):
            counts[rounded] = counts.get(rounded, 0) + num_running


def p99_of(counts: Mapping[float, int]) -> float:
    """Return the 99th percentile of values that occur so many times."""
    left = 0.01 * sum(counts.values())
    for value in sorted(counts, reverse=True):
        left -= counts[value]
        if left <= 0:
            return value
    return 0.0


class DecodeWorker:
    """Generates tokens of all its requests at once, and computes one local prompt beside them."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.cache = PrefillWorker(0, NUM_BLOCKS)
        self.num_present = 0  # requests that were sent here: loading, waiting or running
        self.reserved_until: dict[int, float] = {}  # by request, when its prompt is predicted to be computed elsewhere
        self.num_reserved = 0  # tokens of all requests that were placed here
        self.num_admitted = 0  # tokens of those that run
        self.waiting: deque[Served] = deque()
        self.ends: list[tuple[int, int, Served]] = []  # (number of its last step, number of the request, request)
        self.num_steps = 0
        self.kv_tokens = 0
        self.local: Served | None = None
        self.is_stepping = False
        self.step = StepTime()

    def reserve(self, served: Served) -> None:
        """Count a request that was placed here."""
        self.num_reserved += served.num_reserved

    def free(self, served: Served) -> None:
        """Forget a request that has ended."""
        self.num_present -= 1
        self.num_reserved -= served.num_reserved
        self.num_admitted -= served.num_reserved
        self.kv_tokens -= served.request.num_tokens + max(1, served.request.num_output_tokens - 1)

    def admit(self) -> None:
        """Let waiting requests in as long as there is room for them."""
        while self.waiting and self.num_admitted + self.waiting[0].num_reserved <= CONTEXT_TOKENS:
            self.begin(self.waiting.popleft())

    def begin(self, served: Served) -> None:
        """Generate the tokens of a request whose prompt is here."""
        self.num_admitted += served.num_reserved
        self.kv_tokens += served.request.num_tokens
        self.cache.store(served.request.blocks)
        last = self.num_steps + max(1, served.request.num_output_tokens - 1)
        heapq.heappush(self.ends, (last, served.number, served))

    def step_ms(self) -> float:
        """Return the time of the next step, with a chunk of the local prompt."""
        running = self.model.step_ms(len(self.ends), self.kv_tokens) if self.ends else 0.0
        if self.local is None:
            return running
        chunk, before = min(CHUNK_TOKENS, self.local.num_new - self.local.num_done), self.local.hit + self.local.num_done
        self.local.num_done += chunk
        alone = self.model.prefill_ms(chunk, before)
        return running + alone - (self.model.prefill_ms(0, 0) if running else 0.0)


class Run:
    """One simulation. ``max_itl_ms`` = 0: no local prefill."""

    def __init__(self, set_up: SetUp, requests: Sequence[TraceRequest], max_itl_ms: float) -> None:
        self.set_up, self.requests, self.max_itl_ms = set_up, requests, max_itl_ms
        self.model = MODELS[set_up.model]
        self.prefills = [PrefillWorker(number, NUM_BLOCKS) for number in range(set_up.num_prefill)]
        self.backlogs = [Backlog() for _ in self.prefills]
        self.queues: list[deque[tuple[Served, int]]] = [deque() for _ in self.prefills]
        self.decodes = [DecodeWorker(self.model) for _ in range(set_up.num_decode)]
        self.results = Results(self.model.prefill_ms)
        self.events: list[tuple[float, int, str, int, Served | None, int]] = []
        self.order = itertools.count()

    def run(self) -> Results:
        for number, request in enumerate(self.requests):
            served = Served(number, request, request.arrival_ms / self.set_up.speed)
            self.plan(served.arrival_ms, "arrive", 0, served)
        handlers = {"arrive": self.arrive, "computed": self.computed, "loaded": self.loaded, "stepped": self.stepped}
        while self.events:
            now, _, kind, worker, served, partner = heapq.heappop(self.events)
            handlers[kind](now, worker, served, partner)
        return self.results

    def plan(self, at: float, kind: str, worker: int, served: Served | None = None, partner: int = 0) -> None:
        heapq.heappush(self.events, (at, next(self.order), kind, worker, served, partner))

    def arrive(self, now: float, _worker: int, served: Served | None, _partner: int) -> None:
        assert served is not None, "a request arrives"
        request = served.request
        decode = min(range(len(self.decodes)), key=lambda number: self.decodes[number].num_reserved)
        offers = [self.offer(number, request, now) for number in range(len(self.prefills))]
        chosen = min(range(len(offers)), key=lambda number: offers[number][0])
        _, wait_ms, own_ms, hit = offers[chosen]
        local = self.local_worker(request, wait_ms, now) if self.max_itl_ms else None
        if local is not None:
            self.compute_locally(now, local, served)
            return
        self.decodes[decode].reserve(served)
        self.decodes[decode].reserved_until[served.number] = now + wait_ms + own_ms
        prompt = QueuedPrompt(request.num_tokens - hit, own_ms, now)
        self.backlogs[chosen].add(str(served.number), prompt, now)
        self.queues[chosen].append((served, decode))
        if self.prefills[chosen].running is None and len(self.queues[chosen]) == 1:
            self.compute_next(now, chosen)

    def offer(self, number: int, request: TraceRequest, now: float) -> tuple[float, float, float, int]:
        """Return score, wait, own time and hit at a prefill worker; prompts under way count as cached."""
        queued = max((common_tokens(request, served.request) for served, _ in self.queues[number]), default=0)
        hit = max(self.prefills[number].hit_tokens(request.blocks), queued)
        own_ms = self.model.prefill_ms(request.num_tokens - hit, hit)
        wait_ms = self.backlogs[number].work_ms(now)
        return score(wait_ms, own_ms, 0), wait_ms, own_ms, hit

    def local_worker(self, request: TraceRequest, remote_wait_ms: float, now: float) -> int | None:
        """Return the decode worker that should compute a prompt, None without one."""
        prompts = {}
        for number, worker in enumerate(self.decodes):
            needed = request.num_tokens + request.num_output_tokens
            if worker.waiting or worker.num_reserved + needed > CONTEXT_TOKENS or worker.local is not None:
                continue
            hit = worker.cache.hit_tokens(request.blocks)
            own_ms = self.model.prefill_ms(request.num_tokens - hit, hit)
            next_ms = max(0.0, min(worker.reserved_until.values(), default=math.inf) - now)
            prompts[number] = LocalPrompt(own_ms, 0.0, worker.step.ms, worker.num_present, next_ms)
        best = min(prompts, key=lambda number: finish_ms(prompts[number]), default=None)
        return best if best is not None and pays(prompts[best], remote_wait_ms, self.max_itl_ms) else None

    def compute_locally(self, now: float, number: int, served: Served) -> None:
        worker, request = self.decodes[number], served.request
        served.hit = worker.cache.hit_tokens(request.blocks)
        served.num_new = request.num_tokens - served.hit
        worker.reserve(served)
        worker.num_present += 1
        worker.local = served
        self.results.num_local += 1
        self.step_on(now, number)

    def compute_next(self, now: float, number: int) -> None:
        worker, (served, _) = self.prefills[number], self.queues[number][0]
        hit = worker.hit_tokens(served.request.blocks)
        worker.touch(served.request.blocks)
        self.plan(now + self.model.prefill_ms(served.request.num_tokens - hit, hit), "computed", number)

    def computed(self, now: float, number: int, _served: Served | None, _partner: int) -> None:
        served, decode = self.queues[number].popleft()
        self.prefills[number].store(served.request.blocks)
        self.backlogs[number].remove(str(served.number), now)
        self.results.note_first(served, now)
        self.decodes[decode].num_present += 1
        del self.decodes[decode].reserved_until[served.number]
        num_loaded = served.request.num_tokens - self.decodes[decode].cache.hit_tokens(served.request.blocks)
        self.plan(now + self.model.handoff_ms(num_loaded), "loaded", decode, served)
        if self.queues[number]:
            self.compute_next(now, number)

    def loaded(self, now: float, number: int, served: Served | None, _partner: int) -> None:
        assert served is not None, "a request is loaded"
        self.decodes[number].waiting.append(served)
        self.step_on(now, number)

    def step_on(self, now: float, number: int) -> None:
        """Begin a step if none is under way and there is work."""
        worker = self.decodes[number]
        if worker.is_stepping:
            return
        worker.admit()
        if not worker.ends and worker.local is None:
            return
        worker.is_stepping = True
        step_ms, is_plain = worker.step_ms(), worker.local is None
        self.results.note_step(step_ms, len(worker.ends), is_plain=is_plain)
        self.plan(now + step_ms, "stepped", number)

    def stepped(self, now: float, number: int, _served: Served | None, _partner: int) -> None:
        worker = self.decodes[number]
        worker.is_stepping = False
        worker.num_steps += 1
        worker.kv_tokens += len(worker.ends)
        worker.step.observe(now)
        while worker.ends and worker.ends[0][0] <= worker.num_steps:
            _, _, served = heapq.heappop(worker.ends)
            worker.free(served)
        local = worker.local
        if local is not None and local.num_done == local.num_new:
            worker.local = None
            self.results.note_first(local, now)
            worker.begin(local)
        self.step_on(now, number)


def common_tokens(one: TraceRequest, other: TraceRequest) -> int:
    """Return how many leading tokens two prompts share, in whole blocks."""
    depth = 0
    for a, b in zip(one.blocks, other.blocks, strict=False):
        if a != b:
            break
        depth += 1
    return 512 * depth


@dataclass(frozen=True, slots=True)
class Figures:
    """One run in short."""

    mean_ttft_ms: float
    p90_ttft_ms: float
    ok_share: float
    itl_p99_ms: float
    plain_itl_p99_ms: float  # of steps without a local prompt
    local_share: float


def measure(set_up: SetUp, folder: Path, seed: int, max_itl_ms: float, limit: int) -> Figures:
    """Run one set-up with one seed."""
    requests = read_trace(folder / f"mooncake_{set_up.trace}.jsonl").requests
    found = Run(set_up, spread_arrivals(requests[: limit or None], seed), max_itl_ms).run()
    count = len(found.ttft_ms)
    return Figures(
        statistics.fmean(found.ttft_ms),
        quantile(found.ttft_ms, 0.9),
        found.num_ok / count,
        p99_of(found.itl_ms),
        p99_of(found.plain_itl_ms),
        found.num_local / count,
    )


def row(set_up: SetUp, without: Sequence[Figures], with_local: Sequence[Figures]) -> list[str]:
    """Return one line of the table; the runs of one seed are compared with each other."""
    pairs = list(zip(without, with_local, strict=True))
    return [
        f"{set_up.name}, {set_up.trace}",
        f"{set_up.num_prefill}P + {set_up.num_decode}D, {set_up.speed:g}",
        spread([after.local_share for _, after in pairs], "{:.3f}"),
        spread([before.mean_ttft_ms for before, _ in pairs], "{:.0f}"),
        spread([after.mean_ttft_ms / before.mean_ttft_ms for before, after in pairs], "{:.3f}"),
        spread([after.ok_share - before.ok_share for before, after in pairs], "{:+.4f}"),
        spread([before.itl_p99_ms for before, _ in pairs], "{:.1f}"),
        spread([after.itl_p99_ms / before.itl_p99_ms for before, after in pairs], "{:.3f}"),
        spread([after.plain_itl_p99_ms / before.itl_p99_ms for before, after in pairs], "{:.3f}"),
    ]


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean of the seeds and their range."""
    return f"{form.format(statistics.fmean(values))} [{form.format(min(values))}, {form.format(max(values))}]"


def goals(set_up: SetUp, without: Sequence[Figures], with_local: Sequence[Figures]) -> list[dict[str, object]]:
    """Return the goals' figures, for ``--json``: the mean of the seeds is not worse by more than 2 %."""
    pairs = list(zip(without, with_local, strict=True))
    losses = {
        "mean TTFT": [after.mean_ttft_ms / before.mean_ttft_ms - 1 for before, after in pairs],
        "share in SLO": [before.ok_share - after.ok_share for before, after in pairs],
        "ITL p99": [after.itl_p99_ms / before.itl_p99_ms - 1 for before, after in pairs],
    }
    found: list[dict[str, object]] = []
    for name, values in losses.items():
        value = round(statistics.fmean(values), 4)
        whole = f"local prefill, {set_up.name}, {set_up.trace}, {set_up.model}: loss of {name}"
        found.append(at_most(whole, value, MOST_WORSE, "share"))
    return found


def main() -> None:
    """Print a table for each cost model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the two traces")
    parser.add_argument("--model", choices=list(MODELS), action="append", help="cost model (default: each)")
    parser.add_argument("--itl-ms", type=float, default=50.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the goals here")
    options = parser.parse_args()
    met: list[dict[str, object]] = []
    for model in options.model or MODELS:
        set_ups = [set_up for set_up in SET_UPS if set_up.model == model]
        tasks = list(itertools.product(set_ups, range(1, options.seeds + 1), (0.0, options.itl_ms)))
        with ProcessPoolExecutor(options.jobs) as pool:
            futures = [pool.submit(measure, task[0], options.traces, task[1], task[2], options.limit) for task in tasks]
            figures = [future.result() for future in futures]
        rows = []
        for number, set_up in enumerate(set_ups):
            found = figures[2 * options.seeds * number : 2 * options.seeds * (number + 1)]
            rows.append(row(set_up, found[::2], found[1::2]))
            met += goals(set_up, found[::2], found[1::2])
        print(f"{model}: router.local_prefill_itl_ms = {options.itl_ms:g} against 0; {options.seeds} seeds, ranges in brackets")
        print(Table(COLUMNS, rows).markdown(), flush=True)
    for line in goal_notes([goal for goal in met if not goal["met"]]):
        print(line)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"goals": met}, indent=1) + "\n")


if __name__ == "__main__":
    main()
