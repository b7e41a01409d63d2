"""The gain from a tier below the pool: the time to the first token of a long prefix that is loaded, not computed; and copies.

    python benchmarks/tiers_connector.py [--model smollm2-135m] [--repeats 5] [--json FILE] [--markdown] [--quick]

*First token*: an engine in this process, with the real model, computes a prompt of 2,048 tokens and 16 more that no cache has
seen; the connector saves its blocks, the pool forgets everything, and the same prompt comes again: now 2,048 tokens are loaded
and 16 computed. Timed is from the request to its first token. The tier is the worker's own arena (``offload``), then a store in
a process of its own on this host (``store``). Every repeat does both with a new prompt; the ratio is of the two.

*Copies*: the connector's mover saves 32 blocks of 2,949,120 bytes (SmolLM2 in float32, 64 tokens) to an arena of this process
and loads them into other blocks, beside a plain copy of the same bytes with numpy. Each save is of blocks that are new there
and have a digest. A load checks the digest of every copy, in the pass that copies. Figures are medians (smallest..largest);
ratios are medians of the ratios of single repeats.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from common import Machine, Outcome, Spread, Table, at_least, goal_notes, make_parser, publish, timed_ms

from connectors.offload.arena import offload_connector
from connectors.pool_access import HostPoolAccess
from connectors.reports import LoadEnded
from connectors.store.shared import store_connector
from connectors.testing.contexts import connector_context
from connectors.tier.connector import TierConnector
from connectors.tier.messages import SaveItem, TierConnectorMetadata, TierLoad
from connectors.tier.transfer import TierTransfer
from core.clock import SystemClock
from core.config import KVFerryConfig, load_config
from core.config_workers import KVStoreSection
from core.digest import BlockDigester
from core.engine.build import BuiltEngine, build_engine
from core.ids import RandomIds
from core.kv.seals import ExpectedSeal, SealTable, each_by_itself, map_seal_memory
from core.request import NewRequest
from core.wire.kv import KVLayoutInfo
from core.wire.sampling import SamplingParams
from kvstore.build import make_embedded_store
from kvstore.key import StoreKey

PREFIX_TOKENS, OWN_TOKENS = 2048, 16
QUICK_TOKENS = 128
COPY_BYTES, COPY_BLOCKS = 2_949_120, 32
QUICK_BLOCKS = 4
WARM_UPS = 1
TTFT_GOAL, COPY_GOAL = 5.0, 0.6
INCARNATION = 1


@dataclass(slots=True)
class Worker:
    """An engine and its connector, which this thread steps."""

    built: BuiltEngine
    connector: TierConnector

    def first_token_ms(self, request_id: str, prompt: Sequence[int]) -> float:
        """Run a request to its only token; return how long that took."""
        engine = self.built.engine
        begin = time.perf_counter()
        engine.add_request(
            NewRequest(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=1, temperature=0.0))
        )
        while True:
            outputs = engine.step()
            if any(output.new_token_ids for output in outputs):
                return (time.perf_counter() - begin) * 1e3
            if not engine.has_work():
                time.sleep(0.0002)

    def forget(self) -> None:
        """Wait until everything is saved, then lose what the pool holds."""
        while self.connector.num_saving_blocks() or self.built.engine.has_requests():
            self.built.engine.step()
            time.sleep(0.001)
        if not self.built.engine.scheduler.kv_cache_manager.reset_prefix_cache():
            raise RuntimeError("blocks are in use")


@contextmanager
def worker_of(tier: str, config: KVFerryConfig, store: KVStoreSection) -> Iterator[Worker]:
    """Build an engine with this tier; both end with the block."""
    made: list[TierConnector] = []

    def make_connector(layout: KVLayoutInfo, fingerprint: bytes) -> TierConnector:
        model = {"layout": layout, "model_fingerprint": fingerprint, "incarnation": INCARNATION}
        context = connector_context("prefill", **model, connector=config.connector, kvstore=store)
        made.append(offload_connector(context) if tier == "offload" else store_connector(context))
        return made[-1]

    built = build_engine(config, SystemClock(), make_connector, incarnation=INCARNATION)
    try:
        asyncio.run(made[0].start())
        yield Worker(built, made[0])
    finally:
        built.engine.shutdown()
        asyncio.run(made[0].stop())
        built.pool.close()


@contextmanager
def store_process(memory_bytes: int) -> Iterator[str]:
    """Run ``kvferry kvstore`` and yield its address."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "kvferry", "kvstore", "--address", "tcp://127.0.0.1:0", "--log-level", "WARNING"]
    command += ["--memory-bytes", str(memory_bytes), "--ready-fd", str(writing)]
    with subprocess.Popen(command, pass_fds=[writing]) as process:
        os.close(writing)
        try:
            with os.fdopen(reading) as pipe:
                address = json.loads(pipe.readline())["store_address"]
            yield address
        finally:
            process.terminate()


def measure_first_tokens(model: str, num_tokens: int, repeats: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return, for each tier, the times of a prefix that is computed and of one that is loaded."""
    memory_bytes = 1 << 30  # more than all prompts of a run take, so that nothing is evicted
    memory = [f"cache.memory_bytes={memory_bytes}", f"connector.offload.memory_bytes={memory_bytes}"]
    settings = [f"model.name={model}", "model.dtype=float32", *memory]
    config = load_config(assignments=[*settings, "connector.name=offload", "scheduler.max_num_batched_tokens=512"])
    found = {}
    with store_process(memory_bytes) as address:
        for tier in ("offload", "store"):
            with worker_of(tier, config, KVStoreSection(address=address)) as worker:
                found[tier] = measure_tier(worker, num_tokens, repeats)
    return found


def measure_tier(worker: Worker, num_tokens: int, repeats: int) -> tuple[list[float], list[float]]:
    computed, loaded = list[float](), list[float]()
    for number in range(WARM_UPS + repeats):
        source = random.Random(number)
        prompt = [source.randrange(1000, 40_000) for _ in range(num_tokens + OWN_TOKENS)]
        computed.append(worker.first_token_ms(f"computed-{number}", prompt))
        worker.forget()
        before = worker.connector.scheduler.num_missed_saves
        loaded.append(worker.first_token_ms(f"loaded-{number}", prompt))
        if before or worker.built.engine.stats.num_load_fallbacks:
            raise RuntimeError("blocks were not saved, or could not be loaded")
        worker.forget()
    return computed[WARM_UPS:], loaded[WARM_UPS:]


@dataclass(slots=True)
class Copies:
    """Milliseconds of every repeat."""

    plain: list[float] = field(default_factory=list)
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)


def measure_copies(num_blocks: int, repeats: int) -> Copies:
    """Save and load blocks through a mover."""
    rows = np.random.default_rng(1).integers(0, 256, (2 * num_blocks, COPY_BYTES), dtype=np.uint8)
    digester = BlockDigester(COPY_BYTES)
    seals = SealTable(
        map_seal_memory(2 * num_blocks), INCARNATION, 7, each_by_itself(lambda block_id: digester.digest(rows[block_id]))
    )
    clock = SystemClock()
    section = KVStoreSection(memory_bytes=4 * num_blocks * (COPY_BYTES + 8192), eviction="lru", max_pinned_share=1.0)
    store = make_embedded_store(section, COPY_BYTES, clock, RandomIds())
    mover = TierTransfer("bench", store, HostPoolAccess(rows.reshape(-1).data, COPY_BYTES), seals, COPY_BYTES, clock)
    copies, ids = Copies(), range(num_blocks)
    for number in range(WARM_UPS + repeats):
        keys = [StoreKey(bytes([number, *index.to_bytes(15, "little")]), (7).to_bytes(16, "little"), 0) for index in ids]
        for block_id, key in zip(ids, keys, strict=True):
            seals.seal(block_id, ExpectedSeal(1, 0, key.block_hash, 64))
        saves = [SaveItem(key, block_id, 1) for block_id, key in zip(ids, keys, strict=True)]
        load = TierLoad("r", tuple(keys), tuple(range(num_blocks, 2 * num_blocks)), 64 * num_blocks)
        copies.plain.append(timed_ms(lambda: np.copyto(rows[num_blocks:], rows[:num_blocks])))
        copies.save.append(timed_ms(lambda saves=saves: drive(mover, TierConnectorMetadata(saves=saves))))
        rows[num_blocks:] = 0
        copies.load.append(timed_ms(lambda load=load: drive(mover, TierConnectorMetadata(loads=[load]))))
        if not (rows[num_blocks:] == rows[:num_blocks]).all():
            raise RuntimeError("the blocks that were loaded are not those that were saved")
    mover.close()
    store.close()
    return Copies(*(times[WARM_UPS:] for times in (copies.plain, copies.save, copies.load)))


def drive(mover: TierTransfer, metadata: TierConnectorMetadata) -> None:
    """Do what the mover's thread does until the job is over. Its first report may only say that saves are slow."""
    mover.submit(metadata)
    while mover.is_waiting:
        if not mover.step():
            time.sleep(0.0001)
    for report in mover.take_reports():
        if isinstance(report, LoadEnded) and report.error is not None:
            raise RuntimeError(f"blocks could not be loaded: {report.error.message}")


def outcome_of(first: dict[str, tuple[list[float], list[float]]], copies: Copies, num_tokens: int, num_blocks: int) -> Outcome:
    rows = [
        [tier, Spread.of(computed).show(), Spread.of(loaded).show(), Spread.of_ratios(computed, loaded).show()]
        for tier, (computed, loaded) in first.items()
    ]
    tokens = Table([f"{num_tokens:,} tokens", "computed, ms", "loaded, ms", "times as fast"], rows)
    mebibytes = num_blocks * COPY_BYTES / 2**20
    ways = {"plain copy": copies.plain, "save": copies.save, "load, checked": copies.load}
    table = Table(
        [f"{mebibytes:.0f} MiB", "ms", "rate of a plain copy"],
        [[name, Spread.of(times).show(), Spread.of_ratios(copies.plain, times).show(2)] for name, times in ways.items()],
    )
    goals = [
        at_least(f"{tier}: first token, computed / loaded", Spread.of_ratios(*times).median, TTFT_GOAL, "ratio")
        for tier, times in first.items()
    ]
    for name in ("save", "load, checked"):
        rate = Spread.of_ratios(copies.plain, ways[name]).median
        goals.append(at_least(f"{name}: rate of a plain copy", rate, COPY_GOAL, "ratio"))
    figures: dict[str, object] = {
        "plain_ms": copies.plain,
        "save_ms": copies.save,
        "load_ms": copies.load,
    }
    for tier, (computed, loaded) in first.items():
        figures |= {f"{tier}_computed_ms": computed, f"{tier}_loaded_ms": loaded}
    return Outcome([tokens, table], goal_notes(goals), figures, goals)


def main() -> None:
    arguments = make_parser(__doc__ or "", 5).parse_args()
    machine = Machine.now()
    repeats = 1 if arguments.quick else arguments.repeats
    num_tokens = QUICK_TOKENS if arguments.quick else PREFIX_TOKENS
    num_blocks = QUICK_BLOCKS if arguments.quick else COPY_BLOCKS
    copies = measure_copies(num_blocks, repeats)
    first = measure_first_tokens(arguments.model, num_tokens, repeats)
    publish(outcome_of(first, copies, num_tokens, num_blocks), machine, arguments)


if __name__ == "__main__":
    main()
