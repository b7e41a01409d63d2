"""What KV cache groups save: requests that run at once in the same memory, and bytes of a handoff.

    python benchmarks/hybrid.py [--json FILE] [--markdown] [--quick]

The layers of Gemma 3 270m, 3 with full attention and 15 with windows of 512 tokens (1 KV head of 256, bfloat16, blocks of 16
tokens), as KV cache groups, and once more as if all 18 were full. No model runs: the scheduler and the KV cache manager are
real, sampled tokens are made up. Steps have 512 tokens, and as many are in flight.

Requests at once: both get a pool of the same bytes, and more prompts of 8,192 tokens than fit, all different. If every layer
keeps everything, the pool holds 8 of them and 256 tokens of output for each. Counted is how many decode together when no more
is admitted, none of them preempted.

Handoff: the blocks that a decode worker allocates for a prompt of 4,096 tokens that is loaded whole, which are the blocks it
reads.

Everything here is counted, not timed, and comes out the same on every machine.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from common import Machine, Outcome, Table, at_least, at_most, goal_notes, make_parser, publish

from core.clock import SystemClock
from core.config_workers import SchedulerSection
from core.kv.grouping import group_layers
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec, SlidingWindowSpec
from core.request import ModelRunnerOutput, NewRequest, Request
from core.sched.scheduler import Scheduler
from core.wire.sampling import SamplingParams

BLOCK_SIZE, IN_FLIGHT_TOKENS = 16, 512
CONTEXT, HANDOFF_TOKENS = 8192, 4096
FULL_PROMPTS, OUTPUT_TOKENS = 8, 256  # that the pool holds if every layer keeps everything
MAX_MODEL_LEN = CONTEXT + 2048
VOCAB_SIZE = 50_000
GOALS = {"requests": 3.0, "handoff": 0.35}
SHAPE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_dim": 256, "dtype_bytes": 2}
HASHER = BlockHasher(b"benchmark")


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one way to keep the KV. ``bound_blocks``: what admission reserves for one prompt at most."""

    name: str
    num_groups: int
    block_bytes: int
    num_blocks: int
    pool_bytes: int
    bound_blocks: int
    requests_at_once: int
    blocks_per_request: float
    handoff_bytes: int


def main() -> None:
    arguments = make_parser(__doc__ or "", 1, takes_model=False).parse_args()
    machine = Machine.now()
    context = 1024 if arguments.quick else CONTEXT
    full = FullAttentionSpec(**SHAPE)
    window = SlidingWindowSpec(sliding_window=512, **SHAPE)
    layers: list[KVCacheSpec] = [full if layer % 6 == 5 else window for layer in range(18)]
    pool_bytes = FULL_PROMPTS * (context + OUTPUT_TOKENS) // BLOCK_SIZE * len(layers) * full.page_size_bytes
    hybrid = measure("groups", layers, pool_bytes, context)
    all_full = measure("all layers full", [full] * len(layers), pool_bytes, context)
    publish(outcome_of(hybrid, all_full, context), machine, arguments)


def measure(name: str, layers: list[KVCacheSpec], pool_bytes: int, context: int) -> Figures:
    groups = group_layers(layers)
    block_bytes = KVCacheConfig(2, groups).block_bytes
    config = KVCacheConfig(pool_bytes // block_bytes + 1, groups)  # and the null block
    num_running, num_held = requests_at_once(config, context)
    return Figures(
        name=name,
        num_groups=len(groups),
        block_bytes=block_bytes,
        num_blocks=config.num_blocks - 1,
        pool_bytes=(config.num_blocks - 1) * block_bytes,
        bound_blocks=config.num_blocks_of_sequence(context, IN_FLIGHT_TOKENS, MAX_MODEL_LEN),
        requests_at_once=num_running,
        blocks_per_request=num_held / num_running,
        handoff_bytes=blocks_of_handoff(config) * block_bytes,
    )


def make_manager(config: KVCacheConfig) -> KVCacheManager:
    return KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE, 16, max_in_flight_tokens=IN_FLIGHT_TOKENS)


def requests_at_once(config: KVCacheConfig, context: int) -> tuple[int, int]:
    """Return how many requests decode together when no more is admitted, and the blocks that they hold."""
    manager = make_manager(config)
    section = SchedulerSection(max_num_batched_tokens=IN_FLIGHT_TOKENS, max_num_seqs=256)
    scheduler = Scheduler(section, manager, MAX_MODEL_LEN, None, SystemClock())
    for number in range(10 * FULL_PROMPTS):
        scheduler.add_request(make_request(number, context - 1))
    num_running = -1
    while num_running < len(scheduler.running) or is_prefilling(scheduler):
        num_running = len(scheduler.running)
        step = scheduler.schedule()
        assert not step.preempted_req_ids, "a request was admitted that did not fit"
        sampled = {
            request_id: [1]
            for request_id in step.num_scheduled_tokens
            if scheduler.requests[request_id].num_computed_tokens == scheduler.requests[request_id].num_tokens
        }
        scheduler.update_from_output(step, ModelRunnerOutput(sampled))
    return num_running, manager.block_pool.num_usable_blocks - manager.block_pool.num_free_blocks


def is_prefilling(scheduler: Scheduler) -> bool:
    return any(request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running)


def blocks_of_handoff(config: KVCacheConfig) -> int:
    """Return how many blocks a decode worker allocates for a prompt that it loads whole."""
    manager = make_manager(config)
    request = make_request(0, HANDOFF_TOKENS)
    blocks = manager.allocate_slots(request, 0, num_external_computed_tokens=HANDOFF_TOKENS, delay_cache_blocks=True)
    assert blocks is not None
    return sum(map(len, blocks.blocks))


def make_request(number: int, num_tokens: int) -> Request:
    source = random.Random(number)
    prompt = [source.randrange(VOCAB_SIZE) for _ in range(num_tokens)]
    sampling = SamplingParams(max_tokens=MAX_MODEL_LEN)
    return Request(NewRequest(request_id=f"request-{number}", prompt_token_ids=prompt, sampling=sampling), HASHER)


def outcome_of(hybrid: Figures, all_full: Figures, context: int) -> Outcome:
    requests = hybrid.requests_at_once / all_full.requests_at_once
    handoff = hybrid.handoff_bytes / all_full.handoff_bytes
    rows = [
        [
            figures.name,
            str(figures.num_groups),
            f"{figures.pool_bytes:,}",
            f"{figures.num_blocks:,}",
            f"{figures.bound_blocks:,}",
            f"{figures.blocks_per_request:,.0f}",
            str(figures.requests_at_once),
            f"{figures.handoff_bytes:,}",
        ]
        for figures in (hybrid, all_full)
    ]
    columns = [
        "layers as",
        "groups",
        "pool bytes",
        "blocks",
        "reserved for one",
        "held by one",
        f"requests of {context:,} at once",
        f"handoff of {HANDOFF_TOKENS:,}, bytes",
    ]
    goals = [
        at_least("requests at once in the same pool, groups / all layers full", requests, GOALS["requests"], "ratio"),
        at_most("bytes of a handoff, groups / all layers full", handoff, GOALS["handoff"], "ratio"),
    ]
    figures = {"hybrid": asdict(hybrid), "all_full": asdict(all_full), "requests": requests, "handoff": handoff}
    return Outcome([Table(columns, rows)], goal_notes(goals), figures, goals)


if __name__ == "__main__":
    main()
