"""Which worker a prompt's beginning can be loaded from: the one that holds most of it, of those that the reader can read.

Owns the estimates of transfers, one for each transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from core.errors import KVFerryError
from core.wire.kv import MAX_OTHER_SOURCES, KVSource
from core.wire.messages import TransferUsage
from core.wire.pairing import choose_transport
from router.contents.known import Hit
from router.dispatch.members import GenerationWorker, WorkerKey
from router.routing.transfer import MARGIN, AskTime, SourceTrust, TransferTime

_MAX_TRIES = 4  # holders that are compared with a reader


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that serves beginnings of prompts, and how many tokens of this prompt it vouches for."""

    worker: GenerationWorker
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Source:
    """A holder that a reader can read, and the predicted time to load what the reader lacks. ``later`` hold no more."""

    reader: GenerationWorker
    holder: PrefixHolder
    transfer_ms: float
    later: Sequence[PrefixHolder] = ()

    def as_message(self, patience_ms: float) -> KVSource:
        """Describe the source to the reader, with the longest time that it may wait."""
        message = message_of(self.holder, patience_ms)
        readable = (holder for holder in self.later if transport_between(self.reader, holder.worker))
        others = tuple(message_of(holder, 0) for holder in itertools.islice(readable, MAX_OTHER_SOURCES))
        return msgspec.structs.replace(message, others=others)


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

    def on_declined(self, source: Source) -> None:
        """Learn that a prompt was placed without this source, since that is sooner by the present figures."""
        self.trust.recover()
        self.asking.recover()
        transport = self.transports.get((source.reader.key, source.holder.worker.key))
        if transport is not None:
            self._time(transport).recover()

    def forget(self, worker: WorkerKey) -> None:
        """Forget a worker that has left."""
        self.transports = {pair: transport for pair, transport in self.transports.items() if worker not in pair}

    def best(self, reader: GenerationWorker, num_own_tokens: int, holders: Sequence[PrefixHolder]) -> Source | None:
        """Return the holder of most tokens that ``reader`` can read, if it holds a block more than the reader.

        ``holders`` come from ``holders_of``.
        """
        if not reader.facts.prefix_address:
            return None
        layout = reader.facts.layout
        for number, holder in enumerate(holders[:_MAX_TRIES]):
            num_missing = holder.num_tokens - num_own_tokens
            if num_missing < layout.block_size:
                return None
            transport = transport_between(reader, holder.worker)
            if transport is None:
                continue
            self.transports[reader.key, holder.worker.key] = transport
            num_bytes = num_missing / layout.block_size * layout.block_bytes * layout.num_groups
            transfer_ms = self.asking.ms + self._time(transport).ms(num_bytes)
            return Source(reader, holder, transfer_ms, holders[number + 1 : number + 1 + _MAX_TRIES])
        return None

    def _time(self, transport: str) -> TransferTime:
        return self.times.setdefault(transport, TransferTime())


def transport_between(reader: GenerationWorker, source: GenerationWorker) -> str | None:
    """Return by which transport a worker can read the prefix cache of another one; None if it cannot."""
    ours, theirs = reader.facts.layout, source.facts.layout
    if source.key == reader.key or (ours.num_groups > 1 and ours.block_size != theirs.block_size):
        return None
    try:
        return choose_transport(reader.facts, source.facts)
    except KVFerryError:
        return None


def message_of(holder: PrefixHolder, patience_ms: float) -> KVSource:
    """Describe a holder to a reader. A patience of 0 means that of the source before it."""
    facts = holder.worker.facts
    return KVSource(
        engine_id=facts.engine_id,
        incarnation=facts.incarnation,
        control_address=facts.prefix_address,
        num_tokens=holder.num_tokens,
        patience_ms=max(1, round(patience_ms)) if patience_ms else 0,
    )


def others_than(first: KVSource, most: KVSource | None) -> tuple[KVSource, ...]:
    """Return ``most`` and its others, without the worker that is asked first."""
    found = (most, *most.others) if most is not None else ()
    every = (msgspec.structs.replace(each, others=()) for each in found if each.engine_id != first.engine_id)
    return tuple(itertools.islice(every, MAX_OTHER_SOURCES))


def holders_of(workers: Iterable[GenerationWorker], hits: Mapping[WorkerKey, Hit]) -> list[PrefixHolder]:
    """Return those of these workers that vouch for some of a prompt, the most tokens first; all serve beginnings of prompts."""
    found = [
        PrefixHolder(worker, hit.claimed_tokens)
        for worker in workers
        if (hit := hits.get(worker.key)) is not None and hit.claimed_tokens and not worker.is_closed
    ]
    return sorted(found, key=lambda holder: (-holder.num_tokens, holder.worker.load))
