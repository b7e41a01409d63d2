"""The router's index of contents: memory for each block and worker, and CPU time from token ids to a placement.

    python benchmarks/routing_index.py                # 12 and 1,000 workers of 10,000 blocks: about a minute and 300 MB
    python benchmarks/routing_index.py --workers 100

The blocks of different workers differ, which is the worst case: equal blocks share an entry. A prompt's prefixes are on all
workers, at different depths. A placement is keys, hits, costs, choice, and the record of it, with 16 tokens to a block. CPU
times are the best of five. A large cluster takes longer, since each worker's cost is computed.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable

from core.kv.hashing import BlockHasher
from core.wire.contents import ContentReport
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Generate, Register
from core.wire.sampling import SamplingParams
from router.contents.keys import prompt_keys
from router.dispatch.members import GenerationWorker, WorkerKey
from router.dispatch.policy import Demand, choose_route
from router.dispatch.route_costs import RouteCosts

MODEL = b"model"
BLOCK_SIZE = 16
MAX_REPORTED = 8_000  # keys of one report
GOAL_BYTES = 64
GOAL_MS = {1_000: 0.3, 100_000: 15.0}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def best_ms(work: Callable[[], object], repeats: int = 5) -> float:
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


def measure(num_workers: int, num_blocks: int) -> None:
    """Fill the index of one cluster, and place prompts there."""
    workers = [make_worker(number, num_blocks) for number in range(num_workers)]
    costs = RouteCosts()
    reporter = Reporter(costs, workers)
    before, started = resident_bytes(), time.process_time()
    for number, worker in enumerate(workers):
        reporter.report(worker, random.Random(number).randbytes(8 * num_blocks))
    num_entries = num_workers * num_blocks
    used = resident_bytes() - before
    print(f"{num_workers} workers, {num_blocks} blocks each: {used / 1e6:.0f} MB,", end=" ")
    print(f"{used / num_entries:.1f} bytes per block and worker (goal <= {GOAL_BYTES}),", end=" ")
    print(f"{(time.process_time() - started) / num_entries * 1e6:.1f} us to take one in")
    for num_tokens, goal in GOAL_MS.items():
        placements = Placements(costs, workers, num_tokens)
        keys = prompt_keys(BlockHasher(MODEL), placements.tokens)
        for number, worker in enumerate(workers):
            reporter.report(worker, keys[: len(keys) // (1 + number % 7)].tobytes())
        print(f"  {num_tokens} tokens: {best_ms(placements.place):.2f} ms to place among all (goal <= {goal})")
    print(f"  a worker leaves: {best_ms(lambda: costs.forget(workers[0].key), repeats=1):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=[12, 1_000], nargs="+")
    parser.add_argument("--blocks", type=int, default=10_000)
    options = parser.parse_args()
    for num_workers in options.workers:
        measure(num_workers, options.blocks)


if __name__ == "__main__":
    main()
