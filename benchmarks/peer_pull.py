"""What loading beginnings of prompts from other workers gains over routing alone, on request traces.

    python benchmarks/peer_pull.py --traces DIR [--seeds 3] [--bounds] [--quick] [--json FILE] [--markdown]

Simulates 6 prefill workers as ``routing.py`` does, and the prefix caches of 4 decode workers of the same size, which hold the
prompts handed to them. The policy is that of kvferry's router, with and without sources: the real functions of
``router.routing`` predict and choose. A worker is taken to be idle while it loads, which is worse than what ours does. The
transfer takes 8 ms, half of them for the question, and 262,144 bytes per token at 25 GB/s (a Qwen3-32B class model on
400 Gbit/s); the router does not know these figures: it begins with its own and learns from transfers, handoffs included.

With ``--bounds`` also what more could gain. Every prompt gets the longest beginning that any cache holds when its turn comes,
at no cost: of the same caches ("any cache"); of one cache with the room of all ten besides, which holds nothing twice ("one
cache"); of one that never evicts anything ("endless").

Goals: with small caches (600 blocks of 512 tokens per worker) mean TTFT at least 3 times lower on the synthetic trace; with
large ones (6,000) never higher on any trace.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Table, at_least, goal_notes
from routing_policies import PredictedTime
from routing_simulation import (
    Contents,
    Job,
    PrefillMs,
    PrefillWorker,
    Results,
    Run,
    Scenario,
    count_hits,
    qwen_prefill_ms,
    simulate,
)

from kvferry.advise.trace import BLOCK_TOKENS, TraceRequest, read_trace, spread_arrivals
from router.routing.cost import score
from router.routing.transfer import AskTime, SourceTrust, TransferTime, pays

BYTES_PER_TOKEN = 262_144
LINK_BYTES_PER_MS = 25_000_000.0
ASKED_MS, LINK_BASE_MS = 4.0, 4.0
ENDLESS = 1 << 40  # blocks
NUM_WORKERS = 6
NUM_DECODE = 4
CASES = (  # trace, speed, blocks of a worker
    ("synthetic", 1.0, 600),
    ("synthetic", 1.5, 600),
    ("conversation", 1.0, 600),
    ("synthetic", 1.0, 6000),
    ("synthetic", 1.5, 6000),
    ("conversation", 1.0, 6000),
)
GOAL_SMALL, GOAL_LARGE = 3.0, 1.0
SMALL, SMALL_TRACE = 600, "synthetic"


def transfer_ms(num_tokens: int) -> float:
    """Return how long the simulated link takes, after the source's answer."""
    return LINK_BASE_MS + num_tokens * BYTES_PER_TOKEN / LINK_BYTES_PER_MS


class PeerRouter(PredictedTime):
    """kvferry's router with sources. ``sources`` maps requests under way to what is claimed, in tokens, and by whom."""

    def __init__(self, num_workers: int, prefill_ms: PrefillMs, seed: int) -> None:
        super().__init__(num_workers, prefill_ms, seed)
        self.link = TransferTime()
        self.trust = SourceTrust()
        self.asking = AskTime()
        self.sources: dict[int, tuple[int, int]] = {}
        self.decode_contents = Contents(NUM_DECODE)
        self.num_pulls = 0
        self._best = (0, 0)  # tokens, and the worker that vouches for most of the present prompt

    def place(self, request: TraceRequest, number: int, now_ms: float) -> tuple[int, int, float]:
        claims = count_hits(request.blocks, self.num_workers, self.contents)
        claims += count_hits(request.blocks, NUM_DECODE, self.decode_contents)
        self._best = max((hit, worker) for worker, hit in enumerate(claims))
        placed = super().place(request, number, now_ms)
        if self._plan(request.num_tokens, placed[1])[2]:
            self.sources[number] = self._best
        elif self._best[0] > placed[1]:
            self.trust.recover()
            self.asking.recover()
        return placed

    def choose(self, request: TraceRequest, hits: list[int], now_ms: float) -> int:
        costs = []
        for worker, backlog in enumerate(self.backlogs):
            loading, own, _ = self._plan(request.num_tokens, self.accuracy[worker].credit(hits[worker]))
            wait, num_delayed = backlog.place_of(self._due(own, now_ms), now_ms)
            costs.append(score(wait + loading, own, num_delayed, self.dislikes[worker], self.reuse_weight))
        return costs.index(min(costs))

    def note_placed(self, worker: int, number: int, request: TraceRequest, hit: int, now_ms: float) -> float:
        pulls = self._plan(request.num_tokens, self.accuracy[worker].credit(hit))[2]
        return super().note_placed(worker, number, request, max(hit, self._best[0]) if pulls else hit, now_ms)

    def on_done(self, job: Job, now_ms: float) -> None:
        super().on_done(job, now_ms)
        self.link.observe(job.request.num_tokens * BYTES_PER_TOKEN, transfer_ms(job.request.num_tokens))

    def _plan(self, num_tokens: int, hit: int) -> tuple[float, float, bool]:
        """Return how long a worker with this hit would load and then compute, and whether it loads at all."""
        alone, held = self.own_ms(num_tokens, hit), hit + self.trust.credit(max(0, self._best[0] - hit))
        if held < hit + BLOCK_TOKENS:
            return 0.0, alone, False
        loading = self.asking.ms + self.link.ms((held - hit) * BYTES_PER_TOKEN)
        rest = self.own_ms(num_tokens, held)
        return (loading, rest, True) if pays(loading, alone, rest) else (0.0, alone, False)


class BoundRouter(PeerRouter):
    """Takes loading to cost nothing, so that it chooses the worker that begins soonest."""

    def _plan(self, num_tokens: int, hit: int) -> tuple[float, float, bool]:
        return 0.0, self.own_ms(num_tokens, max(hit, self._best[0])), self._best[0] > hit


class PeerRun(Run):
    """Lets each prompt load what its source still holds when its turn comes, and compute the rest.

    Sources are numbered as the prefill workers, then the decode workers, which have ``num_decode_blocks`` each.
    """

    def __init__(self, scenario: Scenario, routers: Sequence[PeerRouter], num_decode_blocks: int) -> None:
        super().__init__(scenario, routers)
        decoders = [PrefillWorker(NUM_WORKERS + number, num_decode_blocks) for number in range(NUM_DECODE)]
        self.holders = [*self.workers, *decoders]

    def own_ms(self, job: Job) -> float:
        router = self.routers[job.router]
        assert isinstance(router, PeerRouter)
        loading = self._load(router, job)
        self._hand_over(router, job)
        return loading + super().own_ms(job)

    def _load(self, router: PeerRouter, job: Job) -> float:
        """Load what the source holds beyond the worker's own hit; return how long that takes."""
        claimed, source = router.sources.pop(job.number, (0, None))
        if source is None:
            return 0.0
        held, num_own = self.holders[source].hit_tokens(job.request.blocks), job.hit
        router.trust.observe(max(0, claimed - num_own), max(0, held - num_own))
        if held <= num_own:  # evicted since
            router.link.fail()
            return 0.0
        self.holders[source].touch(job.request.blocks[: held // BLOCK_TOKENS])
        moving = transfer_ms(held - num_own)
        router.link.observe((held - num_own) * BYTES_PER_TOKEN, moving)
        router.asking.observe(ASKED_MS)
        router.num_pulls += 1
        job.hit = held
        return ASKED_MS + moving

    def _hand_over(self, router: PeerRouter, job: Job) -> None:
        """Let the next decode worker hold the prompt, a little before it is computed."""
        number = self._decoder_of(job)
        added, evicted = self.holders[NUM_WORKERS + number].store(job.request.blocks)
        for block in added:
            router.decode_contents.add(number, block)
        for block in evicted:
            router.decode_contents.discard(number, block)

    def _decoder_of(self, job: Job) -> int:
        return job.number % NUM_DECODE


class BoundRun(PeerRun):
    """Every prompt gets the longest beginning that any cache holds, at once."""

    def _load(self, router: PeerRouter, job: Job) -> float:
        router.sources.pop(job.number, None)
        held, best = max((holder.hit_tokens(job.request.blocks), holder.number) for holder in self.holders)
        if held > job.hit:
            self.holders[best].touch(job.request.blocks[: held // BLOCK_TOKENS])
            router.num_pulls += 1
            job.hit = held
        return 0.0


class OneCacheRun(BoundRun):
    """All decode workers share one cache."""

    def _decoder_of(self, job: Job) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests without and with sources, and the bounds by the name of each."""

    alone: Results
    with_sources: Results
    pulled_share: float  # of the requests
    bounds: dict[str, Results]

    @property
    def ratio(self) -> float:
        """How many times lower the mean TTFT is with sources."""
        return self.alone.mean_ttft_ms / self.with_sources.mean_ttft_ms


def run_pair(requests: Sequence[TraceRequest], speed: float, num_blocks: int, seed: int, *, has_bounds: bool = False) -> Pair:
    scenario = Scenario(
        requests=requests, prefill_ms=qwen_prefill_ms, num_workers=NUM_WORKERS, num_blocks=num_blocks, speed=speed, seed=seed
    )
    alone = simulate(scenario, [PredictedTime(NUM_WORKERS, qwen_prefill_ms, seed)])
    router = PeerRouter(NUM_WORKERS, qwen_prefill_ms, seed)
    found = PeerRun(scenario, [router], num_blocks).run()
    bounds: dict[str, Results] = {}
    if has_bounds:
        bounds["any cache"] = BoundRun(scenario, [PeerRouter(NUM_WORKERS, qwen_prefill_ms, seed)], num_blocks).run()
        for name, size in (("one cache", (NUM_WORKERS + NUM_DECODE) * num_blocks), ("endless", ENDLESS)):
            bounds[name] = OneCacheRun(scenario, [BoundRouter(NUM_WORKERS, qwen_prefill_ms, seed)], size).run()
    return Pair(alone, found, router.num_pulls / len(requests), bounds)


def bound_row(name: str, pairs: Sequence[Pair]) -> list[str]:
    """Return how many times lower the mean TTFT and how high the hit rate is at most."""
    row = [name]
    for bound in pairs[0].bounds:
        ratios = [pair.alone.mean_ttft_ms / pair.bounds[bound].mean_ttft_ms for pair in pairs]
        row.append(f"{statistics.mean(pair.bounds[bound].mean_ttft_ms for pair in pairs):,.0f}")
        row.append(f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
        row.append(f"{statistics.mean(pair.bounds[bound].hit_rate for pair in pairs):.3f}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR", help="folder of the traces of routing.py")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bounds", action="store_true", help="also what no router could exceed")
    parser.add_argument("--quick", action="store_true", help="a smoke run of 600 requests: figures without meaning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures and goals here")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    rows, bounds, goals = [], [], []
    for trace, speed, num_blocks in CASES:
        every = read_trace(arguments.traces / f"mooncake_{trace}.jsonl").requests
        seeds = range(1, 2 if arguments.quick else arguments.seeds + 1)
        requests = every[:600] if arguments.quick else every
        pairs = [
            run_pair(spread_arrivals(requests, seed), speed, num_blocks, seed, has_bounds=arguments.bounds) for seed in seeds
        ]
        ratios = [pair.ratio for pair in pairs]
        is_small = num_blocks == SMALL
        name = f"{trace}, speed {speed:g}, {num_blocks} blocks"
        rows.append(
            [
                name,
                *(f"{statistics.mean(pair.alone.mean_ttft_ms for pair in pairs):,.0f}",),
                *(f"{statistics.mean(pair.with_sources.mean_ttft_ms for pair in pairs):,.0f}",),
                f"{statistics.mean(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})",
                f"{statistics.mean(pair.alone.hit_rate for pair in pairs):.3f}",
                f"{statistics.mean(pair.with_sources.hit_rate for pair in pairs):.3f}",
                f"{100 * statistics.mean(pair.pulled_share for pair in pairs):.0f} %",
            ]
        )
        bounds.append(bound_row(name, pairs))
        if not is_small or trace == SMALL_TRACE:
            goal = GOAL_SMALL if is_small else GOAL_LARGE
            goals.append(at_least(f"mean TTFT, times lower, the least of all seeds: {name}", min(ratios), goal, "ratio"))
    columns = ["trace", "mean TTFT ms", "with sources", "times lower", "hit", "with sources", "pulled"]
    table = Table(columns, rows)
    print(table.markdown() if arguments.markdown else table.text(), end="\n\n")
    if arguments.bounds:
        parts = [
            f"{name}, {part}" for name in ("any cache", "one cache", "endless") for part in ("TTFT ms", "times lower", "hit")
        ]
        table = Table(["trace", *parts], bounds)
        print(table.markdown() if arguments.markdown else table.text(), end="\n\n")
    for line in goal_notes(goals):
        print(f"- {line}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"rows": rows, "bounds": bounds, "goals": goals}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
