"""The messages between the two sides of the connector, which vLLM pickles: one ``RankOrders`` per engine step and rank.

Plain values without behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.p2p.actions import ReadUnit
from connectors.p2p.transport.interface import PeerId
from connectors.vllm.identity import ModelIdentity
from core.kv.seals import ExpectedSeal
from core.wire.kv import KVLayoutInfo


@dataclass(frozen=True, slots=True)
class SealOrder:
    """P: the step that carries this order completes the prompt of a request: seal its blocks, and hold them for a reader."""

    transfer_id: str
    request_id: str
    blocks: tuple[tuple[int, ExpectedSeal], ...]


@dataclass(frozen=True, slots=True)
class RemoteHandoff:
    """D: a handoff, and the ranks that hold its blocks, in order."""

    transfer_id: str
    ranks: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """D: read these units, which hold ``num_tokens`` tokens of the request; each rank reads its part of them."""

    request_id: str
    handoff: RemoteHandoff
    units: tuple[ReadUnit, ...]
    num_tokens: int
    layout: KVLayoutInfo


@dataclass(slots=True)
class RankOrders:
    """Orders of one engine step, carried out in the order of the fields."""

    cancelled: list[str] = field(default_factory=list)  # P: transfers that were never published
    published: list[str] = field(default_factory=list)  # P: transfers whose blocks are kept until all ranks report their end
    ended: list[str] = field(default_factory=list)  # P: published transfers whose leases end now
    seals: list[SealOrder] = field(default_factory=list)
    holds: list[RemoteHandoff] = field(default_factory=list)  # D: keep these leases alive
    loads: list[LoadOrder] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)  # D: request ids of loads to abort
    releases: list[RemoteHandoff] = field(default_factory=list)  # D: done with these leases

    def is_empty(self) -> bool:
        """True if there is nothing to do."""
        return self == RankOrders()


@dataclass(frozen=True, slots=True)
class QuarantineNews:
    """D, a rank: blocks that late reads may still write, and blocks that no read can write any more."""

    added: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(slots=True)
class RankReports:
    """What the ranks tell the scheduler side in one step, beside vLLM's own fields."""

    quarantine: list[QuarantineNews] = field(default_factory=list)

    def aggregate(self, other: RankReports) -> RankReports:
        """Return the reports of both."""
        return RankReports([*self.quarantine, *other.quarantine])


@dataclass(frozen=True, slots=True)
class RankAddress:
    """What a rank says about itself when its KV caches are registered."""

    control_address: str  # empty on a worker that serves no reader
    incarnation: int
    model: ModelIdentity
    layout: KVLayoutInfo
    transports: Sequence[str]
