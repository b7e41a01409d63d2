"""Handoffs that all want to load at once: how many steps, preemptions and computed tokens the scheduler needs.

The real scheduler without a model; loads take a number of steps. Counted, not timed, so that every run prints the same.

    thrash   200 handoffs of 128 + 128 tokens, 16 slots, 400 blocks of 16 tokens: loads compete with running requests for blocks
    idle     the same with slow loads and blocks for everybody: too few loads in flight leave slots empty
    long promises   max_tokens is three times what is put out
    mixed    every second request computes its prompt here
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass

from common import Machine, Outcome, Table, at_most, make_parser, publish

from core.clock import SystemClock
from core.config_workers import SchedulerSection
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import KVConnectorOutput, ModelRunnerOutput, NewRequest, Request
from core.sched.scheduler import Scheduler
from core.testing.scripted_loads import Remote, Script, ScriptedScheduler
from core.wire.sampling import SamplingParams

BLOCK_SIZE = 16
NUM_TOKENS = 128  # of a prompt, and of an output
STOP = 0
MAX_STEPS = 100_000
MAX_EMPTY_SLOTS = 1.0  # on average, although loads are slow


@dataclass(frozen=True)
class Case:
    name: str
    num_blocks: int
    load_steps: int
    handoff_share: float = 1.0
    max_tokens: int = NUM_TOKENS  # what requests say; each puts out NUM_TOKENS
    num_requests: int = 200
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512


@dataclass(frozen=True)
class Figures:
    case: str
    num_steps: int
    num_preemptions: int
    num_computed_tokens: int
    num_output_tokens: int
    mean_running: float


CASES = (
    Case("thrash", num_blocks=400, load_steps=1),
    Case("thrash, slow loads", num_blocks=400, load_steps=32),
    Case("idle", num_blocks=4000, load_steps=32),
    Case("idle, very slow loads", num_blocks=4000, load_steps=128),
    Case("long promises", num_blocks=400, load_steps=32, max_tokens=3 * NUM_TOKENS),
    Case("mixed", num_blocks=400, load_steps=8, handoff_share=0.5),
)


def benchmark() -> Outcome:
    """Measure every case."""
    found = [measure(case) for case in CASES]
    rows = [
        [
            figures.case,
            *(f"{value:,}" for value in (figures.num_steps, figures.num_preemptions, figures.num_computed_tokens)),
            f"{figures.mean_running:.1f}",
        ]
        for figures in found
    ]
    table = Table(["case", "steps", "preemptions", "computed tokens", "running"], rows)
    goals = [at_most(f"{each.case}: preemptions", each.num_preemptions, 0, "preemptions") for each in found]
    slots = CASES[0].max_num_seqs
    idle = next(each for each in found if each.case == "idle")
    goals.append(at_most("idle: empty slots in a step", round(slots - idle.mean_running, 2), MAX_EMPTY_SLOTS, "slots"))
    return Outcome([table], figures={"cases": [asdict(each) for each in found]}, goals=goals)


def main() -> None:
    arguments = make_parser(__doc__ or "", repeats=1, takes_model=False).parse_args()
    machine = Machine.now()
    publish(benchmark(), machine, arguments)


def measure(case: Case) -> Figures:
    script = Script()
    scheduler = make_scheduler(case, script)
    add_requests(scheduler, script, case)
    loading: dict[str, int] = {}  # request → step at which its load ends
    num_steps = num_computed = num_output = num_preemptions = running = 0
    while scheduler.has_unfinished_requests():
        assert num_steps < MAX_STEPS, f"{case.name} does not end"
        output = scheduler.schedule()
        num_preemptions += len(output.preempted_req_ids)
        for load in getattr(output.kv_connector_metadata, "loads", ()):
            loading[load.request_id] = num_steps + case.load_steps
        done = {request_id for request_id, end in loading.items() if end <= num_steps}
        for request_id in done:
            del loading[request_id]
        requests = scheduler.requests
        sampled = {
            request_id: [STOP if requests[request_id].num_output_tokens == NUM_TOKENS - 1 else 1]
            for request_id in output.num_scheduled_tokens
            if requests[request_id].num_computed_tokens == requests[request_id].num_tokens
        }
        report = KVConnectorOutput(finished_recving=done) if done else None
        scheduler.update_from_output(output, ModelRunnerOutput(sampled, kv_connector_output=report))
        num_computed += output.total_num_scheduled_tokens
        num_output += len(sampled)
        running += len(output.num_scheduled_tokens)
        num_steps += 1
    return Figures(case.name, num_steps, num_preemptions, num_computed, num_output, running / num_steps)


def make_scheduler(case: Case, script: Script) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=64, dtype_bytes=4)
    config = KVCacheConfig(case.num_blocks + 1, (KVCacheGroup((0,), spec),))
    manager = KVCacheManager(config, 4 * NUM_TOKENS, BLOCK_SIZE, BLOCK_SIZE)
    section = SchedulerSection(max_num_batched_tokens=case.max_num_batched_tokens, max_num_seqs=case.max_num_seqs)
    return Scheduler(section, manager, 4 * NUM_TOKENS, ScriptedScheduler(script), SystemClock())


def add_requests(scheduler: Scheduler, script: Script, case: Case) -> None:
    source, hasher = random.Random(0), BlockHasher(b"benchmark")
    for number in range(case.num_requests):
        request_id = f"request-{number}"
        if number * case.handoff_share % 1 == 0:
            script.remote[request_id] = Remote(NUM_TOKENS)
        prompt = [source.randrange(1000) for _ in range(NUM_TOKENS)]
        new = NewRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=case.max_tokens),
            stop_token_ids=frozenset({STOP}),
        )
        scheduler.add_request(Request(new, hasher))


if __name__ == "__main__":
    main()
