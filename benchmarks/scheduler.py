"""How much time the scheduler takes per request and step, without a model.

256 requests with prompts of 512 tokens decode together (block size 16, prefix caching on); every step samples one token for
each. Timed are ``schedule`` + ``update_from_output``, and building + adding a request, block hashes included. The yardstick,
an empty Python loop over as many requests, runs between the steps, so that figures of two machines can be compared.

    python benchmarks/scheduler.py [--requests 256] [--prompt-tokens 512] [--steps 200] [--peer] [--json FILE] [--markdown]
                                   [--quick]

The figures of steps are means over all steps; ``slowest`` is the 95th percentile. A request needs the KV cache manager in 2 of
16 steps, when its token completes a block or opens the next. The prompts are computed in 16 waves, so each step has its share
of those. ``add_request`` is a median. With ``--peer`` vLLM does the same (``scheduler_peer.py``, after ``make install-vllm``):
both add as many requests in turns, to an engine, which checks them, and to a scheduler alone; medians of all. Hashing is
included everywhere. Goals: a tenth of vLLM's time; 12 us for a request's step, and 100 us to add it.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from common import MODEL, Machine, Outcome, Table, at_most, goal_notes, make_parser, publish
from peer_process import PeerProcess

from core.clock import SystemClock
from core.config_types import default_cache_dir
from core.config_workers import SchedulerSection
from core.engine.core import EngineCore
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, ceil_div
from core.model.hub import resolve_model
from core.request import ModelRunnerOutput, NewRequest, Request, SchedulerOutput
from core.sched.scheduler import Scheduler
from core.token_ids import pack_token_ids
from core.wire.sampling import SamplingParams

VOCAB_SIZE = 50_000
STEP_GOAL_US, ADD_GOAL_US, PEER_GOAL = 12.0, 100.0, 0.1
PEER_ROUNDS, PEER_OUTPUT_TOKENS, PEER_VOCAB_SIZE = 5, 200, 49_000


@dataclass(frozen=True, slots=True)
class Figures:
    """Times of steps and of adding requests."""

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
    peer: PeerFigures | None = None


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """Adding a request here and in vLLM, in turns: to a scheduler, and to an engine; and our hashes of its prompt alone."""

    scheduler_us: float
    engine_us: float
    vllm_scheduler_us: float
    vllm_engine_us: float
    chain_us: float  # of the hashes alone


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=PEER_ROUNDS, takes_model=False)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--peer", action="store_true", help="compare add_request with vLLM's")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.prompt_tokens, arguments.steps, arguments.repeats = 8, 32, 20, 1
    machine = Machine.now()
    size = arguments.requests, arguments.prompt_tokens, arguments.block_size
    figures = measure(*size, arguments.steps)
    if arguments.peer:
        figures = replace(figures, peer=compare(*size, arguments.repeats))
    publish(outcome(figures), machine, arguments)


def outcome(figures: Figures) -> Outcome:
    ours = (
        ("schedule", figures.schedule_us),
        ("update_from_output", figures.update_us),
        ("both", figures.step_us),
        ("both, 95th percentile", figures.slowest_step_us),
        ("an empty loop", figures.yardstick_us),
        (f"add_request, {figures.num_prompt_tokens} tokens hashed", figures.add_request_us),
    )
    tables = [Table(("us for a request", ""), [(name, f"{us:.3g}") for name, us in ours])]
    if (peer := figures.peer) is not None:
        rows = [
            (f"to the {name}", f"{us:.1f}", f"{theirs:.1f}", f"{us / theirs:.2f}")
            for name, us, theirs in (
                ("engine, which checks the request", peer.engine_us, peer.vllm_engine_us),
                ("scheduler alone", peer.scheduler_us, peer.vllm_scheduler_us),
            )
        ]
        rows.append(("of it the chain of hashes", f"{peer.chain_us:.1f}", "", ""))
        tables.append(Table(("adding a request", "ours, us", "vLLM, us", "ours / vLLM"), rows))
    aims = goals(figures)
    notes = [
        f"{figures.num_requests} requests, prompts of {figures.num_prompt_tokens} tokens, {figures.num_steps} decode steps"
    ]
    return Outcome(tables, notes + goal_notes(aims), asdict(figures), aims)


def goals(figures: Figures) -> list[dict[str, object]]:
    aims = [
        ("schedule and update_from_output, for a request", figures.step_us, STEP_GOAL_US, "us"),
        ("adding a request", figures.add_request_us, ADD_GOAL_US, "us"),
    ]
    if (peer := figures.peer) is not None:
        aims += [
            ("adding a request to the engine, share of vLLM's time", peer.engine_us / peer.vllm_engine_us, PEER_GOAL, "ratio"),
            (
                "adding a request to the scheduler, share of vLLM's time",
                peer.scheduler_us / peer.vllm_scheduler_us,
                PEER_GOAL,
                "ratio",
            ),
        ]
    return [at_most(*aim) for aim in aims]


def measure(num_requests: int, num_prompt_tokens: int, block_size: int, num_steps: int) -> Figures:
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


def compare(num_requests: int, num_prompt_tokens: int, block_size: int, num_rounds: int) -> PeerFigures:
    """Add the same prompts here and in vLLM, to engines and to schedulers, in turns."""
    folder = resolve_model(MODEL, Path(default_cache_dir())).path
    source, hasher = random.Random(1), BlockHasher(b"benchmark", block_size)
    chain_s: list[float] = []
    ours: dict[str, list[float]] = {"engine": [], "scheduler": []}
    theirs: dict[str, list[float]] = {"engine": [], "scheduler": []}
    with PeerProcess("scheduler_peer.py", str(folder), str(num_requests), str(block_size)) as peer:
        for turn in range(1 + num_rounds):
            prompts = [[source.randrange(PEER_VOCAB_SIZE) for _ in range(num_prompt_tokens)] for _ in range(num_requests)]
            found = peer.ask(prompts)
            adders = (
                add_to_scheduler(num_requests, num_prompt_tokens, block_size),
                add_to_engine(num_requests, num_prompt_tokens, block_size),
            )
            for kind, add in zip(("scheduler", "engine"), adders, strict=True):
                seconds = [timed(add, f"{kind}-{number}", prompt) for number, prompt in enumerate(prompts)]
                if turn:  # the first round warms up
                    ours[kind] += seconds
                    theirs[kind] += found[kind]
            chain_s += [timed_chain(hasher, prompt) for prompt in prompts]
    medians = {f"{kind}_us": 1e6 * statistics.median(ours[kind]) for kind in ours}
    vllm = {f"vllm_{kind}_us": statistics.median(theirs[kind]) for kind in theirs}
    return PeerFigures(**medians, **vllm, chain_us=1e6 * statistics.median(chain_s))


def add_to_scheduler(num_requests: int, num_prompt_tokens: int, block_size: int) -> Callable[[str, list[int]], None]:
    """Return what makes a request, hashes it and adds it to a new scheduler."""
    scheduler = make_scheduler(num_requests, num_prompt_tokens + PEER_OUTPUT_TOKENS + 1, block_size)
    hasher, sampling = BlockHasher(b"benchmark"), SamplingParams(max_tokens=PEER_OUTPUT_TOKENS)

    def add(name: str, prompt: list[int]) -> None:
        new = NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        scheduler.add_request(Request(new, hasher))

    return add


def add_to_engine(num_requests: int, num_prompt_tokens: int, block_size: int) -> Callable[[str, list[int]], None]:
    """Return what adds a request to a new engine, which checks it, hashes it and adds it to its scheduler."""
    scheduler = make_scheduler(num_requests, num_prompt_tokens + PEER_OUTPUT_TOKENS + 1, block_size)
    engine = EngineCore(scheduler, NoRunner(), BlockHasher(b"benchmark"), VOCAB_SIZE)
    sampling = SamplingParams(max_tokens=PEER_OUTPUT_TOKENS)

    def add(name: str, prompt: list[int]) -> None:
        engine.add_request(NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))

    return add


class NoRunner:
    """In the place of a model: requests are added to its engine, and no step is run."""

    failure: Exception | None = None

    def launch_model(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        raise NotImplementedError

    def shutdown(self) -> None:
        pass


def timed(add: Callable[[str, list[int]], None], name: str, prompt: list[int]) -> float:
    """Add a request and return the seconds that it took."""
    begin = time.perf_counter()
    add(name, prompt)
    return time.perf_counter() - begin


def timed_chain(hasher: BlockHasher, prompt: list[int]) -> float:
    """Hash a prompt's blocks, from packed tokens, and return the seconds that it took."""
    tokens = pack_token_ids(prompt)
    begin = time.perf_counter()
    hasher.hash_request_blocks(tokens)
    return time.perf_counter() - begin


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
