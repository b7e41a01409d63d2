"""What the handoff of a prompt's KV cache costs, through a real prefill and a real decode worker, per transport.

    python benchmarks/handoff.py [--transports shm tcp nixl] [--repeats 7] [--json FILE] [--markdown] [--quick]

A long prompt (2,048 tokens) goes through a cluster of one prefill and one decode worker, one after another, each with new
tokens, so that nothing is cached. Time and bytes of the transfer and the time of the prefill are the workers' own
(``usage.kv_transfer``); the transfer's time runs from the decode worker's decision to load until the blocks may be used. The
first transfer of a cluster is shown apart: it touches memory and uses the connection for the first time; the workers have met
and shaken hands while the prompt was computed. Since there is one in each start, the cluster is started two more times for one
handoff each. Beside every request, this process copies as many bytes from one buffer to another (one thread, memory touched
before): the plain copy.

A short prompt (64 tokens) goes through the same cluster and through an aggregated worker in turn, 15 times as often, since
single pairs differ by more than what is looked for. Compared is the client's time from the first to the second token: what the
handoff adds to the life of a request on an idle cluster. The times between its later tokens say how much of a difference is
the workers', not the handoff's. The router's account of as many other requests tells the handoff from the decode worker's step,
which the aggregated worker makes as well.

Prefill workers are killed while their blocks are read (``lost_owner.py``): how soon the decode worker begins to compute.

Verification is measured apart, between two real connectors without a model (``verification.py``): prompts of 1 to 2,048 tokens,
the same blocks, each load once with seals compared (``identity``) and once with digests of all bytes as well (``digest``). The
time of the bytes and that of the verdict after them are told by every load, so the transfer is the one without verification.
Plain copies of as many bytes are made between the loads.

All workers have one torch thread. Figures are medians (smallest..largest); ratios are medians of the ratios of single requests.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
from common import Machine, Outcome, Spread, Table, at_least, at_most, goal_notes, make_parser, publish
from lost_owner import goal_of as goal_of_lost_owners
from lost_owner import make_table as table_of_lost_owners
from lost_owner import measure_restarts_of_prompts
from verification import QUICK_SIZES, SIZES, Loads, make_table, measure
from verification import goals_of as goals_of_verification

from core.config import load_config
from kvferry.bench.client import Target
from kvferry.bench.load import run_load
from kvferry.bench.workload import BenchRequest, SyntheticShape, synthetic_workload
from kvferry.local import LocalCluster

TRANSPORTS = ("shm", "tcp", "nixl")
LONG_PROMPT, SHORT_PROMPT = 2048, 64
QUICK_PROMPT = 256
FIRST_STARTS = 3  # of the cluster, each with one first transfer
SHORT_REPEATS = 15  # of short prompts, for each of the long ones
SHORT_OUTPUT = 8  # tokens of a short prompt's answer
VERIFIED_REPEATS = 5  # of verified loads, likewise
SHARE_GOAL = 0.08  # transfer / prefill
FIRST_GOAL = 2.0  # first transfer / a later one, over shm
ADDED_GOAL_MS = 2.0  # from the first to the second token of a short prompt, which is one block
RATE_GOALS = {"shm": 0.70, "nixl": 0.25}  # plain copy's time / transfer's time
REQUEST_TIMEOUT_S = 600.0
MAX_TRIES = 10
MAX_KILLS = 5


@dataclass(frozen=True, slots=True)
class Transfer:
    """One handoff as the workers report it, and the plain copy of as many bytes right after it."""

    transport: str
    num_bytes: int
    transfer_ms: float
    prefill_ms: float
    copy_ms: float


@dataclass(frozen=True, slots=True)
class SecondToken:
    """The router's account of a second token: the handoff (messages, queue, transfer, verification), then a step of D's."""

    handoff_ms: float
    step_ms: float


@dataclass(slots=True)
class Found:
    """What one transport did: the first transfer of every start, and the later ones of the first start.

    ``gaps_ms`` and ``aggregated_gaps_ms`` are the times between the tokens of each short answer, in order: the first one is
    that from the first to the second token.
    """

    firsts: list[Transfer]
    others: list[Transfer]
    gaps_ms: list[list[float]]
    aggregated_gaps_ms: list[list[float]]
    seconds: list[SecondToken] = field(default_factory=list)

    @property
    def first_ms(self) -> Spread:
        return Spread.of([transfer.transfer_ms for transfer in self.firsts])

    @property
    def later_ms(self) -> Spread:
        return Spread.of([transfer.transfer_ms for transfer in self.others])

    @property
    def first_over_later(self) -> float:
        """The median first transfer over the median later one."""
        return self.first_ms.median / self.later_ms.median

    @property
    def shares(self) -> Spread:
        """Transfer / prefill."""
        return Spread.of_ratios(
            [transfer.transfer_ms for transfer in self.others], [transfer.prefill_ms for transfer in self.others]
        )

    @property
    def rates(self) -> Spread:
        """Rate of the transfer / that of the plain copy."""
        return Spread.of_ratios(
            [transfer.copy_ms for transfer in self.others], [transfer.transfer_ms for transfer in self.others]
        )

    @property
    def added_ms(self) -> Spread:
        """What the handoff adds to the time from the first to the second token."""
        pairs = zip(self.gaps_ms, self.aggregated_gaps_ms, strict=True)
        return Spread.of([handed_off[0] - alone[0] for handed_off, alone in pairs])


class Prompts:
    """Never the same prompt twice."""

    def __init__(self) -> None:
        self._seed = 0

    def new(self, num_tokens: int) -> tuple[int, ...]:
        self._seed += 1
        shape = SyntheticShape(num_requests=1, prompt_low=num_tokens, prompt_high=num_tokens, output_low=2, output_high=2)
        (request,) = synthetic_workload(shape, self._seed)
        return tuple(token for token in request.prompt if isinstance(token, int))


class PlainCopy:
    """Copies between two buffers of memory that was touched before."""

    def __init__(self) -> None:
        self._source: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._target = self._source

    def time_ms(self, num_bytes: int) -> float:
        if len(self._source) != num_bytes:
            self._source, self._target = np.full(num_bytes, 1, np.uint8), np.full(num_bytes, 2, np.uint8)
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        return (time.perf_counter() - begin) * 1e3


class Benchmark:
    """The long and the short prompt, through one cluster after another."""

    def __init__(self, aggregated: LocalCluster, model: str, prompt_tokens: int, repeats: int) -> None:
        self._aggregated = aggregated
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._repeats = repeats
        self._prompts = Prompts()
        self._copy = PlainCopy()

    def run(self, pair: LocalCluster) -> Found:
        first = self.make_handoff(pair)
        others = [self.make_handoff(pair) for _ in range(self._repeats)]
        found = Found([first], others, [], [])
        for cluster in (pair, self._aggregated):
            self._gaps_of_short_answer(cluster)  # not counted
        for _ in range(SHORT_REPEATS * self._repeats):
            found.gaps_ms.append(self._gaps_of_short_answer(pair))
            found.aggregated_gaps_ms.append(self._gaps_of_short_answer(self._aggregated))
            second = self._hand_off(pair, SHORT_PROMPT)["timing"]["second_token"]
            found.seconds.append(SecondToken(second["total_ms"] - second["first_step_ms"], second["first_step_ms"]))
        return found

    def _hand_off(self, pair: LocalCluster, num_tokens: int) -> dict[str, Any]:
        """Send a new prompt; return the account of its handoff."""
        body = {
            "model": self._model,
            "prompt": self._prompts.new(num_tokens),
            "max_tokens": 2,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = httpx.post(f"{pair.base_url}/v1/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        usage: dict[str, Any] = response.json()["usage"]
        transfer: dict[str, Any] = usage["kv_transfer"]
        if transfer["transferred_tokens"] != num_tokens or usage["prompt_tokens_details"]["cached_tokens"]:
            raise RuntimeError(f"not all of the prompt was computed and transferred: {usage}")
        return transfer

    def make_handoff(self, pair: LocalCluster) -> Transfer:
        """Send a new long prompt."""
        transfer = self._hand_off(pair, self._prompt_tokens)
        num_bytes = transfer["transferred_bytes"]
        copy_ms = self._copy.time_ms(num_bytes)
        prefill_ms = transfer["timing"]["first_token"]["prefill_ms"]
        return Transfer(transfer["transport"], num_bytes, transfer["transfer_ms"], prefill_ms, copy_ms)

    def _gaps_of_short_answer(self, cluster: LocalCluster) -> list[float]:
        """Return the times between the tokens of a short request's answer, in ms, as its client sees them."""
        target = Target(base_url=cluster.base_url, model=self._model)
        for _ in range(MAX_TRIES):
            request = BenchRequest(0.0, self._prompts.new(SHORT_PROMPT), SHORT_OUTPUT)
            (result,), _ = asyncio.run(run_load(target, [request], concurrency=1, timeout_s=REQUEST_TIMEOUT_S))
            if result.error:
                raise RuntimeError(f"a request failed: {result.error}")
            if len(result.itl_s) == SHORT_OUTPUT - 1:  # a token that ends within a character is sent with the next
                return [gap * 1e3 for gap in result.itl_s]
        raise RuntimeError(f"tokens came together in {MAX_TRIES} answers one after another")


def transfer_row(name: str, found: Found) -> tuple[str, ...]:
    rates = [transfer.num_bytes / transfer.transfer_ms / 1e6 for transfer in found.others]
    goal = f"{100 * RATE_GOALS[name]:.0f} %" if name in RATE_GOALS else ""
    return (
        name,
        f"{found.first_ms.show()}, {found.first_over_later:.1f} x",
        found.later_ms.show(),
        Spread.of([transfer.prefill_ms for transfer in found.others]).show(),
        found.shares.show(1, 100) + " %",
        Spread.of(rates).show(2),
        Spread.of([transfer.copy_ms for transfer in found.others]).show(),
        found.rates.show(0, 100) + " %",
        goal,
    )


def second_token_row(name: str, found: Found) -> tuple[str, ...]:
    sides = (found.gaps_ms, found.aggregated_gaps_ms)
    firsts = [Spread.of([gaps[0] for gaps in answers]) for answers in sides]
    later = [Spread.of([statistics.median(gaps[1:]) for gaps in answers]) for answers in sides]
    parts = [[second.handoff_ms for second in found.seconds], [second.step_ms for second in found.seconds]]
    shown = (*firsts, found.added_ms, *later, *map(Spread.of, parts))
    return (name, *(spread.show() for spread in shown), f"{ADDED_GOAL_MS:g} ms")


def goals_of(
    found: Mapping[str, Found], verification: Mapping[str, Loads], recomputed_s: Sequence[float]
) -> list[dict[str, object]]:
    aims = []
    for name, each in found.items():
        aims.append(at_most(f"{name}: transfer / prefill", each.shares.median, SHARE_GOAL, "ratio"))
        if name in RATE_GOALS:
            aims.append(at_least(f"{name}: rate / plain copy", each.rates.median, RATE_GOALS[name], "ratio"))
        if name == "shm":
            aims.append(at_most(f"{name}: first transfer / a later one", each.first_over_later, FIRST_GOAL, "ratio"))
        aims.append(at_most(f"{name}: added to the second token by one block", each.added_ms.median, ADDED_GOAL_MS, "ms"))
    return [*aims, *goals_of_verification(verification), goal_of_lost_owners(recomputed_s)]


def make_outcome(
    found: Mapping[str, Found], verification: Mapping[str, Loads], recomputed_s: Sequence[float], prompt_tokens: int
) -> Outcome:
    columns: Sequence[str] = (
        f"{prompt_tokens:,} tokens",
        "first transfers, ms, x later",
        "transfer, ms",
        "prefill, ms",
        "transfer / prefill",
        "GB/s",
        "plain copy, ms",
        "rate / plain copy",
        "goal",
    )
    long = Table(columns, [transfer_row(name, each) for name, each in found.items()])
    columns = (
        f"{SHORT_PROMPT} tokens, first to second token",
        "1P1D, ms",
        "aggregated, ms",
        "added, ms",
        "1P1D, later tokens, ms",
        "aggregated, later tokens, ms",
        "handoff, ms",
        "D's step, ms",
        "goal of added",
    )
    short = Table(columns, [second_token_row(name, each) for name, each in found.items()])
    num_bytes = {each.firsts[0].num_bytes for each in found.values()}
    num_firsts = max(len(each.firsts) for each in found.values())
    goals = goals_of(found, verification, recomputed_s)
    notes = (
        *goal_notes(goals),
        f"first transfers: of {num_firsts} starts, and their median over that of the later ones of the first start",
        "the goal in the first table is the least rate / plain copy",
        f"later tokens: the median of the {SHORT_OUTPUT - 2} times between the tokens 2 to {SHORT_OUTPUT} of an answer",
        "handoff and D's step: the two parts of the time between the tokens, by the router's account of other requests",
        f"{' or '.join(f'{count:,}' for count in sorted(num_bytes))} bytes per transfer; one torch thread per worker",
        "goals of verification: at most this share of the longest transfer without it",
    )
    figures: dict[str, object] = {
        "recomputed_s": list(recomputed_s),
        "transports": {name: asdict(each) for name, each in found.items()},
        "verification": {
            name: {kind: [asdict(load) for load in loads] for kind, loads in kinds.items()}
            for name, kinds in verification.items()
        },
    }
    lost = table_of_lost_owners(recomputed_s, prompt_tokens)
    return Outcome([long, short, make_table(verification), lost], notes, figures, goals)


def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    arguments = parser.parse_args()
    machine = Machine.now()
    prompt_tokens, repeats = (QUICK_PROMPT, 1) if arguments.quick else (LONG_PROMPT, arguments.repeats)
    num_starts = 1 if arguments.quick else FIRST_STARTS
    settings = {"model.name": arguments.model, "model.dtype": "float32", "worker.cpu_threads": 1, "router.port": 0}
    settings["security.insecure"] = True  # transports are compared, not the encryption of one of them
    settings["connector.early_pull"] = False  # a whole prompt at once
    found = {}
    with LocalCluster(load_config(overrides=settings | {"local.aggregated": True})) as aggregated:
        benchmark = Benchmark(aggregated, arguments.model, prompt_tokens, repeats)
        for name in arguments.transports:
            config = load_config(overrides=settings | {"connector.transports": [name]})
            with LocalCluster(config) as pair:
                found[name] = benchmark.run(pair)
            for _ in range(num_starts - 1):
                with LocalCluster(config) as pair:
                    found[name].firsts.append(benchmark.make_handoff(pair))
    with LocalCluster(load_config(overrides=settings | {"connector.transports": ["tcp"]})) as pair:
        recomputed_s = measure_restarts_of_prompts(pair, Prompts().new, prompt_tokens, min(repeats, MAX_KILLS))
    sizes, copy = QUICK_SIZES if arguments.quick else SIZES, PlainCopy()
    verification = {name: measure(name, sizes, VERIFIED_REPEATS * repeats, copy.time_ms) for name in arguments.transports}
    publish(make_outcome(found, verification, recomputed_s, prompt_tokens), machine, arguments)


if __name__ == "__main__":
    main()
