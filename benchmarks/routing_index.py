"""The router's index of contents: memory for each block and worker, and CPU time from token ids to every worker's hit.

    python benchmarks/routing_index.py                # 1,000 workers of 10,000 blocks: about a minute and 300 MB
    python benchmarks/routing_index.py --workers 100

The blocks of different workers differ, which is the worst case: equal blocks share an entry. The prompt's prefixes are on all
workers, at different depths. CPU times are the best of five.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from array import array
from collections.abc import Callable

from core.kv.hashing import BlockHasher
from router.contents.index import ContentIndex
from router.contents.keys import prompt_keys

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--blocks", type=int, default=10_000)
    options = parser.parse_args()
    index: ContentIndex[int] = ContentIndex()
    before, started = resident_bytes(), time.process_time()
    for worker in range(options.workers):
        index.add(worker, array("Q", random.Random(worker).randbytes(8 * options.blocks)))
    num_entries = options.workers * options.blocks
    used = resident_bytes() - before
    print(f"{options.workers} workers, {options.blocks} blocks each: {used / 1e6:.0f} MB,", end=" ")
    print(f"{used / num_entries:.1f} bytes per block and worker (goal <= {GOAL_BYTES}),", end=" ")
    print(f"{(time.process_time() - started) / num_entries * 1e6:.1f} us to add one")
    hasher = BlockHasher(b"model")
    for num_tokens, goal in GOAL_MS.items():
        tokens = random.Random(num_tokens).choices(range(50_000), k=num_tokens)
        keys = prompt_keys(hasher, tokens)
        for worker in range(options.workers):
            index.add(worker, keys[: len(keys) // (1 + worker % 7)])

        def decide(tokens: list[int] = tokens) -> object:
            return index.num_blocks_held(prompt_keys(hasher, tokens))

        print(f"{num_tokens} tokens, on all workers: {best_ms(decide):.2f} ms from token ids to hits (goal <= {goal})")
    print(f"a worker leaves: {best_ms(lambda: index.forget(0), repeats=1):.0f} ms")


if __name__ == "__main__":
    main()
