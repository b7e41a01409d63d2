"""Which worker a prompt's beginning can be loaded from: the one that holds most of it, of those that the reader can read.

Owns the estimates of transfers, one for each transport.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.errors import KVFerryError
from core.wire.kv import KVSource
from core.wire.messages import TransferUsage
from core.wire.pairing import choose_transport
from router.contents.known import Hit
from router.dispatch.members import GenerationWorker, WorkerKey
from router.routing.transfer import MARGIN, AskTime, SourceTrust, TransferTime

_MAX_TRIES = 4  # holders that are compared with a reader


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker that serves beginnings of prompts, and how many tokens of this prompt it vouches for."""

    worker: GenerationWorker
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Source:
    """A holder that a reader can read, and the predicted time to load what the reader lacks."""

    holder: Holder
    transfer_ms: float

    def as_message(self, patience_ms: float) -> KVSource:
        """Return what the reader is told; it waits so long at most."""
        facts = self.holder.worker.facts
        return KVSource(
            engine_id=facts.engine_id,
            incarnation=facts.incarnation,
            control_address=facts.prefix_address,
            num_tokens=self.holder.num_tokens,
            patience_ms=max(1, round(patience_ms)),
        )


@dataclass(slots=True)
class Sources:
    """Finds sources. ``times`` are learned by transport; ``margin`` is that of ``transfer.pays``.

    ``transports`` maps pairs of reader and source to the transport between them.
    """

    margin: float = MARGIN
    trust: SourceTrust = field(default_factory=SourceTrust)
    asking: AskTime = field(default_factory=AskTime)
    transports: dict[tuple[WorkerKey, WorkerKey], str] = field(default_factory=dict)
    times: dict[str, TransferTime] = field(default_factory=dict)

    def observe(self, usage: TransferUsage) -> None:
        """Learn from a transfer of any kind."""
        if usage.transport and not usage.fallback_reason:
            self._time(usage.transport).observe(usage.transferred_bytes, usage.transfer_ms + usage.verify_ms)

    def on_failed(self, reader: WorkerKey, source: WorkerKey) -> None:
        """Learn from a source of which nothing was loaded."""
        transport = self.transports.get((reader, source))
        if transport is not None:
            self._time(transport).fail()

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self.transports = {pair: transport for pair, transport in self.transports.items() if worker not in pair}

    def best(self, reader: GenerationWorker, num_own_tokens: int, holders: Iterable[Holder]) -> Source | None:
        """Return the holder of most tokens that ``reader`` can read, if it holds a block more than the reader.

        ``holders`` come from ``holders_of``.
        """
        if not reader.facts.prefix_address:
            return None
        layout = reader.facts.layout
        for number, holder in enumerate(holders):
            num_missing = holder.num_tokens - num_own_tokens
            if num_missing < layout.block_size or number >= _MAX_TRIES:
                return None
            theirs = holder.worker.facts.layout
            if holder.worker.key == reader.key or (layout.num_groups > 1 and layout.block_size != theirs.block_size):
                continue
            try:
                transport = choose_transport(reader.facts, holder.worker.facts)
            except KVFerryError:
                continue
            self.transports[reader.key, holder.worker.key] = transport
            num_bytes = num_missing / layout.block_size * layout.block_bytes * layout.num_groups
            return Source(holder, self.asking.ms + self._time(transport).ms(num_bytes))
        return None

    def _time(self, transport: str) -> TransferTime:
        return self.times.setdefault(transport, TransferTime())


def holders_of(workers: Iterable[GenerationWorker], hits: Mapping[WorkerKey, Hit]) -> list[Holder]:
    """Return those of these workers that vouch for some of a prompt, the most tokens first; all serve beginnings of prompts."""
    found = [
        Holder(worker, hit.claimed_tokens)
        for worker in workers
        if (hit := hits.get(worker.key)) is not None and hit.claimed_tokens and not worker.is_closed
    ]
    return sorted(found, key=lambda holder: (-holder.num_tokens, holder.worker.load))
