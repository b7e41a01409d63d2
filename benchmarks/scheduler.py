"""How much time the scheduler takes per request and step, without a model.

256 requests with prompts of 512 tokens decode together (block size 16, prefix caching on); every step samples one token for
each. Timed are ``schedule`` + ``update_from_output``, and building + adding a request, block hashes included. The yardstick,
an empty Python loop over as many requests, runs between the steps, so that figures of two machines can be compared.

    python benchmarks/scheduler.py [--requests 256] [--prompt-tokens 512] [--steps 200] [--json]

The figures of steps are means over all steps; ``slowest`` is the 95th percentile. A request needs the KV cache manager in 2 of
16 steps, when its token completes a block or opens the next. The prompts are computed in 16 waves, so each step has its share
of those. ``add_request`` is a median.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

from core.clock import SystemClock
from core.config_workers import SchedulerSection
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, ceil_div
from core.request import ModelRunnerOutput, NewRequest, Request
from core.sched.scheduler import Scheduler
from core.wire.sampling import SamplingParams

VOCAB_SIZE = 50_000


@dataclass(frozen=True, slots=True)
class Figures:
    num_requests: int
    num_prompt_tokens: int
    num_steps: int
    schedule_us: float  # per request and step
    update_us: float
    step_us: float
    slowest_step_us: float
    yardstick_us: float
    step_per_yardstick: float
    add_request_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    figures = measure(args.requests, args.prompt_tokens, args.steps, args.block_size)
    if args.json:
        print(json.dumps(asdict(figures)))
        return
    print(f"{figures.num_requests} requests, prompts of {figures.num_prompt_tokens} tokens, {figures.num_steps} decode steps")
    print(f"schedule             {figures.schedule_us:8.2f} us per request and step")
    print(f"update_from_output   {figures.update_us:8.2f} us per request and step")
    print(f"both                 {figures.step_us:8.2f} us per request and step; slowest {figures.slowest_step_us:.2f} us")
    print(
        f"empty loop           {figures.yardstick_us:8.3f} us per request; both / empty loop = {figures.step_per_yardstick:.0f}"
    )
    print(f"add_request          {figures.add_request_us:8.2f} us, {figures.num_prompt_tokens} tokens hashed")


def measure(num_requests: int, num_prompt_tokens: int, num_steps: int, block_size: int) -> Figures:
    scheduler = make_scheduler(num_requests, num_prompt_tokens + num_steps + 2, block_size)
    add_s = add_requests(scheduler, num_requests, num_prompt_tokens, num_steps)
    while scheduler.waiting:  # prefill, not timed
        run_step(scheduler)
    run_step(scheduler)

    gc.collect()
    gc.freeze()
    schedule_s, update_s, yardstick_s = [], [], []
    for _ in range(num_steps - 10):
        schedule, update = run_step(scheduler)
        schedule_s.append(schedule)
        update_s.append(update)
        yardstick_s.append(empty_loop(num_requests))
    step_s = [schedule + update for schedule, update in zip(schedule_s, update_s, strict=True)]
    per_request = 1e6 / num_requests
    step_us, yardstick_us = statistics.fmean(step_s) * per_request, statistics.fmean(yardstick_s) * per_request
    return Figures(
        num_requests=num_requests,
        num_prompt_tokens=num_prompt_tokens,
        num_steps=len(step_s),
        schedule_us=statistics.fmean(schedule_s) * per_request,
        update_us=statistics.fmean(update_s) * per_request,
        step_us=step_us,
        slowest_step_us=statistics.quantiles(step_s, n=20)[-1] * per_request,
        yardstick_us=yardstick_us,
        step_per_yardstick=step_us / yardstick_us,
        add_request_us=statistics.median(add_s) * 1e6,
    )


def make_scheduler(num_requests: int, max_model_len: int, block_size: int) -> Scheduler:
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_dim=64, dtype_bytes=4)
    num_blocks = num_requests * ceil_div(max_model_len, block_size) + 1
    manager = KVCacheManager(KVCacheConfig(num_blocks, (KVCacheGroup((0,), spec),)), max_model_len, block_size, 16)
    config = SchedulerSection(max_num_batched_tokens=8192, max_num_seqs=num_requests)
    return Scheduler(config, manager, max_model_len, None, SystemClock())


def add_requests(scheduler: Scheduler, num_requests: int, num_prompt_tokens: int, num_steps: int) -> list[float]:
    """Add requests with random prompts; return the seconds of each."""
    source = random.Random(0)
    hasher = BlockHasher(b"benchmark")
    sampling = SamplingParams(max_tokens=num_steps + 1)
    seconds = []
    for number in range(num_requests):
        prompt = [source.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)]
        start = time.perf_counter()
        new = NewRequest(request_id=f"request-{number}", prompt_token_ids=prompt, sampling=sampling)
        scheduler.add_request(Request(new, hasher))
        seconds.append(time.perf_counter() - start)
    return seconds


def run_step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step with made-up tokens; return the seconds of its two halves."""
    start = time.perf_counter()
    output = scheduler.schedule()
    schedule_s = time.perf_counter() - start
    requests = scheduler.requests
    sampled = {
        request_id: [requests[request_id].num_tokens % VOCAB_SIZE]
        for request_id in output.num_scheduled_tokens
        if requests[request_id].num_computed_tokens == requests[request_id].num_tokens
    }
    start = time.perf_counter()
    scheduler.update_from_output(output, ModelRunnerOutput(sampled))
    return schedule_s, time.perf_counter() - start


def empty_loop(num_requests: int) -> float:
    start = time.perf_counter()
    for _ in range(num_requests):
        pass
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
