"""Steps of tests in which the data path of a peer dies, and of its return."""

from __future__ import annotations

from connectors.p2p.actions import AskProgress, PeerProgress, ProbeEnded, StartProbe, TransferReport
from core.errors import PeerUnreachable
from core.wire.kv import Handshake


def tell_progress(pull, peer, *, has_advanced=False):
    return pull.take(pull.protocol.on_transfer(TransferReport(PeerProgress(peer, has_advanced), pull.now), pull.now))


def stall(pull, peer, *names):
    """Let the time pass in which no byte comes, though the peer answers."""
    for _ in range(2):
        assert AskProgress(peer) in pull.tick(2.5)
        pull.grant(60_000, *names)
        actions = tell_progress(pull, peer)
    return actions


def end_probe(pull, error=None):
    probe = pull.actions(StartProbe)[-1]
    return pull.take(pull.protocol.on_transfer(TransferReport(ProbeEnded(probe.probe_id, error), pull.now), pull.now))


def offered(pull):
    return pull.messages(Handshake)[-1].transports


def fall_back_to_tcp(pull, peer, request_id):
    """Start a load by shm; when it stalls, let it start over by tcp."""
    pull.start(request_id)
    pull.accept(transport="shm")
    pull.grant()
    stall(pull, peer)
    pull.end_reads(PeerUnreachable("closed"))
    pull.accept(transport="tcp")
