"""The steps of one load from its first read to its verdict: which reads are posted, and the consequences of each read's end.

Loads, peers, deadlines and the end of a load belong to ``connectors.p2p.consumer.pull``. Does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.p2p.actions import Action, PostRead, PostSealRead, ReadEnded
from connectors.p2p.consumer.held_leases import HeldLeases
from connectors.p2p.consumer.inflight_reads import InflightReads
from connectors.p2p.consumer.load import Load, LoadPhase, RowSlice
from connectors.p2p.consumer.peers import Peer, Peers
from connectors.p2p.settings import PullSettings
from connectors.p2p.transport.interface import PeerId
from core.errors import KVFerryError, LayoutMismatch, LeaseExpired, PeerUnreachable, ProtocolError, StaleBlock
from core.wire.kv import KVLayoutInfo
from core.wire.messages import ErrorInfo

LOOK_AGAIN_S = 0.005  # after blocks without a seal were found


@dataclass(frozen=True, slots=True)
class LoadExits:
    """How a load leaves reading. ``read_failed`` is called with a peer whose read failed because it is unreachable."""

    end: Callable[[Load, KVFerryError | None, float], None]
    read_failed: Callable[[PeerId, PeerUnreachable, float], None]
    connect_again: Callable[[Load, float], None]


class LoadReader:
    """Reads loads whose peers are open. ``layout`` applies to blocks whose request names none."""

    def __init__(
        self,
        settings: PullSettings,
        layout: KVLayoutInfo,
        peers: Peers,
        leases: HeldLeases,
        reads: InflightReads,
        exits: LoadExits,
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._peers = peers
        self._leases = leases
        self._reads = reads
        self._exits = exits
        self._emit: Callable[[Action], None] = reads.emit
        self.num_blocks_read_again = 0

    def begin(self, load: Load, peer: Peer, now: float) -> None:
        """Check that the handoff fits the peer, then post its first reads."""
        rows = load.request.remote_rows
        last = max(rows, default=0)
        if last >= peer.num_blocks:
            self._exits.end(load, ProtocolError(f"the handoff names block {last} of {peer.num_blocks}"), now)
            return
        if len(set(rows)) < len(rows):  # digests are kept by these rows: one copy would answer for the other
            self._exits.end(load, StaleBlock("two groups of the handoff name the same block, and it is of one at most"), now)
            return
        if peer.layout != (load.request.layout or self._layout):
            error = LayoutMismatch(f"the handoff is of {load.request.layout}, its owner has {peer.layout}")
            self._exits.end(load, error, now)
            return
        larger = {} if load.is_converted else self._settings.max_read_bytes_by  # converted blocks land in the staging area
        read_bytes = larger.get(peer.transport, self._settings.max_read_bytes)
        load.begin_reading(now, read_bytes // peer.layout.block_bytes)
        self.post_reads(load, now)

    def post_reads(self, load: Load, now: float, max_reads: int | None = None) -> None:
        """Post the reads that may be in flight; with the last one, order the seals."""
        handoff, is_leased = load.request.handoff, load.request.is_leased
        while load.is_waiting and len(load.open_reads) < (max_reads or self._settings.max_reads_in_flight):
            if is_leased and handoff not in self._leases:
                error = LeaseExpired(f"{load.producer.address} does not keep the handoff {handoff.transfer_id}")
                load.invalidate_waiting(ErrorInfo.of(error))
            elif load.may_read and (not is_leased or self._leases.may_start_read(handoff, now)):
                rows = load.next_slice()
                self._emit(self._post_read(self._reads.open_blocks(load, rows), load, rows))
            else:
                return
        if not load.is_waiting:
            self._read_seals(load, now)

    def offer_room(self, loads: Iterable[Load], now: float) -> None:
        """A read has ended: let the loads that had no room try again, the eldest first, with one read each."""
        for load in [load for load in loads if load.wants_room]:
            load.offer_room(now)
            self.post_reads(load, now, len(load.open_reads) + 1)

    def look_again(self, load: Load, now: float) -> None:
        """Go on with a load that has waited for seals."""
        load.looks_again_at = math.inf
        self.post_reads(load, now)

    def _post_read(self, read_id: int, load: Load, rows: RowSlice) -> PostRead:
        peer = self._peers.get(load.producer)
        wants_digests = bool(rows.copies) and peer is not None and peer.verifies_digests
        heads = load.request.heads
        return PostRead(read_id, load.producer, rows.remote_rows, rows.local_rows, rows.copies, wants_digests, heads)

    def _read_seals(self, load: Load, now: float) -> None:
        """Order the seals of all units that have arrived or are being read; without any, the load is over.

        Converted blocks may find no room and have to be read again: their seals are ordered after the blocks have arrived.
        """
        if load.seal_read is not None or (load.open_reads and load.is_converted):
            return
        rows = load.to_seal()
        if not rows.indices:
            self._exits.end(load, None, now)
            return
        peer = self._peers.get(load.producer)
        assert peer is not None, "a lost peer ends its loads"
        after = tuple(load.open_reads)
        read_id = self._reads.open_seals(load, rows)
        wants_digests = peer.verifies_digests and not rows.copies  # what was converted has been digested before
        self._emit(PostSealRead(read_id, load.producer, rows.remote_rows, rows.local_rows, wants_digests, after))
        if not after:
            load.begin_sealing()

    def on_read_ended(self, load: Load, read: ReadEnded, now: float, ended_at: float) -> None:
        """Handle the end of a read that the load waits for."""
        if load.phase is LoadPhase.CONNECTING:  # posted in vain, to a peer that could not be opened
            self._on_read_in_vain(load, read, now)
            return
        peer = self._peers.get(load.producer)
        assert peer is not None, "a lost peer ends its loads"
        if read.error is None and not read.has_no_room:
            peer.last_progress_at = now
        if read.read_id == load.seal_read:
            load.seals_ended_at = ended_at
            self._on_seals_read(load, peer, read, now)
        else:
            load.last_ended_at = ended_at
            self._on_blocks_read(load, peer, read, now)

    def _on_read_in_vain(self, load: Load, read: ReadEnded, now: float) -> None:
        """Queue the blocks again, to be read by another transport; seals are ordered again in their turn."""
        if read.read_id == load.seal_read:
            load.end_sealing()
        else:
            load.want_again(load.open_reads.pop(read.read_id))
        if not load.is_reading:
            self._exits.connect_again(load, now)

    def _on_blocks_read(self, load: Load, peer: Peer, read: ReadEnded, now: float) -> None:
        rows = load.open_reads.pop(read.read_id)
        if read.has_no_room:
            load.want_again(rows)
            load.wants_room = True
            return
        if read.error is None:
            load.arrive(rows)
            load.digests.update(zip(rows.remote_rows, read.digests, strict=False))
        else:
            load.invalidate(rows.indices, ErrorInfo.of(read.error))
        if isinstance(read.error, PeerUnreachable):
            self._exits.read_failed(load.producer, read.error, now)
        elif load.seal_read is None:
            self.post_reads(load, now)
        elif load.open_reads:
            load.seal_check(peer.seal_terms)  # while more is on the way
        else:
            self._on_bytes_here(load, now)

    def _on_bytes_here(self, load: Load, now: float) -> None:
        """The read of the seals begins by now. If no block has arrived there is nothing to verify."""
        if load.has_arrived:
            load.begin_sealing()
        else:
            self._exits.end(load, None, now)

    def _on_seals_read(self, load: Load, peer: Peer, read: ReadEnded, now: float) -> None:
        """Decide about the units; those whose bytes do not match their seal are read once more.

        The owner may seal a handoff some time after it has granted the lease: units without seals are read again for a while.
        """
        check = load.seal_check(peer.seal_terms)
        rows = load.end_sealing()
        if read.error is not None:
            load.invalidate(load.arrived_of(rows.indices), ErrorInfo.of(read.error))
            if isinstance(read.error, PeerUnreachable):
                self._exits.read_failed(load.producer, read.error, now)
            self._exits.end(load, read.error, now)
            return
        assert not load.open_reads, "seals are read when the blocks have been"
        load.digests.update(zip(rows.remote_rows, read.digests, strict=False))
        verdict = check.verdict(read.seals, load.digests)
        load.verify(load.arrived_of(verdict.good))
        unsealed = load.arrived_of(verdict.unsealed)
        if unsealed and now < min(load.unsealed_since, now) + self._settings.unsealed_patience_s:
            load.look_again(unsealed, now, now + LOOK_AGAIN_S)
        corrupt = load.arrived_of(verdict.corrupt)
        if corrupt and not load.has_read_again:
            self.num_blocks_read_again += len(corrupt)
            load.read_again(corrupt)
        problems = verdict.stale | verdict.unsealed | verdict.corrupt
        for index in load.arrived_of(problems):
            load.invalidate([index], problems[index])
        if load.is_waiting:
            load.phase = LoadPhase.READING
            self.post_reads(load, now)
        else:
            self._exits.end(load, None, now)
