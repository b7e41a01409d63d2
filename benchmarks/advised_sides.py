"""Does ``kvferry advise`` name the side that then wins on real processes?

    python benchmarks/advised_sides.py [--mixes NAME ...] [--requests 30] [--json FILE] [--markdown] [--quick]

First the costs of a worker are measured while the other one works, because two workers of one machine share its memory and
caches: prompts of several lengths beside streams, decode steps at several batch sizes beside prompts, and the gap that a
handoff leaves. Then, for each mix of requests, the advice is computed from these costs for two workers, and both
sides are run: one prefill and one decode worker, and two aggregated workers with the chunk that the advice found best. A side
is run at rates that lie a factor of ``STEP`` apart, from the one next to its predicted goodput up or down, until at one of two
neighbours at least ``SHARE`` of the requests are good and at the other fewer. On the straight line between the two, its goodput
is the rate at which the share crosses ``SHARE``: the quantity that the advice predicts. Both sides have the same rates to
choose from, and get the same requests at the same times at each. Of a side whose goodput is below ``LEAST`` no more is known.

The advice agrees if it and the measurement both find the same side better by more than ``EVEN``, or both find the two even.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from cluster_sides import PAIR, Load, Side, aggregated
from common import Machine, Outcome, Table, at_least, make_parser, publish

from kvferry.advise.cluster import Layout, Slo, run
from kvferry.advise.costs import Costs, HandoffCost, PrefillCost, StepCost
from kvferry.advise.study import Comparison, Study
from kvferry.advise.trace import Trace, TraceRequest
from kvferry.bench.client import RequestResult
from kvferry.bench.workload import BenchRequest
from router.routing.fit import PrefillFit

SHARE = 0.9  # of good requests, for goodput
STEP = 1.2  # from one rate to the next
LEAST = 0.4  # of the larger predicted goodput: lower rates take long and decide nothing
SECONDS = 40.0  # of arrivals at a rate, at least: a short burst is served at any rate, and the advice is of a steady state
EVEN = 0.1  # the model's error, as of ``kvferry advise``
GOAL = 4  # mixes, or all if fewer are run
NUM_STREAMS = 4  # beside the prompts whose times are measured
NUM_MODELLED = 400  # requests of the trace for the advice


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths in tokens, drawn evenly, and the SLO in multiples of the measured times. ``itl`` 0 = any."""

    name: str
    prompt: tuple[int, int]
    answer: tuple[int, int]
    ttft: float  # of the longest prompt
    tpot: float
    itl: float


MIXES = (
    Mix("chat, mean", (32, 128), (48, 96), 6.0, 2.0, 0.0),
    Mix("extraction", (512, 1024), (4, 8), 3.0, 30.0, 0.0),
    Mix("documents, mean", (384, 768), (32, 64), 4.0, 6.0, 0.0),
    Mix("documents, steady", (512, 1024), (48, 96), 4.0, 2.0, 2.5),
    Mix("chat, steady", (128, 512), (48, 96), 5.0, 2.0, 2.5),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    prompts: tuple[int, ...] = (64, 256, 512, 768, 1024)
    batches: tuple[int, ...] = (1, 4, 8, 16)
    step_tokens: int = 60
    num_beside: int = 3  # prompts while steps are measured
    stream_tokens: int = 160  # of each stream while prompts are measured
    num_sweeps: int = 6  # over the prompts
    most_rates: int = 8  # of a side
    seconds: float = SECONDS


QUICK = Effort(
    prompts=(16, 64),
    batches=(1, 2),
    step_tokens=6,
    num_beside=1,
    stream_tokens=8,
    num_sweeps=2,
    most_rates=1,
    seconds=0.0,
)


@dataclass(slots=True)
class Compared:
    """One mix: what was advised, and of each side the shares of good requests by rate, real and predicted."""

    mix: Mix
    study: Study
    real: dict[str, dict[float, float]] = field(default_factory=dict)
    predicted: dict[str, dict[float, float]] = field(default_factory=dict)

    @property
    def advised(self) -> float:
        """How many times the goodput of the aggregated workers 1P1D is predicted to have."""
        return self.study.ratio.mean

    @property
    def measured(self) -> Goodput:
        """How many times it has it."""
        ours, other = (goodput(self.real[side]) for side in ("1P1D", "aggregated"))
        return Goodput(ours.least / other.most, ours.most / other.least if other.least else math.inf)

    @property
    def agrees(self) -> bool:
        measured = self.measured
        return (
            self.advised > 1 + EVEN < measured.least
            or self.advised < 1 - EVEN > measured.most
            or (abs(self.advised - 1) <= EVEN and 1 - EVEN <= measured.least <= measured.most <= 1 + EVEN)
        )


@dataclass(frozen=True, slots=True)
class Goodput:
    """A goodput, or a ratio of two, of which the bounds are known. They are the same if it was enclosed."""

    least: float
    most: float

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.least:.2f}"
        return f"at least {self.least:.2f}" if self.least else f"at most {self.most:.2f}"


def goodput(shares: Mapping[float, float]) -> Goodput:
    """Return the rate at which the share of good requests crosses ``SHARE``; a bound if all rates are on one side of it."""
    good = [rate for rate, share in shares.items() if share >= SHARE]
    bad = [rate for rate, share in shares.items() if share < SHARE]
    if not good or not bad:
        return Goodput(max(good, default=0.0), min(bad, default=math.inf))
    above = min(bad)
    below = max((rate for rate in good if rate < above), default=0.0)
    fall = shares.get(below, 1.0) - shares[above]
    crossing = below + (above - below) * (shares.get(below, 1.0) - SHARE) / fall
    return Goodput(crossing, crossing)


@contextmanager
def running(side: Side, model: str, seed: int = 1) -> Iterator[Load]:
    """Run the cluster of a side, warm."""
    print(f"{side.name} ...", file=sys.stderr, flush=True)
    with side.running(model) as base_url:
        load = Load(base_url, model, seed)
        load.send([BenchRequest(0.0, load.prompt(256), 8) for _ in range(4)])
        yield load


def measure_costs(model: str, effort: Effort, repeats: int) -> Costs:
    """Measure 1P1D while both work: the prefill worker's times, the decode worker's steps, and the gap between the two."""
    fit, steps, handoffs = PrefillFit(), [], []
    with running(PAIR, model) as load:
        for _ in range(effort.num_sweeps):
            for length, result in times_of_prompts(load, effort):
                fit.observe(length, 0, 1e3 * (result.ttft_s or 0.0))
                handoffs.append((length, 1e3 * (result.itl_s[0] - statistics.median(result.itl_s[1:]))))
        for _ in range(max(2, repeats)):
            for batch in effort.batches:
                streams = [BenchRequest(0.0, load.prompt(64), effort.step_tokens) for _ in range(batch)]
                prompts = [BenchRequest(0.0, load.prompt(effort.prompts[-1]), 1) for _ in range(effort.num_beside)]
                results = load.send([*streams, *prompts])[:batch]
                last = [gap for result in results for gap in result.itl_s[len(result.itl_s) // 2 :]]
                steps.append((batch, 1e3 * statistics.median(last)))
    step_base, per_request = line_through(steps)
    handoff_base, per_token = line_through(handoffs)
    time = fit.time
    return Costs(
        prefill=PrefillCost(base_ms=time.base_ms, token_ms=time.token_ms, pair_ms=time.pair_ms),
        step=StepCost(base_ms=step_base, request_ms=per_request),
        handoff=HandoffCost(base_ms=handoff_base, token_ms=per_token),
        kv_tokens=8_000,
        max_num_seqs=64,
    )


def times_of_prompts(load: Load, effort: Effort) -> list[tuple[int, RequestResult]]:
    """Send one prompt of each length after the other, while streams are decoded, whose own prompts are computed by then."""
    streams = [BenchRequest(0.0, load.prompt(64), effort.stream_tokens) for _ in range(NUM_STREAMS)]
    prompts = [BenchRequest(0.0, load.prompt(length), 6) for length in effort.prompts]
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(load.send, streams)
        for length in effort.prompts[1::-1]:  # the second one of them comes after the prompts of the streams
            load.send([BenchRequest(0.0, load.prompt(length), 1)])
        found = [(length, load.send([prompt])[0]) for length, prompt in zip(effort.prompts, prompts, strict=True)]
        beside.result()
    return found


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return base and slope of the line through points (least squares), neither below 0."""
    xs, ys = zip(*points, strict=True)
    slope = max(0.0, statistics.linear_regression(xs, ys).slope)
    return max(0.0, statistics.mean(ys) - slope * statistics.mean(xs)), slope


def slo_of(mix: Mix, costs: Costs) -> Slo:
    step_ms = costs.step_ms(1, 0)
    limits = {"itl_ms": mix.itl * step_ms} if mix.itl else {}
    return Slo(ttft_ms=mix.ttft * costs.prefill_time.ms(mix.prompt[1], 0), tpot_ms=mix.tpot * step_ms, **limits)


def draw(mix: Mix, rate: float, number: int, seed: int) -> list[TraceRequest]:
    """Draw requests that arrive by chance, ``rate`` per second."""
    chance = random.Random(seed)
    arrivals = itertools.accumulate(chance.expovariate(rate) for _ in range(number))
    return [TraceRequest(1e3 * when, chance.randint(*mix.prompt), chance.randint(*mix.answer)) for when in arrivals]


def compare(mix: Mix, costs: Costs, effort: Effort, arguments: argparse.Namespace) -> Compared:
    """Ask for advice, and run both sides."""
    slo = slo_of(mix, costs)
    modelled = Trace(tuple(draw(mix, 1.0, NUM_MODELLED, seed=7)), knows_prefixes=False)
    study = Comparison(modelled, costs, slo, SHARE).study(2)
    found = Compared(mix, study)
    sides = {
        "1P1D": (PAIR, Layout(num_prefill=1, num_decode=1), study.disaggregated),
        "aggregated": (aggregated(study.aggregated.layout.chunk), study.aggregated.layout, study.aggregated),
    }
    most = max(0.01, *(advised.goodput.mean for _, _, advised in sides.values()))
    for name, (side, layout, advised) in sides.items():
        real, predicted = found.real.setdefault(name, {}), found.predicted.setdefault(name, {})
        with running(side, arguments.model) as load:
            step = round(math.log(max(advised.goodput.mean, LEAST * most), STEP))
            while step is not None and len(real) < effort.most_rates:
                rate = STEP**step
                requests = draw(mix, rate, max(arguments.requests, round(rate * effort.seconds)), seed=round(1e3 * rate))
                real[rate] = good_share(load, requests, costs, slo)
                predicted[rate] = run(requests, costs, layout, slo).good_share
                step = next_step(real, LEAST * most)
    return found


def next_step(shares: Mapping[float, float], least: float) -> int | None:
    """Return the power of ``STEP`` to run next; None once neighbours enclose the goodput, or it is below ``least``."""
    if min(shares.values()) >= SHARE:
        return round(math.log(max(shares), STEP)) + 1
    if max(shares.values()) < SHARE and min(shares) / STEP >= least:
        return round(math.log(min(shares), STEP)) - 1
    return None


def good_share(load: Load, requests: Sequence[TraceRequest], costs: Costs, slo: Slo) -> float:
    sent = [BenchRequest(one.arrival_ms / 1e3, load.prompt(one.num_tokens), one.num_output_tokens) for one in requests]
    results = load.send(sent)
    return statistics.mean(
        is_good(result, costs.prefill_time.ms(one.num_tokens, 0), slo) for result, one in zip(results, requests, strict=True)
    )


def is_good(result: RequestResult, cold_ms: float, slo: Slo) -> bool:
    """Judge as ``Slo.holds`` does: what the gap to the second token exceeds counts as time to join the batch."""
    gaps_ms = [1e3 * gap for gap in result.itl_s]
    first_ms, limit_ms = 1e3 * (result.ttft_s or 0.0), slo.limit_ms(cold_ms)
    joined_ms = first_ms + max(0.0, gaps_ms[0] - slo.tpot_ms)
    is_steady = (
        statistics.mean(gaps_ms[1:]) <= slo.tpot_ms and sum(gap > slo.itl_ms for gap in gaps_ms[1:]) <= len(gaps_ms) / 100
    )
    return first_ms <= limit_ms and joined_ms <= limit_ms + slo.tpot_ms and is_steady


def outcome(costs: Costs, found: Sequence[Compared]) -> Outcome:
    def row(one: Compared) -> list[str]:
        cells = []
        for side in ("1P1D", "aggregated"):
            shares, predicted = one.real[side], one.predicted[side]
            cells.append(", ".join(f"{rate:.2f}: {shares[rate]:.0%} ({predicted[rate]:.0%})" for rate in sorted(shares)))
        chunk = one.study.aggregated.layout.chunk
        goodputs = f"{one.measured} ({goodput(one.real['1P1D'])} / {goodput(one.real['aggregated'])})"
        advised = f"{one.advised:.2f}, chunks of {chunk}"
        return [one.mix.name, *cells, advised, goodputs, "yes" if one.agrees else "NO"]

    columns = ("mix", "1P1D", "aggregated", "advised: 1P1D carries, times", "measured", "agrees")
    num_agreed = sum(one.agrees for one in found)
    least = min(GOAL, len(found))
    goal = at_least("mixes in which the advised side wins", num_agreed, least, "mixes")
    notes = [
        f"costs, ms: prefill {costs.prefill.base_ms:.0f} + {costs.prefill.token_ms:.2f} a token "
        f"+ {costs.prefill.pair_ms:.1e} a pair; step {costs.step.base_ms:.0f} + {costs.step.request_ms:.1f} a request; "
        f"handoff {costs.handoff.base_ms:.0f} + {costs.handoff.token_ms:.3f} a token",
        "of each side, requests/s: share of good ones (predicted); measured: goodput of 1P1D over aggregated (both)",
        f"advice and measurement agree in {num_agreed} of {len(found)} mixes (goal {least})",
    ]
    figures: dict[str, object] = {
        "mixes": [{"mix": asdict(one.mix), "advised": one.advised, "measured": asdict(one.measured), "real": one.real,
                   "predicted": one.predicted} for one in found],
    }  # fmt: skip
    return Outcome([Table(columns, [row(one) for one in found])], notes, figures, [goal])


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=3)
    names = [mix.name for mix in MIXES]
    parser.add_argument("--mixes", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--requests", type=int, default=30, help="of a side at each rate, at least (default: %(default)s)")
    arguments = parser.parse_args()
    machine, effort = Machine.now(), QUICK if arguments.quick else Effort()
    if arguments.quick:
        arguments.requests, arguments.mixes = min(arguments.requests, 3), arguments.mixes[:1]
    costs = measure_costs(arguments.model, effort, arguments.repeats)
    found = [compare(mix, costs, effort, arguments) for mix in MIXES if mix.name in arguments.mixes]
    publish(outcome(costs, found), machine, arguments)


if __name__ == "__main__":
    main()
