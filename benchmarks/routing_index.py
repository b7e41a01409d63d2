"""The router's index of contents: memory for each block and worker, and CPU time from token ids to a placement.

    python benchmarks/routing_index.py [--workers 12 1000] [--blocks 10000] [--json FILE] [--markdown] [--quick]

It takes about a minute and 300 MB. The blocks of different workers differ, which is the worst case: equal blocks share one
entry. A prompt's prefixes are on all workers, at different depths. A placement is keys, hits, costs, choice, and the record of
it, with 16 tokens to a block. CPU times are the best of ``--repeats``. A large cluster takes longer, since each worker's cost
is computed: the goals of time are those of the smallest, that of memory is the largest's.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from common import Machine, Outcome, Table, at_most, goal_notes, make_parser, publish

from core.kv.hashing import BlockHasher
from core.wire.contents import ContentReport
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Generate, Register
from core.wire.sampling import SamplingParams
from router.contents.keys import chain_keys, prompt_chain
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, choose_route
from router.dispatch.route_costs import RouteCosts

MODEL = b"model"
BLOCK_SIZE = 16
MAX_REPORTED = 8_000  # keys of one report
GOAL_BYTES = 64
GOAL_MB = 640  # of 1,000 workers with 10,000 blocks
GOAL_MS = {1_000: 0.3, 100_000: 15.0}


@dataclass(frozen=True, slots=True)
class Measured:
    """The index of one cluster. ``place_ms`` by tokens of the prompt."""

    num_workers: int
    num_blocks: int
    num_bytes: int
    report_us: float  # for a block
    place_ms: dict[int, float]
    leave_ms: float

    @property
    def bytes_per_block(self) -> float:
        return self.num_bytes / (self.num_workers * self.num_blocks)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def best_ms(work: Callable[[], object], repeats: int) -> float:
    """Return the least CPU time of one call."""
    times = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times) * 1e3


def make_worker(number: int, num_blocks: int) -> GenerationWorker:
    """Return an aggregated worker."""
    layout = KVLayoutInfo(
        dtype="float32", order="HND", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=4, block_bytes=512
    )
    facts = Register(
        engine_id=f"w{number}",
        incarnation=1,
        role="aggregated",
        model="m",
        model_fingerprint=MODEL,
        layout=layout,
        max_model_len=1 << 20,
        max_num_seqs=64,
        num_blocks=2 * num_blocks + (1 << 16),
    )
    return GenerationWorker(key=WorkerKey(facts.engine_id, 1), peer=b"", facts=facts, last_seen=0.0)


class Reporter:
    """Reports blocks of one worker after another."""

    def __init__(self, costs: RouteCosts, workers: list[GenerationWorker]) -> None:
        self._costs = costs
        self._numbers = dict.fromkeys([worker.key for worker in workers], 0)
        for worker in workers:
            costs.join(worker)

    def report(self, worker: GenerationWorker, keys: bytes) -> None:
        """Report blocks that became hits."""
        for start in range(0, len(keys), 8 * MAX_REPORTED):
            number = self._numbers[worker.key]
            report = ContentReport(
                engine_id=worker.key.engine_id,
                incarnation=1,
                number=number,
                is_snapshot=number == 0,
                stored=keys[start : start + 8 * MAX_REPORTED],
            )
            self._costs.on_report(worker.key, report)
            self._numbers[worker.key] += 1


class Placements:
    """Places one prompt again and again, each time as if it were new."""

    def __init__(self, costs: RouteCosts, workers: list[GenerationWorker], num_tokens: int) -> None:
        self._costs, self._workers = costs, workers
        self.tokens = random.Random(num_tokens).choices(range(50_000), k=num_tokens)
        self._num_placed = 0

    def place(self) -> None:
        """Choose one of the candidates and record the placement."""
        prompt, candidates = tuple(self.tokens), self._workers
        offers = self._costs.offers(candidates, prompt, (), 0.0)
        costs = {key: offer.score for key, offer in offers.items()}
        route = choose_route(candidates, Demand(num_tokens=len(prompt) + 100, costs=costs))
        message = Generate(request_id=f"r{self._num_placed}", prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=100))
        self._costs.on_sent(route.workers[0], message, 0.0)
        self._num_placed += 1
        self._costs.drop(message.request_id, 0.0)


def measure(num_workers: int, num_blocks: int, repeats: int) -> Measured:
    """Fill the index of one cluster, and place prompts there."""
    workers = [make_worker(number, num_blocks) for number in range(num_workers)]
    costs = RouteCosts()
    reporter = Reporter(costs, workers)
    before, started = resident_bytes(), time.process_time()
    for number, worker in enumerate(workers):
        reporter.report(worker, random.Random(number).randbytes(8 * num_blocks))
    used, seconds = resident_bytes() - before, time.process_time() - started
    place_ms = {}
    for num_tokens in GOAL_MS:
        placements = Placements(costs, workers, num_tokens)
        keys = chain_keys(prompt_chain(BlockHasher(MODEL), placements.tokens, ()), BLOCK_SIZE)
        for number, worker in enumerate(workers):
            reporter.report(worker, keys[: len(keys) // (1 + number % 7)].tobytes())
        place_ms[num_tokens] = best_ms(placements.place, repeats)
    leave_ms = best_ms(lambda: costs.forget(workers[0].key), repeats=1)
    return Measured(num_workers, num_blocks, used, 1e6 * seconds / (num_workers * num_blocks), place_ms, leave_ms)


def goals(found: Sequence[Measured]) -> list[dict[str, object]]:
    """Return the aims: times of the smallest cluster, memory of the largest."""
    small, large = (pick(found, key=lambda one: one.num_workers) for pick in (min, max))
    aims = [
        (f"placing a prompt of {num_tokens:,} tokens among {small.num_workers} workers", small.place_ms[num_tokens], goal, "ms")
        for num_tokens, goal in GOAL_MS.items()
    ]
    where = f"{large.num_workers} workers of {large.num_blocks} blocks"
    aims.append((f"index of {where}, for each block and worker", large.bytes_per_block, GOAL_BYTES, "bytes"))
    aims.append((f"index of {where}", large.num_bytes / 1e6, GOAL_MB, "MB"))
    return [at_most(*aim) for aim in aims]


def outcome(found: Sequence[Measured]) -> Outcome:
    rows = [
        [
            f"{one.num_workers:,}",
            f"{one.num_bytes / 1e6:.0f} MB",
            f"{one.bytes_per_block:.1f}",
            *(f"{ms:.2f} ms" for ms in one.place_ms.values()),
            f"{one.report_us:.1f} us",
            f"{one.leave_ms:.0f} ms",
        ]
        for one in found
    ]
    prompts = (f"{num_tokens:,} tokens" for num_tokens in GOAL_MS)
    columns = ("workers", "memory", "bytes per block and worker", *prompts, "a block reported", "a worker leaves")
    aims = goals(found)
    return Outcome([Table(columns, rows)], goal_notes(aims), {"clusters": [asdict(one) for one in found]}, aims)


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=5, takes_model=False)
    parser.add_argument("--workers", type=int, default=[12, 1_000], nargs="+", metavar="N")
    parser.add_argument("--blocks", type=int, default=10_000, metavar="N", help="of a worker (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.workers, arguments.blocks, arguments.repeats = [2, 3], 100, 1
    machine = Machine.now()
    found = [measure(num_workers, arguments.blocks, arguments.repeats) for num_workers in arguments.workers]
    publish(outcome(found), machine, arguments)


if __name__ == "__main__":
    main()
