"""What verification adds to a transfer: the part of ``benchmarks/handoff.py`` that needs no model.

Two real connectors in two processes, each beside an engine without a model (``connectors.testing.connector_engine``): the
owner's blocks have the size of SmolLM2-135M's in float32 and lie in random order, as the reader's do. Two readers take turns,
one compares seals, one the digests of all bytes as well. Both say of every load how long it took from the last byte until the
last seal and digest were at hand; the comparison itself is timed here and added. The rest of the load is the transfer, to
which the change of threads at its end belongs: a load that verifies nothing needs it as well. So transfer without verification
and with it are measured on the same load, and the ratio of the two does not mix loads.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import msgspec
from common import Spread, Table, at_most

from connectors.p2p.connector import P2PConnector
from connectors.p2p.consumer.load import Load
from connectors.p2p.consumer.verification import SealCheck
from connectors.testing.connector_engine import ConnectorEngine
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection
from core.kv.spec import ceil_div
from core.wire.kv import KVHandoff, KVLayoutInfo
from core.wire.messages import Role

BLOCK_SIZE = 64
LAYOUT = KVLayoutInfo(
    dtype="float32",
    order="HND",
    block_size=BLOCK_SIZE,
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    block_bytes=30 * 2 * 3 * BLOCK_SIZE * 64 * 4,
)
SIZES, QUICK_SIZES = (1, 64, 512, 2048), (1, 128)  # tokens
KINDS: tuple[Literal["identity", "digest"], ...] = ("identity", "digest")
WARM_UPS = 2
IDENTITY_GOAL = 0.01  # of the largest transfer
DIGEST_GOALS = {"tcp": 0.25, "shm": 0.60}  # likewise
FINGERPRINT = b"benchmark"
OWNER_INCARNATION = 1
OWNER_TIMEOUT_S = 60.0

PlainCopy = Callable[[int], float]  # bytes → ms


@dataclass(frozen=True, slots=True)
class Measured:
    """One load, and the plain copy of as many bytes right after it."""

    num_tokens: int
    transfer_ms: float  # all but the next
    verify_ms: float
    copy_ms: float


Loads = dict[str, list[Measured]]  # by kind of verification


class TimedCheck:
    """Stands before the comparison of seals in this process. ``ms``: what it took when the seals had come.

    ``ms`` includes computing the digests to compare with, unless that was done while the bytes were on the way.
    """

    def __init__(self) -> None:
        self.ms = 0.0
        self._real = ((Load, "seal_check", Load.seal_check), (SealCheck, "verdict", SealCheck.verdict))
        for kind, name, real in self._real:
            setattr(kind, name, self._timed(real, is_first=kind is Load))

    def remove(self) -> None:
        for kind, name, real in self._real:
            setattr(kind, name, real)

    def _timed(self, real: Callable[..., object], is_first: bool) -> Callable[..., object]:
        def timed(*arguments: object) -> object:
            started_at = time.perf_counter()
            found = real(*arguments)
            self.ms = (0.0 if is_first else self.ms) + 1000 * (time.perf_counter() - started_at)
            return found

        return timed


class Side:
    """A connector beside an engine, with its free blocks in random order."""

    def __init__(self, role: Role, incarnation: int, config: ConnectorSection, num_blocks: int) -> None:
        context = connector_context(
            role,
            layout=LAYOUT,
            model_fingerprint=FINGERPRINT,
            engine_id=f"{role}-{incarnation}",
            incarnation=incarnation,
            connector=config,
        )
        self.connector = P2PConnector(context)
        self.engine = ConnectorEngine(
            self.connector.scheduler, self.connector.worker, FINGERPRINT, LAYOUT, num_blocks, incarnation
        )
        pool = self.engine.manager.block_pool
        blocks = pool.get_new_blocks(pool.num_free_blocks)
        random.Random(incarnation).shuffle(blocks)
        pool.free_blocks(blocks)

    async def close(self) -> None:
        await self.connector.stop()
        self.engine.close()


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Return tokens that share no block with those of another seed."""
    return [(seed << 12) + position for position in range(num_tokens)]


def own(transport: str, num_blocks: int, channel: Connection) -> None:
    """Run as the producer's process: compute every prompt and send its handoff, until there is no more."""
    asyncio.run(_own(transport, num_blocks, channel))


async def _own(transport: str, num_blocks: int, channel: Connection) -> None:
    side = Side("prefill", OWNER_INCARNATION, ConnectorSection(transports=(transport,), kv_verify="digest"), num_blocks)
    await side.connector.start()
    try:
        while (asked := await asyncio.to_thread(channel.recv)) is not None:
            seed, num_tokens = asked
            await side.engine.until(lambda: not side.engine.parked)
            handoff = side.engine.prefill(f"p{seed}", prompt(seed, num_tokens))
            channel.send_bytes(msgspec.msgpack.encode(handoff))
    finally:
        await side.close()


class Reader:
    """Loads what the owner has, and measures."""

    def __init__(self, side: Side, channel: Connection, copy: PlainCopy, check: TimedCheck) -> None:
        self._side = side
        self._channel = channel
        self._copy = copy
        self._check = check
        self._handoffs = msgspec.msgpack.Decoder(KVHandoff)

    async def load(self, seed: int, num_tokens: int, is_checked: bool) -> Measured:
        """Load a new prompt; where ``is_checked`` compare all of it with what the owner computed."""
        engine, request_id = self._side.engine, f"d{seed}"
        self._check.ms = 0.0
        self._channel.send((seed, num_tokens))
        if not await asyncio.to_thread(self._channel.poll, OWNER_TIMEOUT_S):
            raise TimeoutError(f"the owner computed no prompt in {OWNER_TIMEOUT_S:g} s")
        request = engine.add(request_id, prompt(seed, num_tokens), self._handoffs.decode(self._channel.recv_bytes()))
        engine.admit(request)
        await engine.until(lambda: engine.loads[request_id].is_ended)
        outcome = engine.loads[request_id]
        if outcome.error is not None or outcome.usage is None:
            raise RuntimeError(f"a load failed: {outcome.error}")
        if outcome.usage.verified_blocks != ceil_div(num_tokens, BLOCK_SIZE):
            raise RuntimeError(f"not all blocks were verified: {outcome.usage}")
        if is_checked and not engine.has_content(request):
            raise RuntimeError(f"what has arrived is not what was computed: {outcome.usage}")
        engine.finish(request)
        engine.step()  # tells the owner to let go
        copy_ms = self._copy(outcome.usage.transferred_bytes)
        return Measured(num_tokens, outcome.usage.transfer_ms, outcome.usage.verify_ms + self._check.ms, copy_ms)


def measure(transport: str, sizes: Sequence[int], repeats: int, copy: PlainCopy) -> Loads:
    """Return the loads of every size, for each kind of verification; both kinds and all sizes take turns."""
    num_blocks = ceil_div(max(sizes), BLOCK_SIZE) + 8
    context = multiprocessing.get_context("spawn")
    channel, far_end = context.Pipe()
    owner = context.Process(target=own, args=(transport, num_blocks, far_end))
    owner.start()
    try:
        loads = asyncio.run(_measure(transport, sizes, repeats, num_blocks, (channel, copy)))
        channel.send(None)
        owner.join(OWNER_TIMEOUT_S)
    finally:
        owner.kill()
        owner.join()
    return loads


async def _measure(
    transport: str, sizes: Sequence[int], repeats: int, num_blocks: int, parts: tuple[Connection, PlainCopy]
) -> Loads:
    found: Loads = {kind: [] for kind in KINDS}
    seeds = iter(range(1, 1 << 18))
    async with AsyncExitStack() as sides:
        check = TimedCheck()
        sides.callback(check.remove)
        readers = {}
        for incarnation, kind in enumerate(KINDS, OWNER_INCARNATION + 1):
            side = Side("decode", incarnation, ConnectorSection(transports=(transport,), kv_verify=kind), num_blocks)
            await side.connector.start()
            sides.push_async_callback(side.close)
            readers[kind] = Reader(side, *parts, check)
        for turn in range(WARM_UPS + repeats):
            for num_tokens in sizes:
                for kind, reader in readers.items():
                    load = await reader.load(next(seeds), num_tokens, is_checked=turn < WARM_UPS)
                    if turn >= WARM_UPS:
                        found[kind].append(load)
    return found


def make_table(found: Mapping[str, Loads]) -> Table:
    """Return one row for each transport and size."""
    columns = (
        "verification",
        "tokens",
        "plain copy, ms",
        "transfer, ms",
        "identity, ms",
        "identity / transfer",
        "goal",
        "digest, ms",
        "digest / transfer",
        "goal",
    )
    rows = []
    for transport, loads in found.items():
        sizes = sorted({load.num_tokens for load in loads["identity"]})
        rows += [_row(transport, loads, num_tokens, is_largest=num_tokens == sizes[-1]) for num_tokens in sizes]
    return Table(columns, rows)


def goals_of(found: Mapping[str, Loads]) -> list[dict[str, object]]:
    """Return the aims: shares of the longest transfer without verification."""
    aims = []
    for transport, kinds in found.items():
        for kind, goal in (("identity", IDENTITY_GOAL), ("digest", DIGEST_GOALS.get(transport))):
            if goal is not None:
                num_tokens = max(load.num_tokens for load in kinds[kind])
                share = _ratios([load for load in kinds[kind] if load.num_tokens == num_tokens]).median
                aims.append(at_most(f"{transport}: {kind} / transfer of {num_tokens:,} tokens", share, goal, "ratio"))
    return aims


def _row(transport: str, loads: Loads, num_tokens: int, is_largest: bool) -> tuple[str, ...]:
    identity, digest = ([load for load in loads[kind] if load.num_tokens == num_tokens] for kind in KINDS)
    digest_goal = DIGEST_GOALS.get(transport)
    return (
        transport,
        f"{num_tokens:,}",
        Spread.of([load.copy_ms for load in identity + digest]).show(2),
        Spread.of([load.transfer_ms for load in identity + digest]).show(2),
        Spread.of([load.verify_ms for load in identity]).show(2),
        _ratios(identity).show(1, 100) + " %",
        f"{100 * IDENTITY_GOAL:.0f} %" if is_largest else "",
        Spread.of([load.verify_ms for load in digest]).show(2),
        _ratios(digest).show(1, 100) + " %",
        f"{100 * digest_goal:.0f} %" if is_largest and digest_goal is not None else "",
    )


def _ratios(loads: Sequence[Measured]) -> Spread:
    return Spread.of_ratios([load.verify_ms for load in loads], [load.transfer_ms for load in loads])
