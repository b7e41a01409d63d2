"""How the cost of scheduler, KV block pool, router and index of contents grows with requests, blocks and workers.

    python benchmarks/growth.py [--requests N ...] [--blocks N ...] [--workers N ...] [--json FILE] [--markdown] [--quick]

No model, no sockets, one thread. Every figure is CPU time of this thread in microseconds per item (a request, a block, a
worker), the best of some repeats: a flat row is a cost that grows as the number of items does. ``growth`` is the exponent of
the cost of all items from the third largest size to the largest; 1 = in proportion. The garbage collector is off, since every
process freezes what it has after its start and a full collection comes once for each quarter of growth. An exponent above 1
without a loop in the operation is the machine's caches, which do not hold a million blocks. The row ``control`` shows how much
that is: keys that are looked up in a plain dict of as many entries, nothing else. The row of the same lookups in the pool may
grow as fast as the control, no other row faster than the goal.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common import Machine, Outcome, Table, at_most, goal_notes, make_parser, publish
from routing_index import Placements, Reporter, make_worker
from scheduler import add_requests, make_scheduler, run_step

from core.kv.content_feed import ContentFeed
from core.kv.pool import BlockPool
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Goodbye, Heartbeat, Register, Tokens, Usage
from core.wire.sampling import SamplingParams
from router.contents.index import ContentIndex
from router.dispatch.core import RouterCore, RouterLimits
from router.dispatch.route_costs import RouteCosts
from router.dispatch.types import Submission

REQUESTS, BLOCKS, WORKERS = (1, 16, 256, 4096), (1_000, 16_000, 256_000, 1_000_000), (1, 10, 100, 1_000)
MAX_GROWTH = 1.35
LOOKUP, CONTROL = "pool: look up a hash", "control: look up a key in a dict"
BATCH = 64  # blocks that one call takes, as a long prompt does
NUM_OPERATIONS = 4096  # timed at every size where one item's cost is asked for
PROMPT = tuple(range(100, 116))
LIMITS = RouterLimits(
    heartbeat_interval_s=1.0, heartbeat_timeout_s=5.0, request_timeout_s=600.0, max_requests=1 << 20, routing="predicted"
)


@dataclass(slots=True)
class Row:
    """One operation: microseconds of CPU per item at each size."""

    name: str
    sizes: Sequence[int]
    us: list[float] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """The exponent of the cost of all items, from the third largest size to the largest."""
        (small, *_, large), (before, *_, after) = self.sizes[-3:], self.us[-3:]
        return 1.0 + math.log(after / before) / math.log(large / small)


class Rows:
    """The rows of one axis, in the order of their first figure."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.rows: dict[str, Row] = {}

    def add(self, name: str, seconds: float, num_items: int) -> None:
        self.rows.setdefault(name, Row(name, self.sizes)).us.append(1e6 * seconds / num_items)

    def time(self, name: str, num_items: int, work: Callable[[], object], repeats: int = 3) -> None:
        """Add the least CPU time of ``work``, which handles ``num_items``."""
        self.add(name, min(cpu_s(work) for _ in range(repeats)), num_items)


def cpu_s(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


# ---- running requests ------------------------------------------------------------------------------------------------


def measure_requests(sizes: Sequence[int]) -> Rows:
    rows = Rows(sizes)
    for num_requests in sizes:
        time_scheduler(rows, num_requests)
        time_router(rows, num_requests)
    return rows


def time_scheduler(rows: Rows, num_requests: int, num_prompt_tokens: int = 64, num_steps: int = 24) -> None:
    scheduler = make_scheduler(num_requests, num_prompt_tokens + num_steps + 2, 16)
    add_s = statistics.median(add_requests(scheduler, num_requests, num_prompt_tokens, num_steps))
    rows.add("scheduler: add a request", add_s, 1)
    while scheduler.waiting:
        run_step(scheduler)
    gc.collect()
    rows.add(
        "scheduler: one step",
        cpu_s(lambda: [run_step(scheduler) for _ in range(num_steps - 4)]) / (num_steps - 4),
        num_requests,
    )


class RouterBench:
    """A router core with aggregated workers that answer nothing by themselves."""

    def __init__(self, num_workers: int) -> None:
        self.core = RouterCore("tiny", "router", LIMITS)
        self.positions: dict[str, int] = {}
        for number in range(num_workers):
            self.join(number)

    def join(self, number: int) -> None:
        layout = KVLayoutInfo(
            dtype="float32", order="HND", block_size=16, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=512
        )
        registration = Register(
            engine_id=f"w{number}", incarnation=1, role="aggregated", model="tiny", model_fingerprint=b"tiny", layout=layout,
            max_model_len=1 << 20, max_num_seqs=1 << 16, num_blocks=1 << 24, transports=("tcp",), has_digests=True,
        )  # fmt: skip
        self.core.on_message(f"w{number}".encode(), registration, 0.0)

    def submit(self, number: int) -> None:
        sampling = SamplingParams(max_tokens=1000)
        submission = Submission(request_id=f"r{number}", prompt_token_ids=PROMPT, sampling=sampling)
        self.core.submit(submission, 0.0)
        self.positions[submission.request_id] = 0

    def begin(self, number: int) -> None:
        """Submit a request, and let its worker answer with the first token."""
        self.submit(number)
        request = self.core.dispatcher.requests[f"r{number}"]
        assert request.current is not None
        self.positions[request.request_id] = 1
        token = Tokens(request.request_id, 0, 0, (260,), usage=Usage())
        self.core.on_message(request.current.engine_id.encode(), [token], 0.0)

    def end(self, number: int) -> None:
        """Let its worker end a request."""
        request_id = f"r{number}"
        last = Tokens(request_id, 0, self.positions.pop(request_id), (260,), "length")
        self.core.on_message(b"w0", [last], 0.0)

    def step(self) -> None:
        """One frame with a token of every request, of the only worker."""
        frame = [Tokens(request_id, 0, position, (260,)) for request_id, position in self.positions.items()]
        for request_id in self.positions:
            self.positions[request_id] += 1
        self.core.on_message(b"w0", frame, 0.0)

    def beat(self, number: int) -> None:
        self.core.on_message(f"w{number}".encode(), Heartbeat(engine_id=f"w{number}", incarnation=1), 0.0)


def time_router(rows: Rows, num_requests: int) -> None:
    """Begin requests beside those that run, and beside as many whose prompts are not computed; then run and end them."""
    bench, numbers = RouterBench(1), range(num_requests)
    rows.time("router: begin a request, its first token", num_requests, lambda: [bench.begin(number) for number in numbers], 1)
    rows.time("router: a token of each", num_requests, bench.step, 5)
    rows.time("router: tick", num_requests, lambda: bench.core.on_timer(0.0), 5)
    rows.time("router: end a request", num_requests, lambda: [bench.end(number) for number in numbers], 1)
    bench = RouterBench(1)
    rows.time("router: begin a request behind queued ones", num_requests, lambda: [bench.submit(n) for n in numbers], 1)
    bench = RouterBench(2)
    for number in numbers:
        bench.begin(number)
    lost, places = (
        Goodbye(engine_id="w0", incarnation=1),
        [request.current for request in bench.core.dispatcher.requests.values()],
    )
    num_moved = max(1, sum(place is not None and place.engine_id == "w0" for place in places))
    rows.time("router: move a request of a lost worker", num_moved, lambda: bench.core.on_message(b"w0", lost, 0.0), 1)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def measure_blocks(sizes: Sequence[int]) -> Rows:
    rows = Rows(sizes)
    for num_blocks in sizes:
        time_pool(rows, num_blocks)
        time_contents(rows, num_blocks)
        gc.collect()
    return rows


def time_pool(rows: Rows, num_blocks: int) -> None:
    pools: list[BlockPool] = []
    rows.time("pool: make", num_blocks, lambda: pools.append(BlockPool(num_blocks + 1, True, 16, True)), 1)
    pool, num_timed = pools[0], min(NUM_OPERATIONS, num_blocks) // BATCH * BATCH

    def cycle() -> None:
        for _ in range(num_timed // BATCH):
            pool.free_blocks(pool.get_new_blocks(BATCH))

    rows.time("pool: allocate and free, empty", num_timed, cycle)
    blocks, hashes = pool.get_new_blocks(num_blocks), hashes_of(num_blocks)
    rows.time("pool: make hits, with events", num_blocks, lambda: pool.cache_full_blocks(blocks, hashes, 0, 16, 0), 1)
    # Copies, as a request's hashes are: the objects that the pool keeps would be read from memory as well.
    drawn = [bytes(bytearray(value)) for value in random.Random(1).sample(hashes, num_timed)]
    rows.time(LOOKUP, num_timed, lambda: [pool.get_cached_block(value, 0) for value in drawn])
    time_control(rows, hashes, drawn)
    missing = hashes_of(num_timed, seed=2)
    rows.time("pool: look up an unknown hash", num_timed, lambda: [pool.get_cached_block(value, 0) for value in missing])
    time_feed(rows, pool, num_blocks)
    rows.time("pool: free hits", num_blocks, lambda: pool.free_blocks(reversed(blocks)), 1)

    def evict() -> None:
        for _ in range(num_timed // BATCH):
            pool.get_new_blocks(BATCH)

    rows.time("pool: evict and allocate", num_timed, evict, 1)


def time_control(rows: Rows, hashes: Sequence[bytes], drawn: Sequence[bytes]) -> None:
    """Look up the same hashes in a dict with as many entries, each with an object of its own."""
    entries = {bytes(bytearray(value)): object() for value in hashes}
    rows.time(CONTROL, len(drawn), lambda: [entries.get(value) for value in drawn])


def time_feed(rows: Rows, pool: BlockPool, num_blocks: int) -> None:
    """Report the contents of a full pool to a router: everything, then a change of some blocks."""
    feed = ContentFeed("w0", 1)
    feed.start("router")
    events = pool.take_events()
    rows.time("reports: take in events", num_blocks, lambda: feed.publish(events), 1)
    rows.time("reports: snapshot", num_blocks, lambda: feed.take_reports("router"), 1)
    pool.evict_blocks(range(1, 1 + BATCH))
    changes = pool.take_events()
    rows.time("reports: a change of 64 blocks", BATCH, lambda: (feed.publish(changes), feed.take_reports("router")), 1)


def time_contents(rows: Rows, num_blocks: int) -> None:
    index: ContentIndex[str] = ContentIndex()
    source = random.Random(3)
    keys = [source.getrandbits(63) for _ in range(num_blocks)]
    rows.time("index: add a block", num_blocks, lambda: index.add("w0", keys), 1)
    starts = [source.randrange(max(1, num_blocks - BATCH)) for _ in range(NUM_OPERATIONS // BATCH)]
    prompts = [keys[start : start + BATCH] for start in starts]
    num_timed = sum(map(len, prompts))
    rows.time("index: look up a prompt's block", num_timed, lambda: [index.num_blocks_held(prompt) for prompt in prompts])
    changed = keys[: min(NUM_OPERATIONS, num_blocks)]
    rows.time("index: remove and add a block", len(changed), lambda: (index.remove("w0", changed), index.add("w0", changed)))
    rows.time("index: a worker leaves", num_blocks, lambda: index.forget("w0"), 1)


def hashes_of(count: int, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(16) for _ in range(count)]


# ---- workers ---------------------------------------------------------------------------------------------------------


def measure_workers(sizes: Sequence[int]) -> Rows:
    rows = Rows(sizes)
    for num_workers in sizes:
        time_members(rows, RouterBench(0), num_workers)
        time_placement(rows, num_workers)
        gc.collect()
    return rows


def time_members(rows: Rows, bench: RouterBench, num_workers: int) -> None:
    numbers = range(num_workers)
    rows.time("router: a worker joins", num_workers, lambda: [bench.join(number) for number in numbers], 1)
    rows.time("router: a heartbeat", num_workers, lambda: [bench.beat(number) for number in numbers])
    rows.time("router: tick", num_workers, lambda: bench.core.on_timer(0.0))
    rows.time("router: begin a request, no contents", num_workers, lambda: bench.submit(0), 1)
    rows.time("router: a worker leaves", num_workers, lambda: leave(bench, num_workers), 1)


def leave(bench: RouterBench, num_workers: int) -> None:
    for number in range(num_workers):
        bench.core.on_message(f"w{number}".encode(), Goodbye(engine_id=f"w{number}", incarnation=1), 0.0)


def time_placement(rows: Rows, num_workers: int, num_blocks: int = 1_000) -> None:
    """Place a prompt of 1,000 tokens among workers that all hold some of it."""
    workers = [make_worker(number, num_blocks) for number in range(num_workers)]
    costs = RouteCosts()
    reporter = Reporter(costs, workers)
    for number, worker in enumerate(workers):
        reporter.report(worker, random.Random(number).randbytes(8 * num_blocks))
    placements = Placements(costs, workers, 1_000)
    rows.time("router: place a prompt by contents", num_workers, placements.place, 5)


# ---- output ----------------------------------------------------------------------------------------------------------


def table(rows: Rows, item: str) -> Table:
    columns = [f"us per {item}, of", *(f"{size:,}" for size in rows.sizes), "growth"]
    cells = [[row.name, *(f"{us:,.2f}" for us in row.us), f"{row.growth:.2f}"] for row in rows.rows.values()]
    return Table(columns, cells)


def outcome(axes: dict[str, Rows]) -> Outcome:
    found = [row for rows in axes.values() for row in rows.rows.values()]
    control = max((row.growth for row in found if row.name == CONTROL), default=0.0)
    limits = {LOOKUP: max(MAX_GROWTH, control)}
    judged = [(row.growth - limits.get(row.name, MAX_GROWTH), row) for row in found if row.name != CONTROL]
    worst = max(judged, key=lambda each: each[0])[1]
    most = limits.get(worst.name, MAX_GROWTH)
    goals = [at_most(f"growth, next to its limit: {worst.name}", worst.growth, most, "exponent")]
    rows = [{"axis": axis, "name": row.name, "us": row.us, "growth": row.growth}
            for axis, part in axes.items() for row in part.rows.values()]  # fmt: skip
    sizes = {axis: list(part.sizes) for axis, part in axes.items()}
    tables = [table(part, axis) for axis, part in axes.items()]
    return Outcome(tables, goal_notes(goals), {"sizes": sizes, "rows": rows}, goals)


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=1, takes_model=False)
    parser.add_argument("--requests", type=int, nargs="+", default=REQUESTS, metavar="N", help="that run at a time")
    parser.add_argument("--blocks", type=int, nargs="+", default=BLOCKS, metavar="N", help="of the KV cache")
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS, metavar="N")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.blocks, arguments.workers = (1, 16), (256, 1024), (1, 8)
    machine = Machine.now()
    gc.disable()
    axes = {
        "request": measure_requests(arguments.requests),
        "block": measure_blocks(arguments.blocks),
        "worker": measure_workers(arguments.workers),
    }
    publish(outcome(axes), machine, arguments)


if __name__ == "__main__":
    main()
