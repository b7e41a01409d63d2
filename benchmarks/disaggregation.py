"""What disaggregation buys: the time between tokens of running answers while long prompts arrive, and goodput.

    python benchmarks/disaggregation.py [--goals] [--peers] [--chunks 64 256 2048] [--requests 30] [--plot FOLDER]
                                        [--json FILE] [--quick]

Real processes on the same cores for each side: one prefill and one decode worker (1P1D), or two aggregated workers that cut
prompts into chunks of so many tokens (``scheduler.max_num_batched_tokens``). Each worker has one thread, pinned to a core of
its own if there are two or more; router and load are spread over all cores, on what the workers leave. ``--peers`` adds vLLM's
CPU engine: two that chunk prompts, and pairs with our plug-in and with NixlConnector (after ``make install-vllm``).

ITL: some streams decode, once alone, and once while prompts of 1,024 tokens arrive one after another; then the gaps between
tokens from the first arrival to the end of the last long answer count. Those of the streams alone count where the others do,
from the same token to the same token of an answer: a step takes longer the more tokens its answers have. The long prompts' rate
is a share of what one worker can compute, so all sides are offered the same work. It is 0.9 of it: an unchunked prompt stalls
each stream of its worker once, and only where these stalls are more than one gap in a hundred does the 99th percentile see
them. The table says which share of the gaps is longer than ``STALL`` idle ones.

Goodput: requests of drawn lengths arrive by chance (Poisson). A request is good if its first token comes within the SLO of the
first token, and the mean time between its tokens is within the SLO of tokens; both are multiples of what one idle worker takes,
measured in the same run of 1P1D. vLLM's sides get the same requests and SLOs, so theirs also tells the pace of the engines.
``--goals`` leaves goodput out and measures the chunks that decide the goals. ``--plot`` draws both.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cluster_sides import PAIR, UNCHUNKED, Load, RequestsFailed, Side, aggregated
from common import Machine, Outcome, Table, at_least, at_most, goal_notes, make_parser, publish, quantile
from curves import Curve, draw
from vllm_sides import PAIRS, VllmSide, vllm_chunked

from core.errors import StartFailed
from kvferry.bench.client import RequestResult
from kvferry.bench.workload import BenchRequest

CHUNKS = (64, 128, 256, 512, 1024, UNCHUNKED)
GOAL_CHUNKS = (64, 256, UNCHUNKED)
VLLM_CHUNK = 256
UNCHUNKED_GOAL, CHUNKED_GOAL, IDLE_GOAL = 10.0, 2.0, 1.2
STALL = 5.0  # times the side's own gap at the median, with nothing else to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything is sent."""

    num_streams: int = 4
    stream_prompt: int = 64  # tokens
    stream_tokens: int = 600
    long_prompt: int = 1024
    long_tokens: int = 8
    num_long: int = 8
    lead_s: float = 2.0  # from the start of the streams to the first long prompt
    utilization: float = 0.9  # of one worker, by the long prompts
    num_requests: int = 30  # of a rate of the goodput
    rates: tuple[float, ...] = (0.7, 1.2, 1.8, 2.6)  # times one over the time of a long prompt; 1.8 fill a prefill worker
    ttft_slo: float = 3.0  # times the first token of the longest prompt on an idle worker
    itl_slo: float = 2.0  # times the gap between tokens of the streams on an idle worker


QUICK = Size(
    num_streams=1,
    stream_prompt=8,
    stream_tokens=60,
    long_prompt=96,
    num_long=2,
    lead_s=0.0,
    num_requests=3,
    rates=(0.5,),
)


def sides(chunks: Sequence[int], with_peers: bool) -> list[Side | VllmSide]:
    """Return 1P1D and two aggregated workers with each chunk."""
    peers = (vllm_chunked(VLLM_CHUNK), *PAIRS) if with_peers else ()
    return [PAIR, *(aggregated(chunk) for chunk in chunks), *peers]


@dataclass(slots=True)
class Intervals:
    """Gaps between tokens in milliseconds, without and with long prompts, and the first tokens of the long ones."""

    quiet_ms: list[float] = field(default_factory=list)
    busy_ms: list[float] = field(default_factory=list)
    long_ttft_ms: list[float] = field(default_factory=list)


class StreamLoad(Load):
    """Streams, long prompts beside them, and arrivals by chance."""

    def __init__(self, base_url: str, model: str, size: Size, seed: int) -> None:
        super().__init__(base_url, model, seed)
        self._size = size

    def alone_s(self) -> float:
        """Return the time to the first token of a long prompt, with nothing else to do."""
        times = [self.send([BenchRequest(0.0, self.prompt(self._size.long_prompt), 2)])[0].ttft_s for _ in range(3)]
        return statistics.median(seconds or 0.0 for seconds in times)

    def intervals(self, prefill_s: float) -> Intervals:
        """Run the streams alone, and once more beside long prompts."""
        size, found = self._size, Intervals()
        alone = self.send(self._streams())
        arrivals = [size.lead_s + number * prefill_s / size.utilization for number in range(size.num_long)]
        longs = [BenchRequest(arrival, self.prompt(size.long_prompt), size.long_tokens) for arrival in arrivals]
        results = self.send([*self._streams(), *longs])
        answered, long_results = results[: size.num_streams], results[size.num_streams :]
        found.long_ttft_ms = [1e3 * (result.ttft_s or 0.0) for result in long_results]
        end = max(result.started_s + result.e2e_s for result in long_results)
        for quiet, busy in zip(alone, answered, strict=True):
            counts = [size.lead_s <= when - gap <= end for when, gap in gaps(busy)]
            found.quiet_ms += [1e3 * gap for gap in itertools.compress(quiet.itl_s, counts)]
            found.busy_ms += [1e3 * gap for gap in itertools.compress(busy.itl_s, counts)]
        return found

    def _streams(self) -> list[BenchRequest]:
        size = self._size
        return [BenchRequest(0.0, self.prompt(size.stream_prompt), size.stream_tokens) for _ in range(size.num_streams)]

    def good_share(self, rate: float, ttft_slo_s: float, itl_slo_s: float) -> float:
        """Return which share of requests that arrive at ``rate`` per second is good."""
        size, when = self._size, itertools.accumulate(self.random.expovariate(rate) for _ in range(self._size.num_requests))
        requests = [
            BenchRequest(
                0.05 + arrival,
                self.prompt(self.random.randint(size.long_prompt // 8, size.long_prompt)),
                self.random.randint(16, 64),
            )
            for arrival in when
        ]
        results = self.send(requests)
        good = [result for result in results if (result.ttft_s or 0.0) <= ttft_slo_s and (result.tpot_s or 0.0) <= itl_slo_s]
        return len(good) / len(results)


def gaps(result: RequestResult) -> list[tuple[float, float]]:
    """Return when each gap between tokens ended, from the start of the run, and its length, in seconds."""
    ends = itertools.accumulate(result.itl_s, initial=result.started_s + (result.ttft_s or 0.0))
    return list(zip(itertools.islice(ends, 1, None), result.itl_s, strict=True))


@dataclass(slots=True)
class Found:
    """What one side did."""

    intervals: Intervals
    alone_s: float
    good: dict[float, float] = field(default_factory=dict)  # by requests per second


def measure(side: Side | VllmSide, arguments: argparse.Namespace, size: Size, reference: Found | None) -> Found:
    """Start the cluster of a side and load it. ``reference``: 1P1D, whose idle times set rates and SLOs for all sides."""
    print(f"{side.name} ...", file=sys.stderr, flush=True)
    with side.running(arguments.model) as base_url:
        load = StreamLoad(base_url, arguments.model, size, seed=1)  # the same requests for every side
        load.send([BenchRequest(0.0, load.prompt(size.long_prompt), 4) for _ in range(2)])  # warms up
        alone_s = load.alone_s()
        prefill_s = reference.alone_s if reference is not None else alone_s
        found = Found(Intervals(), alone_s)
        for _ in range(arguments.repeats):
            one = load.intervals(prefill_s)
            found.intervals.quiet_ms += one.quiet_ms
            found.intervals.busy_ms += one.busy_ms
            found.intervals.long_ttft_ms += one.long_ttft_ms
        if not arguments.goals:
            idle_s = statistics.median((reference or found).intervals.quiet_ms) / 1e3
            for factor in size.rates:
                rate = factor / prefill_s
                found.good[rate] = load.good_share(rate, size.ttft_slo * prefill_s, size.itl_slo * idle_s)
    return found


def goals(found: Mapping[Side | VllmSide, Found]) -> list[dict[str, object]]:
    """Return the aims: how many times better the slowest percent of gaps is with 1P1D."""
    pair, *others = (side for side in found if isinstance(side, Side))
    ours, unchunked = found[pair].intervals, found[max(others, key=lambda side: side.chunk)].intervals
    best = min(others, key=lambda side: quantile(found[side].intervals.busy_ms, 0.99))
    p99 = quantile(ours.busy_ms, 0.99)
    ratios = [
        ("ITL p99 under prefills, 1P1D over unchunked", quantile(unchunked.busy_ms, 0.99) / p99, UNCHUNKED_GOAL, at_least),
        (f"ITL p99 under prefills, 1P1D over {best.name}",
         quantile(found[best].intervals.busy_ms, 0.99) / p99, CHUNKED_GOAL, at_least),
        ("ITL p50 under prefills over its own idle, 1P1D", statistics.median(ours.busy_ms) / statistics.median(ours.quiet_ms),
         IDLE_GOAL, at_most),
    ]  # fmt: skip
    return [judge(name, value, goal, "ratio") for name, value, goal, judge in ratios]


def outcome(found: Mapping[Side | VllmSide, Found]) -> Outcome:
    def row(side: Side | VllmSide) -> list[str]:
        intervals = found[side].intervals
        quiet, busy = intervals.quiet_ms, intervals.busy_ms
        cells = [statistics.median(quiet), quantile(quiet, 0.99), statistics.median(busy), quantile(busy, 0.99), max(busy)]
        stalls = statistics.mean(gap > STALL * cells[0] for gap in busy)
        long_ms = 1e3 * found[side].alone_s, statistics.median(intervals.long_ttft_ms)
        return [side.name, *(f"{cell:,.1f}" for cell in cells), f"{stalls:.1%}", *(f"{cell:,.0f}" for cell in long_ms)]

    columns = ("ms", "idle p50", "idle p99", "p50", "p99", "max", "stalls", "first token, alone", "first token of long prompts")
    tables = [Table(columns, [row(side) for side in found])]
    aims = goals(found)
    notes = [f"stalls: gaps longer than {STALL:.0f} times the side's own idle p50"]
    notes += goal_notes(aims)
    rates = measured_rates(found)
    if rates:
        shares = [[side.name, *(f"{100 * found[side].good[rate]:.0f} %" for rate in rates)] for side in found]
        tables.append(Table(("good requests at requests/s", *(f"{rate:.2f}" for rate in rates)), shares))
        notes += [compare_goodput(found[PAIR], found[side], side.name) for side in found if side != PAIR]
    figures = {side.name: asdict(found[side]) for side in found}
    return Outcome(tables, notes, {"sides": figures}, aims)


def measured_rates(found: Mapping[Side | VllmSide, Found]) -> list[float]:
    return sorted({rate for one in found.values() for rate in one.good})


def compare_goodput(pair: Found, other: Found, name: str) -> str:
    """Say at which of the measured rates which side has more good requests."""
    kinds = {
        "more good requests than": [rate for rate in pair.good if pair.good[rate] > other.good[rate]],
        "as many as": [rate for rate in pair.good if pair.good[rate] == other.good[rate]],
        "fewer than": [rate for rate in pair.good if pair.good[rate] < other.good[rate]],
    }
    words = [f"{kind} {name} at {', '.join(f'{rate:.2f}' for rate in rates)}" for kind, rates in kinds.items() if rates]
    return f"1P1D has {'; '.join(words)} requests/s"


def plot(found: Mapping[Side | VllmSide, Found], folder: Path) -> None:
    """Write pictures of the gaps between tokens and of the good requests, as far as they were measured."""
    folder.mkdir(parents=True, exist_ok=True)
    nines = [tenths / 10 for tenths in range(1, 31)]  # 1 is the 90th percentile, 2 the 99th, 3 the 99.9th
    gaps_ms = [Curve(side.name, [(nine, quantile(one.intervals.busy_ms, 1 - 10**-nine)) for nine in nines])
               for side, one in found.items()]  # fmt: skip
    ticks: dict[float, str] = {1: "90th", 2: "99th", 3: "99.9th percentile"}
    (folder / "gaps.svg").write_text(draw("ms between two tokens while long prompts arrive", gaps_ms, ticks, is_log=True))
    if rates := measured_rates(found):
        good = [Curve(side.name, [(rate, 100 * one.good[rate]) for rate in rates]) for side, one in found.items()]
        ticks = {rate: f"{rate:.2f}" for rate in rates} | {rates[-1]: f"{rates[-1]:.2f} requests/s"}
        (folder / "goodput.svg").write_text(draw("% of requests that are good", good, ticks))


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=2)
    parser.add_argument("--goals", action="store_true", help="only what decides the goals")
    parser.add_argument("--chunks", type=int, nargs="+", metavar="TOKENS", help="of the aggregated workers")
    parser.add_argument("--peers", action="store_true", help="measure vLLM's CPU engine, too")
    parser.add_argument("--requests", type=int, default=Size().num_requests, help="of a rate (default: %(default)s)")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write pictures here, as SVG")
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else Size(num_requests=arguments.requests)
    machine = Machine.now()
    found: dict[Side | VllmSide, Found] = {}
    chunks = arguments.chunks or (GOAL_CHUNKS if arguments.goals or arguments.quick else CHUNKS)
    failed: dict[str, str] = {}
    for side in sides(chunks, arguments.peers):
        try:
            found[side] = measure(side, arguments, size, next(iter(found.values()), None))
        except (StartFailed, RequestsFailed, OSError, subprocess.CalledProcessError) as error:
            if isinstance(side, Side):
                raise
            failed[side.name] = str(error).partition("\n")[0]
    result = outcome(found)
    notes = [f"{name} could not be measured: {reason}" for name, reason in failed.items()]
    figures = result.figures | {"failed": failed}
    publish(Outcome(result.tables, [*result.notes, *notes], figures, result.goals), machine, arguments)
    if arguments.plot:
        plot(found, arguments.plot)


if __name__ == "__main__":
    main()
