"""The store alone: copies into and out of its arena beside a plain copy of the same bytes, the time of a lookup, and policies.

    python benchmarks/tiers.py [--repeats 9] [--json FILE] [--markdown] [--quick]
    python benchmarks/tiers.py --trace mooncake_conversation.jsonl [--capacities 1000 4000 16000]

Blocks are those of SmolLM2-135M in float32: 64 tokens, 2,949,120 bytes; a prompt of 2,048 tokens has 32. The store is a process
of its own (``kvferry kvstore``) that this process uses in both ways, by its arena and by frames, and once a part of this
process. Every repeat copies the same bytes with numpy from one buffer to another (one thread, memory touched before) and then
puts, gets and looks up, so that all meet the same machine. *Put* is from the call to the end of the ticket, always of keys that
are not there; *get* the same, with a copy of each block to its place in a pool; *checked* compares the copies with the digests
of their seals as well, as every reader does before it uses a block. Two rounds more come first and do not count. Figures are
medians (smallest..largest); ratios are medians of the ratios of single repeats.

``--trace`` replays a trace of block ids through the eviction policies instead, with the bound that no policy can beat (it knows
the future). A hit is a block whose whole prefix is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import Machine, Outcome, Spread, Table, at_least, at_most, goal_notes, make_parser, publish, timed_ms
from trace_replay import clairvoyant, read_trace, replay

from core.clock import SystemClock
from core.config_workers import KVStoreSection
from core.ids import RandomIds
from kvstore.base import Ticket
from kvstore.build import make_embedded_store
from kvstore.client import StoreClient, own_process
from kvstore.client_actions import ClientOptions
from kvstore.client_base import StoreClientBase
from kvstore.eviction import POLICIES, make_policy
from kvstore.testing.blocks import SealedBlock, make_key, seal_block

BLOCK_BYTES, NUM_BLOCKS = 2_949_120, 32
QUICK_BLOCKS = 4
NUM_LOOKUP_KEYS = 128
LOOKUPS_PER_REPEAT = 20
WARM_UPS = 2
ARENA_BLOCKS = 4  # times those of a round
TIMEOUT_S = 60.0
COPY_GOAL = 0.6  # of the plain copy's rate
LOOKUP_GOAL_MS = 1.0
TRACE_CAPACITIES = (500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000)
TOKENS_PER_TRACE_BLOCK = 512


@dataclass(slots=True)
class Measured:
    """Milliseconds of every repeat for one way to a store."""

    put_ms: list[float] = field(default_factory=list)
    get_ms: list[float] = field(default_factory=list)
    checked_ms: list[float] = field(default_factory=list)
    lookup_ms: list[float] = field(default_factory=list)


class Round:
    """New blocks for one repeat, whose bytes lie in one pool, and another pool to get them into."""

    def __init__(self, num_blocks: int) -> None:
        generator = np.random.default_rng(1)
        self.source = generator.integers(0, 256, (num_blocks, BLOCK_BYTES), dtype=np.uint8)
        self.target = np.zeros_like(self.source)
        self.blocks: list[SealedBlock] = []
        self._next = 0

    def renew(self) -> None:
        """Take new keys; the seals fit them."""
        self.blocks = [seal_block(make_key(self._next + index), memoryview(row)) for index, row in enumerate(self.source)]
        self._next += len(self.source)


def wait(store: StoreClientBase, ticket: Ticket) -> None:
    if not store.wait(ticket, TIMEOUT_S) or ticket.failure:
        raise RuntimeError(f"the store does not answer: {ticket.failure or 'no end'}")


def measure(store: StoreClientBase, work: Round, measured: Measured) -> None:
    """Put, get and look up the blocks of a round once."""
    keys = [block.key for block in work.blocks]

    def put() -> None:
        ticket = store.put(keys, [block.content for block in work.blocks], [block.seal for block in work.blocks])
        wait(store, ticket)
        if not all(ticket.stored):
            raise RuntimeError("the store did not take every block")

    def get(*, checked: bool) -> None:
        ticket = store.get(keys)
        wait(store, ticket)
        for block, row in zip(ticket.blocks, work.target, strict=True):
            if block is None:
                raise RuntimeError("the store has lost a block")
            if checked:
                store.copy_out(block, memoryview(row))
            else:
                np.copyto(row, np.frombuffer(block.content, dtype=np.uint8))
        store.release(ticket)

    def look_up() -> None:
        for _ in range(LOOKUPS_PER_REPEAT):
            wait(store, store.lookup(lookup_keys))

    lookup_keys = [*keys, *(make_key(10**9 + index) for index in range(NUM_LOOKUP_KEYS - len(keys)))]
    measured.put_ms.append(timed_ms(put))
    measured.get_ms.append(timed_ms(lambda: get(checked=False)))
    measured.checked_ms.append(timed_ms(lambda: get(checked=True)))
    measured.lookup_ms.append(timed_ms(look_up) / LOOKUPS_PER_REPEAT)


@contextmanager
def store_process(memory_bytes: int) -> Iterator[str]:
    """Run ``kvferry kvstore`` and yield its address."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvferry", "kvstore", "--address", "tcp://127.0.0.1:0", "--log-level", "WARNING"]
    command += ["--memory-bytes", str(memory_bytes), "--ready-fd", str(writing), "--set", "kvstore.eviction=lru"]
    with subprocess.Popen(command, pass_fds=[writing]) as process:
        os.close(writing)
        with os.fdopen(reading) as pipe:
            address = json.loads(pipe.readline())["store_address"]
        try:
            yield address
        finally:
            process.terminate()


@contextmanager
def open_stores(num_blocks: int) -> Iterator[dict[str, StoreClientBase]]:
    """Yield every way to a store."""
    memory_bytes = ARENA_BLOCKS * num_blocks * (BLOCK_BYTES + 8192)
    clock, ids, stores = SystemClock(), RandomIds(), dict[str, StoreClientBase]()
    with store_process(memory_bytes) as address:
        for name, process in (("same host", own_process()), ("frames", None)):
            options = ClientOptions(f"bench-{name}", BLOCK_BYTES, request_timeout_s=TIMEOUT_S, process=process)
            stores[name] = client = StoreClient(address, options, clock, ids)
            if not client.wait_until_connected(TIMEOUT_S) or client.is_local != (process is not None):
                raise RuntimeError(f"no connection to the store, or another one than wanted: {name}")
        config = KVStoreSection(memory_bytes=memory_bytes, eviction="lru")
        stores["embedded"] = make_embedded_store(config, BLOCK_BYTES, clock, ids)
        yield stores
        for store in stores.values():
            store.close()


def benchmark_store(repeats: int, num_blocks: int) -> Outcome:
    """Measure all ways in turns."""
    work, plain_ms, results = Round(num_blocks), list[float](), dict[str, Measured]()
    with open_stores(num_blocks) as stores:
        for number in range(WARM_UPS + repeats):
            if number == WARM_UPS:
                plain_ms, results = [], {}
            plain_ms.append(timed_ms(lambda: np.copyto(work.target, work.source)))
            for name, store in stores.items():
                work.renew()
                measure(store, work, results.setdefault(name, Measured()))
    return describe(plain_ms, results, num_blocks)


def describe(plain_ms: Sequence[float], results: dict[str, Measured], num_blocks: int) -> Outcome:
    mebibytes = num_blocks * BLOCK_BYTES / 2**20
    rows = [["plain copy", Spread.of(plain_ms).show(), f"{mebibytes / 1024 / Spread.of(plain_ms).median * 1e3:.1f}", "1"]]
    figures: dict[str, object] = {"plain_ms": list(plain_ms)}
    for name, measured in results.items():
        for what in ("put", "get", "checked"):
            times: list[float] = getattr(measured, f"{what}_ms")
            rate = mebibytes / 1024 / Spread.of(times).median * 1e3
            ratio = Spread.of_ratios(plain_ms, times)
            label = {"put": "put", "get": "get", "checked": "get, checked"}[what]
            rows.append([f"{name}: {label}", Spread.of(times).show(), f"{rate:.1f}", ratio.show(2)])
            figures[f"{name}_{what}_ms"] = times
        figures[f"{name}_lookup_ms"] = measured.lookup_ms
    copies = Table(["", f"ms for {mebibytes:.0f} MiB", "GiB/s", "rate of a plain copy"], rows)
    lookups = Table(
        [f"lookup of {NUM_LOOKUP_KEYS} blocks", "ms"],
        [[name, Spread.of(measured.lookup_ms).show(2)] for name, measured in results.items()],
    )
    goals = goals_of(plain_ms, results)
    return Outcome([copies, lookups], goal_notes(goals), figures, goals)


def goals_of(plain_ms: Sequence[float], results: Mapping[str, Measured]) -> list[dict[str, object]]:
    """Return the aims: the rate of copies through the arena of the same host, and the time of every lookup."""
    near = results["same host"]
    goals = [
        at_least(f"same host: {what}, rate of a plain copy", Spread.of_ratios(plain_ms, times).median, COPY_GOAL, "ratio")
        for what, times in (("put", near.put_ms), ("get", near.get_ms))
    ]
    for name, measured in results.items():
        lookup_ms = Spread.of(measured.lookup_ms).median
        goals.append(at_most(f"{name}: lookup of {NUM_LOOKUP_KEYS} blocks", lookup_ms, LOOKUP_GOAL_MS, "ms"))
    return goals


def benchmark_trace(path: Path, capacities: Sequence[int]) -> Outcome:
    """Replay a trace through all policies at several capacities."""
    trace = read_trace(path)
    num_distinct = len({block for blocks in trace for block in blocks})
    rows, figures = [], dict[str, object]()
    for capacity in capacities:
        rates = {name: replay(trace, make_policy(name, capacity)).hit_rate for name in POLICIES}
        bound = clairvoyant(trace, capacity).hit_rate
        shown = [f"{100 * rate:.1f}" for rate in (*rates.values(), bound)]
        rows.append([f"{capacity:,}", f"{100 * capacity / num_distinct:.1f}", *shown])
        figures[str(capacity)] = {**rates, "clairvoyant": bound}
    table = Table(["capacity, blocks", "% of all", *(f"{name}, %" for name in POLICIES), "clairvoyant, %"], rows)
    note = (
        f"{path.name}: {len(trace):,} requests, {sum(map(len, trace)):,} blocks of {TOKENS_PER_TRACE_BLOCK} tokens, "
        f"{num_distinct:,} different ones; hit rate = blocks found with their whole prefix / blocks asked for"
    )
    return Outcome([table], [note], figures)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__ or "", repeats=9, takes_model=False)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="replay this Mooncake trace through the policies instead")
    parser.add_argument("--capacities", type=int, nargs="+", default=TRACE_CAPACITIES, metavar="BLOCKS")
    arguments: argparse.Namespace = parser.parse_args(argv)
    machine = Machine.now()
    if arguments.trace is not None:
        capacities = arguments.capacities[:1] if arguments.quick else arguments.capacities
        outcome = benchmark_trace(arguments.trace, capacities)
    else:
        repeats, num_blocks = (1, QUICK_BLOCKS) if arguments.quick else (arguments.repeats, NUM_BLOCKS)
        outcome = benchmark_store(repeats, num_blocks)
    publish(outcome, machine, arguments)


if __name__ == "__main__":
    main()
