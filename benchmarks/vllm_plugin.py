"""kvferry's plug-in for vLLM beside vLLM's own NixlConnector: real vLLM engines on CPU, both pairs in one run.

    python benchmarks/vllm_plugin.py [--repeats 40] [--json FILE] [--markdown] [--quick]

It needs vLLM's environment (``make install-vllm``). Each pair is an engine that computes prompts (P) and one that loads them
(D), each in a process of its own, with a tiny Llama. Prompts are new, so that nothing is cached. The pairs take turns, handoff
by handoff, so that a change of the machine's pace meets both. The other pairs stand still meanwhile (SIGSTOP): NixlConnector
uses more than a whole processor without any request, and would slow the others. A handoff's time is D's own, from the arrival
of the request to its first token: the load, and the computation of one token. The first handoff of a pair is left out: it also
connects.

The ratio is that of medians; its 95 % interval comes from 2,000 resamples of the handoffs. ``tcp`` with digests has no goal.
The gap between two tokens of D is measured while P is idle and while P computes prompts of 4,096 tokens; both engines share
two processors here. The CPU time of an idle pair is that of both processes, without requests, and with one lease held.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from common import Machine, NothingMeasured, Outcome, Spread, Table, at_most, make_parser, publish

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvferry.cluster_plan import free_ports
from tests.support.tiny_models import VOCAB_SIZE, write_tiny_llama
from tests.support.vllm_engine import REMOTE_DECODE, VllmEngine

SIZES, QUICK_SIZES = (256, 1024, 4096), (256,)
GOAL = 1.05  # of the lower end of the interval: ours over nixl with identity, against NixlConnector
IDLE_S = 5.0
SETTLE_S = 60.0  # until nothing is held: longer than any lease
NUM_GAPS = 60  # between tokens
NUM_RESAMPLES = 2000
MAX_MODEL_LEN = 4352
NUM_BLOCKS = 600  # of 32 tokens

OURS_NIXL, OURS_TCP, THEIRS = "ours, nixl, identity", "ours, tcp, digest", "NixlConnector"


@dataclass
class Pair:
    """P and D with one connector. ``seconds`` are those of D to its first and to its second token, by size of the prompt."""

    name: str
    p: VllmEngine
    d: VllmEngine
    seconds: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    num_requests: int = 0

    def next_name(self) -> str:
        self.num_requests += 1
        return f"r{self.num_requests}"

    def hand_off(self, prompt: list[int]) -> dict[str, Any]:
        result = self.p.generate(self.next_name(), prompt, 1, params=REMOTE_DECODE)
        found: dict[str, Any] = result["params"]
        return found

    def measure(self, prompt: list[int]) -> None:
        """Hand a prompt off, and keep D's times."""
        params = self.hand_off(prompt)
        result = self.d.generate(self.next_name(), prompt, 2, params=params)
        first_s, second_s = result["token_s"]
        self.seconds.setdefault(len(prompt), []).append((first_s, second_s))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the pair, which stands still, go on for a while."""
        engines = self.p, self.d
        for engine in engines:
            engine.thaw()
        try:
            yield
        finally:
            for engine in engines:
                engine.freeze()

    def cpu_s(self) -> float:
        """CPU time of both processes so far."""
        times = [psutil.Process(engine.pid).cpu_times() for engine in (self.p, self.d)]
        return sum(each.user + each.system for each in times)


class Prompts:
    """New prompts."""

    def __init__(self) -> None:
        self._random = random.Random(11)

    def next(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(5, VOCAB_SIZE) for _ in range(num_tokens)]


def start_pairs(folder: Path) -> list[Pair]:
    """Start three pairs, which stand still."""
    model = write_tiny_llama(folder / "model")
    common: dict[str, Any] = {"num_blocks": NUM_BLOCKS, "max_model_len": MAX_MODEL_LEN, "max_num_batched_tokens": MAX_MODEL_LEN}
    kinds: dict[str, dict[str, Any]] = {
        OURS_NIXL: {"extra": {"kvferry.transports": ["nixl"], "kvferry.kv_verify": "identity"}},
        OURS_TCP: {"extra": {"kvferry.transports": ["tcp"], "kvferry.kv_verify": "digest"}},
        THEIRS: {"connector": "NixlConnector", "with_layout": False},
    }
    pairs = []
    for name, kind in kinds.items():
        ports = free_ports(2)
        engines = [
            VllmEngine(
                folder / f"{len(pairs)}-{role}.log",
                model,
                environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
                **common,
                **kind,
            )
            for role, port in zip("pd", ports, strict=True)
        ]
        for engine in engines:
            engine.start()
        pairs.append(Pair(name, *(engine.wait() for engine in engines)))
    for pair in pairs:
        pair.p.freeze()
        pair.d.freeze()
    return pairs


def benchmark(repeats: int, sizes: Sequence[int], idle_s: float) -> Outcome:
    """Measure all pairs."""
    prompts = Prompts()
    with TemporaryDirectory() as folder:
        pairs = start_pairs(Path(folder))
        try:
            for size in sizes:
                for _ in range(repeats + 1):
                    for pair in pairs:
                        with pair.awake():
                            pair.measure(prompts.next(size))
            gaps, idle = {}, {}
            for pair in pairs:
                with pair.awake():
                    gaps[pair.name] = gaps_between_tokens(pair, prompts, max(sizes))
                    idle[pair.name] = cpu_of_idle_pair(pair, prompts, idle_s)
        finally:
            for pair in pairs:
                pair.p.kill()
                pair.d.kill()
    return outcome(pairs, sizes, gaps, idle)


def gaps_between_tokens(pair: Pair, prompts: Prompts, num_prompt_tokens: int) -> tuple[float, float]:
    """Return the median gap between D's tokens in seconds, while P is idle and while it computes prompts."""
    found = []
    for is_busy in (False, True):
        name = pair.next_name()
        pair.d.ask("add", name=name, prompt=prompts.next(64), max_tokens=NUM_GAPS + 1)
        if is_busy:
            for _ in range(4):
                other = pair.next_name()
                pair.p.ask("add", name=other, prompt=prompts.next(num_prompt_tokens), max_tokens=1)
        times = pair.d.ask("result", name=name)["token_s"]
        found.append(statistics.median(after - before for before, after in itertools.pairwise(times)))
    return found[0], found[1]


def cpu_of_idle_pair(pair: Pair, prompts: Prompts, idle_s: float) -> tuple[float, float]:
    """Return the CPU seconds per second of a pair without requests, and of one that holds a lease."""
    end = time.monotonic() + SETTLE_S
    while pair.p.ask("usage")["requests"] or pair.d.ask("usage")["requests"]:
        if time.monotonic() > end:
            raise NothingMeasured(f"{pair.name} still holds requests after {SETTLE_S} s")
        time.sleep(0.1)
    found = []
    for holds_lease in (False, True):
        if holds_lease:
            pair.hand_off(prompts.next(256))
        time.sleep(0.5)
        before, begin = pair.cpu_s(), time.monotonic()
        time.sleep(idle_s)
        found.append((pair.cpu_s() - before) / (time.monotonic() - begin))
    return found[0], found[1]


def outcome(
    pairs: Sequence[Pair],
    sizes: Sequence[int],
    gaps: dict[str, tuple[float, float]],
    idle: dict[str, tuple[float, float]],
) -> Outcome:
    """Put the tables and the goals together."""
    theirs = next(pair for pair in pairs if pair.name == THEIRS)
    rows, goals, figures = [], [], {}
    for size in sizes:
        reference = [first_s for first_s, _ in theirs.seconds[size][1:]]
        for pair in pairs:
            first = [first_s for first_s, _ in pair.seconds[size][1:]]
            second = [second_s for _, second_s in pair.seconds[size][1:]]
            low, ratio, high = interval_of_ratio(first, reference)
            figures[f"{pair.name}, {size} tokens"] = pair.seconds[size]
            rows.append(
                [
                    f"{size:,} tokens: {pair.name}",
                    f"{1e3 * pair.seconds[size][0][0]:.0f}",
                    Spread.of(first).show(1, 1e3),
                    Spread.of(second).show(1, 1e3),
                    "" if pair is theirs else f"{ratio:.2f} ({low:.2f}..{high:.2f})",
                ]
            )
            if pair.name == OURS_NIXL:
                name = f"handoff of {size} tokens, nixl with identity / NixlConnector, lower end of 95 %"
                goals.append(at_most(name, low, GOAL, "ratio"))
    for number, state in enumerate(("without requests", "with one lease held")):
        ours, other = idle[OURS_NIXL][number], idle[THEIRS][number]
        name = f"CPU of an idle pair {state}, ours / NixlConnector"
        goals.append(at_most(name, ours, other, "CPU s per s"))
    costs = [
        [
            pair.name,
            *(f"{1e3 * value:.1f}" for value in gaps[pair.name]),
            *(f"{100 * value:.1f} %" for value in idle[pair.name]),
        ]
        for pair in pairs
    ]
    tables = [
        Table(["prompt: connector", "first, ms", "to first token, ms", "to second token, ms", "ratio (95 %)"], rows),
        Table(["", "gap, P idle, ms", "gap, P busy, ms", "CPU of an idle pair", "with a lease held"], costs),
    ]
    return Outcome(tables, figures={"seconds": figures, "gaps": gaps, "idle": idle}, goals=goals)


def interval_of_ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of the medians between the ends of its 95 % interval."""
    draw = random.Random(5)
    ratios = sorted(
        statistics.median(draw.choices(ours, k=len(ours))) / statistics.median(draw.choices(theirs, k=len(theirs)))
        for _ in range(NUM_RESAMPLES)
    )
    ratio = statistics.median(ours) / statistics.median(theirs)
    return ratios[int(0.025 * NUM_RESAMPLES)], ratio, ratios[int(0.975 * NUM_RESAMPLES)]


def main() -> None:
    arguments = make_parser(__doc__, 40, takes_model=False).parse_args()
    machine = Machine.now()
    found = benchmark(1, QUICK_SIZES, 0.2) if arguments.quick else benchmark(arguments.repeats, SIZES, IDLE_S)
    publish(found, machine, arguments)


if __name__ == "__main__":
    main()
