"""Commands to transports: the part of the transfer thread that has no thread of its own, so that the simulation can drive it.

``TransferExecutor`` carries out commands on transports and turns their results into events.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from connectors.p2p.actions import (
    AskProgress,
    CancelRead,
    ClosePeer,
    EndProbe,
    OpenPeer,
    PeerFailed,
    PeerLost,
    PeerOpened,
    PeerProgress,
    PostRead,
    PostSealRead,
    ReadEnded,
    StartProbe,
    TransferCommand,
    TransferEvent,
)
from connectors.p2p.consumer.transport_probe import Probes
from connectors.p2p.transfer.staging import StagedRows, StagingArea
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, PeerId, ReadResult, Transport
from core.errors import KVFerryError, LayoutMismatch, PeerUnreachable, ProtocolError, TransferError
from core.kv.block_form import BlockForm, block_rows, plane_rows
from core.kv.seals import DigestBlocks, SealTable
from core.log import event
from core.wire.pairing import has_equal_blocks

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenRead:
    """An open read: its transport and its rows. ``staged``: its blocks in the staging area, if it does not write ours."""

    transport: Transport
    command: PostRead | PostSealRead
    region: int
    remote_rows: Sequence[int]
    local_rows: Sequence[int]
    landing: npt.NDArray[np.int64] | None = None  # the local rows of a read of seals, as numpy takes them
    staged: StagedRows | None = None
    form: BlockForm | None = None  # of the staged blocks
    handle: int = -1
    is_cancelled: bool = False


class _PeerPool(NamedTuple):
    """The pool of an open peer: how many blocks it has, and how their bytes are ordered."""

    how_to_open: OpenPeer
    form: BlockForm

    def rows(self, block_ids: Sequence[int]) -> Sequence[int]:
        """Return the rows of these blocks."""
        return plane_rows(block_ids, self.form.layout.num_planes, self.how_to_open.num_blocks)


class _EndedRead(NamedTuple):
    """A read that is terminal since ``at``, and the seals that it has read."""

    read: _OpenRead
    error: KVFerryError | None
    seals: bytes
    at: float


class TransferExecutor:
    """Runs commands on transports, one at a time. ``report`` gets every event with its time, from ``now``; it must not block.

    A read of seals that waits for the blocks' reads begins here, when the last of them is terminal, without a round trip
    through the event loop. Where the producer keeps that order itself, it begins at once (``Transport.reads_in_order``).

    Seals land in ``seals``; ``digest_blocks`` computes the digests of local blocks by their ids, when the seals have arrived.
    Blocks that are to be converted land in ``staging``; None if they cannot be read. A read that finds no room there ends
    without having been posted: its load posts it again when there is room, if it still needs it. A peer with rows in the
    staging area gets no more than it leaves to others, so that a frozen peer does not keep all of it.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        seals: SealTable,
        digest_blocks: DigestBlocks,
        report: Callable[[TransferEvent, float], None],
        now: Callable[[], float],
        staging: StagingArea | None = None,
    ) -> None:
        self._transports = dict(transports)
        self._seals = seals
        self._staging = staging
        self._digest_blocks = digest_blocks
        self._report_at = report
        self._now = now
        self._peers: dict[PeerId, Transport] = {}
        self._pools: dict[PeerId, _PeerPool] = {}
        self._reads: dict[int, _OpenRead] = {}
        self._read_ids: dict[tuple[str, int], int] = {}  # transport and handle → read id
        self._lost: list[PeerLost] = []  # to be reported after the reads that ended with these peers
        self._next: dict[int, _OpenRead] = {}  # reads of seals that wait for the reads of their blocks
        self._probes = Probes(self._transports, seals.probe_row)
        self._bytes_seen: dict[PeerId, int | None] = {}  # received from a peer when its last read ended or at the last question

    def execute(self, command: TransferCommand) -> None:
        """Carry out one command. Failures become events."""
        match command:
            case OpenPeer():
                self._open(command)
            case ClosePeer():
                self._close_peer(command.peer)
            case PostRead() | PostSealRead():
                self._post(command)
            case CancelRead():
                self._cancel(command.read_id)
            case AskProgress():
                self._report_progress(command.peer)
            case StartProbe():
                failed = self._probes.start(command)
                if failed is not None:
                    self._report(failed)
            case EndProbe():
                self._probes.end(command)

    def poll(self) -> bool:
        """Let every transport progress; report the reads that ended and the peers that are lost. True if there were any.

        Seals are requested before anything is reported; those of a near peer have arrived by then.
        """
        ended = self._take_ended()
        following = self._following()  # also those whose blocks arrived in the second look of the poll before
        if not ended and not following and not self._lost:
            return False
        refused = [event for read in following if (event := self._start(read)) is not None]
        if self._awaits_seals():
            ended += self._take_ended()
        for each in ended:
            event = self._ended(each.read, each.error, each.seals)
            was_worked_on = bool(event.digests) or each.read.staged is not None  # its blocks were just digested or converted
            self._report_at(event, self._now() if was_worked_on else each.at)
        for event in refused:
            self._report(event)
        lost, self._lost = self._lost, []
        for loss in lost:
            self._report(loss)
        return True

    def pollables(self) -> list[zmq.Socket[bytes] | int]:
        """Return the sockets and descriptors that announce work for ``poll``."""
        return [pollable for transport in self._transports.values() for pollable in transport.pollables()]

    def max_wait_s(self) -> float | None:
        """Return how long ``poll`` may be left alone, None = without bound."""
        waits = [wait for transport in self._transports.values() if (wait := transport.max_wait_s()) is not None]
        return min(waits, default=None)

    def close(self) -> None:
        """Fence all peers and close all transports, also those behind one that fails."""
        with ExitStack() as every:
            every.callback(self._peers.clear)
            for transport in self._transports.values():
                every.callback(transport.close)

    def _open(self, command: OpenPeer) -> None:
        transport = self._transports[command.transport]
        try:
            transport.add_peer(command.peer, command.metadata)
            _check_shape(transport, command)
            pool = _PeerPool(command, BlockForm(command.layout))
        except Exception as error:  # a peer's bytes may make a transport fail: the peer's failure, not the worker's
            transport.remove_peer(command.peer)
            self._report(PeerFailed(command, _opening_error(command, error)))
            return
        self._peers[command.peer] = transport
        self._pools[command.peer] = pool
        self._bytes_seen[command.peer] = transport.bytes_received(command.peer)
        self._report(PeerOpened(command.peer, command.transport, command.instead_of))

    def _close_peer(self, peer: PeerId) -> None:
        """Fence a peer; its reads end by that."""
        transport = self._peers.pop(peer, None)
        if transport is not None:
            del self._pools[peer]
            del self._bytes_seen[peer]
            transport.remove_peer(peer)

    def _report_progress(self, peer: PeerId) -> None:
        """Compare a peer's received bytes with the last look, after processing what has arrived. Ignores closed peers."""
        self.poll()
        transport = self._peers.get(peer)
        if transport is None:
            return
        received = transport.bytes_received(peer)
        has_advanced = None if received is None else received != self._bytes_seen[peer]
        self._bytes_seen[peer] = received
        self._report(PeerProgress(peer, has_advanced))

    def _is_open(self, read_ids: Iterable[int]) -> bool:
        return any(read_id in self._reads for read_id in read_ids)

    def _take_ended(self) -> list[_EndedRead]:
        """Remove the reads that have become terminal."""
        ended = []
        for transport in self._transports.values():
            for result in transport.poll():
                if self._probes.is_one(transport.name, result.handle):
                    self._end_probe(transport, result)
                    continue
                read = self._reads.pop(self._read_ids.pop((transport.name, result.handle)))
                error = result.error or self._why_too_early(read)
                seals = self._seals.rows(read.landing) if error is None and read.landing is not None else b""
                ended.append(_EndedRead(read, error, seals, self._now()))
                if self._peers.get(read.command.peer) is transport:
                    self._bytes_seen[read.command.peer] = transport.bytes_received(read.command.peer)
            self._note_lost(transport)
        return ended

    def _note_lost(self, transport: Transport) -> None:
        """Remember the open peers that a transport has lost. That of a probe is not open."""
        for peer in transport.take_lost_peers():
            if self._peers.get(peer) is transport:
                error = PeerUnreachable(f"the {transport.name} connection to {peer.address} was lost")
                self._lost.append(PeerLost(self._pools[peer].how_to_open, error))

    def _end_probe(self, transport: Transport, result: ReadResult) -> None:
        ended = self._probes.take(transport.name, result)
        if ended is not None:
            self._report(ended)

    def _why_too_early(self, read: _OpenRead) -> ProtocolError | None:
        """Return the error of seals that arrived before their blocks: they would prove nothing."""
        if isinstance(read.command, PostSealRead) and self._is_open(read.command.after):
            return ProtocolError(f"{read.command.peer.address} sent seals before their blocks")
        return None

    def _following(self) -> list[_OpenRead]:
        """Remove and return the reads of seals whose blocks have been read."""
        ready = [read_id for read_id, read in self._next.items() if not self._has_to_wait(read)]
        return [self._next.pop(read_id) for read_id in ready]

    def _awaits_seals(self) -> bool:
        """Return True if a seal read is open whose blocks have been read."""
        seal_reads = (read.command for read in self._reads.values() if isinstance(read.command, PostSealRead))
        return any(not self._is_open(command.after) for command in seal_reads)

    def _has_to_wait(self, read: _OpenRead) -> bool:
        """Return True if these seals, if requested now, would be read before their blocks."""
        if not isinstance(read.command, PostSealRead):
            return False
        before = [self._reads[read_id].transport for read_id in read.command.after if read_id in self._reads]
        return any(transport is not read.transport or not transport.reads_in_order for transport in before)

    def _report(self, event: TransferEvent) -> None:
        self._report_at(event, self._now())

    def _cancel(self, read_id: int) -> None:
        if self._next.pop(read_id, None) is not None:
            self._report(ReadEnded(read_id, TransferError("the read was cancelled before its turn came")))
        found = self._reads.get(read_id)
        if found is not None:
            found.is_cancelled = True
            found.transport.cancel(found.handle)

    def _post(self, command: PostRead | PostSealRead) -> None:
        transport = self._peers.get(command.peer)
        if transport is None:
            error = PeerUnreachable(f"{command.peer.address} is not open")
            self._report(ReadEnded(command.read_id, error))
            return
        if isinstance(command, PostSealRead):
            self._post_seals(command, transport)
        elif command.copies:
            self._post_staged(command, transport)
        else:
            self._post_direct(command, transport)

    def _post_seals(self, command: PostSealRead, transport: Transport) -> None:
        """Read seals as soon as no read of their blocks is open."""
        landing = self._seals.landing_rows(command.local_rows, len(command.remote_rows))
        self._seals.clear_landing(landing)
        read = _OpenRead(transport, command, SEAL_REGION, command.remote_rows, landing, np.asarray(landing))
        if self._has_to_wait(read):
            self._next[command.read_id] = read
        else:
            self._start_or_report(read)

    def _post_direct(self, command: PostRead, transport: Transport) -> None:
        """Read blocks into ours, which have the same bytes."""
        pool = self._pools[command.peer]
        if self._staging is not None and not has_equal_blocks(pool.form.layout, self._staging.pool.layout):
            error = LayoutMismatch(f"the blocks of {command.peer.address} would have to be converted")
            self._report(ReadEnded(command.read_id, error))
            return
        rows = pool.rows(command.remote_rows)
        local = plane_rows(command.local_rows, pool.form.layout.num_planes, self._seals.num_blocks)
        self._start_or_report(_OpenRead(transport, command, POOL_REGION, rows, local))

    def _post_staged(self, command: PostRead, transport: Transport) -> None:
        """Read blocks that are to be converted, if there is room for them now."""
        pool = self._pools[command.peer]
        row_bytes, num_rows = pool.form.layout.block_bytes, len(command.remote_rows)
        if self._staging is None or not self._staging.holds(num_rows, row_bytes):
            error = LayoutMismatch(f"there is no room to convert {num_rows} blocks of {row_bytes} bytes")
            self._report(ReadEnded(command.read_id, error))
            return
        staged = self._staging.take(num_rows, row_bytes, self._num_staged_bytes(command.peer))
        if staged is None:
            self._report(ReadEnded(command.read_id, has_no_room=True))
        else:
            rows = pool.rows(command.remote_rows)
            local = block_rows(staged.rows, pool.form.layout.num_planes)
            self._start_or_report(_OpenRead(transport, command, POOL_REGION, rows, local, staged=staged, form=pool.form))

    def _num_staged_bytes(self, peer: PeerId) -> int:
        """Return how many bytes of the staging area a peer's open reads hold."""
        held = (read.staged for read in self._reads.values() if read.command.peer == peer)
        return sum(staged.num_bytes for staged in held if staged is not None)

    def _start_or_report(self, read: _OpenRead) -> None:
        event = self._start(read)
        if event is not None:
            self._report(event)

    def _start(self, read: _OpenRead) -> ReadEnded | None:
        """Post a read; returns its end if it could not be posted."""
        command = read.command
        try:
            read.handle = read.transport.post_read(command.peer, read.region, read.remote_rows, read.local_rows)
        except KVFerryError as error:
            return self._ended(read, error)
        self._reads[command.read_id] = read
        self._read_ids[read.transport.name, read.handle] = command.read_id
        return None

    def _ended(self, read: _OpenRead, error: KVFerryError | None, seals: bytes = b"") -> ReadEnded:
        """Return the event of a terminal read, after storing its results."""
        command = read.command
        try:
            if error is not None:
                return ReadEnded(command.read_id, error)
            if isinstance(command, PostSealRead):
                digests = tuple(self._digest_blocks(command.local_rows)) if command.wants_digests else ()
                return ReadEnded(command.read_id, seals=seals, digests=digests)
            return self._blocks_ended(command, read)
        except LayoutMismatch as mismatch:
            return ReadEnded(command.read_id, mismatch)
        finally:
            if read.staged is not None and self._staging is not None:
                self._staging.give_back(read.staged)

    def _blocks_ended(self, command: PostRead, read: _OpenRead) -> ReadEnded:
        """Convert the blocks in the staging area, unless their load has ended: our blocks may soon belong to others.

        Raises:
            LayoutMismatch: they cannot be converted into ours.
        """
        digests: tuple[int, ...] = ()
        if read.staged is not None and read.form is not None and self._staging is not None and not read.is_cancelled:
            digests = self._staging.digests(read.staged) if command.wants_digests else ()
            self._staging.convert(read.staged, command, read.form)
        return ReadEnded(command.read_id, digests=digests)


def _check_shape(transport: Transport, opened: OpenPeer) -> None:
    """Check that a peer's metadata and its handshake describe the same rows: by these it is decided where they land.

    Raises:
        ProtocolError: they do not; the message holds both values.
    """
    found, layout = transport.pool_shape(opened.peer), opened.layout
    expected = opened.num_blocks * layout.num_planes, layout.block_bytes // layout.num_planes
    if found is not None and found != expected:
        shapes = [f"{num_rows} rows of {row_bytes} bytes" for num_rows, row_bytes in (found, expected)]
        raise ProtocolError(f"{opened.peer.address} describes {shapes[0]}, and its pool has {shapes[1]}")


def _opening_error(command: OpenPeer, error: Exception) -> KVFerryError:
    """Return the error of a peer that could not be opened; an unexpected exception is logged with its origin."""
    if isinstance(error, KVFerryError):
        return error
    _log.error(event("kv_peer_not_opened", transport=command.transport, peer=command.peer.address), exc_info=error)
    return ProtocolError(
        f"the {command.transport} metadata of {command.peer.address} cannot be used: {type(error).__name__}: {error}"
    )
