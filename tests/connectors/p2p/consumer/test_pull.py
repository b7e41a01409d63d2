"""The consumer's state machine: the good case and restarted peers. Random histories: ``test_pull_properties``."""

import pytest

from connectors.p2p.actions import CloseControl, ClosePeer, OpenPeer, PostRead
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable, TransferError
from core.wire.kv import ControlError, Handshake, LeaseRelease, LeaseRenew
from core.wire.messages import TransferUsage

OTHER = "tcp://10.0.0.2:5600"


# ---- the good case


def test_load_goes_from_question_to_blocks(pull, address, layout):
    first = pull.start(num_rows=1)
    assert [type(action.message) for action in first] == [LeaseRenew, Handshake]
    (opened,) = pull.accept()
    assert opened == OpenPeer(PeerId(address, 1), "tcp", b"metadata", 100_000, layout, number=1)
    read, seals = pull.grant()
    assert (read.peer, read.remote_rows, read.local_rows) == (PeerId(address, 1), (500,), (0,))
    assert (seals.peer, seals.remote_rows, seals.local_rows) == (PeerId(address, 1), (500,), (0,))
    assert seals.after == (read.read_id,)
    pull.clock.advance(0.25)
    assert pull.end_read(read.read_id) == []
    pull.clock.advance(0.125)
    (ended,) = pull.end_read(seals.read_id)
    assert (ended.request_id, ended.error, ended.invalid_block_ids, ended.quarantined_block_ids) == ("r", None, (), ())
    assert ended.usage == TransferUsage(
        transport="tcp",
        transferred_tokens=32,
        transferred_bytes=1024,
        transfer_ms=250.0,
        verify_ms=125.0,
        verified_blocks=1,
    )
    assert pull.protocol.num_loading_blocks == 0


def test_verification_time_starts_when_the_last_byte_is_reported(pull):
    begun_at = pull.now
    pull.start_reading(num_rows=1)
    pull.clock.advance(2.0)
    pull.end_read(min(pull.open_reads), at=begun_at + 0.5)
    pull.end_reads()
    usage = pull.ended["r"].usage
    assert (usage.transfer_ms, usage.verify_ms) == (500.0, 1500.0)


def test_lease_may_be_confirmed_before_the_handshake(pull):
    pull.start()
    assert pull.grant() == []
    pull.accept()
    assert pull.actions(PostRead)


def test_blocks_without_a_lease_are_read_without_a_question(pull):
    """As those of a prompt that is still computed: their seals alone tell whether they were kept."""
    (first,) = pull.start(is_leased=False)
    assert isinstance(first.message, Handshake)
    pull.accept()
    pull.end_reads()
    assert pull.usable_rows("r") == {0, 1, 2}
    assert pull.messages(LeaseRenew) == []


def test_load_without_rows_succeeds_at_once(pull):
    pull.start(num_rows=0)
    pull.accept()
    pull.grant()
    assert pull.ended["r"].usage is not None


def test_gauges_count_what_may_still_be_written(make_pull):
    pull = make_pull(rows_per_read=2, max_reads_in_flight=1)
    pull.start("a", 3)
    pull.start("b", 2)
    assert pull.protocol.num_loading_blocks == 5
    pull.accept()
    pull.grant()
    pull.abort("a")
    assert (pull.protocol.num_loading_blocks, pull.protocol.num_quarantined_blocks) == (2, 2)
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id, TransferError("cancelled"))
    assert (pull.protocol.num_loading_blocks, pull.protocol.num_quarantined_blocks) == (2, 0)


@pytest.mark.parametrize(
    "message",
    [LeaseRenew(transfer_ids=("t",)), LeaseRelease(transfer_ids=("t",)), ControlError(code="x", message="out of the blue")],
)
def test_message_that_makes_no_sense_here_is_counted(pull, message):
    assert pull.receive(message) == []
    assert pull.protocol.counts.unexpected_messages == 1


# ---- another incarnation at the same address


def test_restarted_peer_fails_old_loads_and_shakes_hands_once_for_new_ones(pull, address):
    pull.start_reading("old")
    pull.disconnect()
    assert pull.failed == {"old": "peer_lost"}
    assert ClosePeer(PeerId(address, 1)) in pull.log
    pull.end_reads(PeerUnreachable("closed"))
    for index in range(3):
        pull.start(f"new{index}", transfer_id=f"u{index}", incarnation=2)
    assert len(pull.messages(Handshake)) == 2
    pull.accept(incarnation=2)
    pull.grant(60_000, "u0", "u1", "u2", incarnation=2)
    pull.end_reads()
    assert all(pull.ended[f"new{index}"].usage for index in range(3))
    assert pull.open_peers == {PeerId(address, 2)}


def test_handoff_of_a_dead_incarnation_is_refused_by_the_reply(pull, address):
    pull.start("old", transfer_id="old", incarnation=1)
    pull.start("new", transfer_id="new", incarnation=2)
    pull.accept(incarnation=2)
    assert pull.failed == {"old": "stale"}
    message = pull.ended["old"].error.message
    assert f"{1:016x}" in message
    assert f"{2:016x}" in message
    pull.grant(60_000, "new", incarnation=2)
    assert pull.reads_of("new")
    assert pull.open_peers == {PeerId(address, 2)}


def test_lease_answer_of_another_incarnation_fences_the_old_one(pull, address):
    pull.start_reading()
    actions = pull.grant(0, incarnation=2)
    assert ClosePeer(PeerId(address, 1)) in actions
    assert pull.failed == {"r": "stale"}
    assert pull.quarantined == {0, 1, 2}
    pull.end_reads(PeerUnreachable("closed"))
    assert not pull.quarantined


def test_lost_connection_leaves_other_peers_alone(pull, address):
    pull.start_reading("a")
    pull.start("b", transfer_id="u", address=OTHER)
    pull.accept(address=OTHER)
    pull.grant(60_000, "u", address=OTHER)
    pull.disconnect(OTHER)
    assert pull.failed == {"b": "peer_lost"}
    assert pull.open_peers == {PeerId(address, 1)}
    for read_id in pull.reads_of("a"):
        pull.end_read(read_id)


def test_load_from_a_new_incarnation_on_an_old_connection_makes_a_new_handshake(pull, address):
    """The reader has not noticed that the old process is gone; the message to the new one goes down with its connection."""
    pull.start_reading("old")
    pull.start("new", transfer_id="new", incarnation=2)
    assert len(pull.messages(Handshake)) == 2
    actions = pull.disconnect()
    assert pull.failed == {"old": "peer_lost"}
    assert actions.index(CloseControl(address)) < next(
        index for index, action in enumerate(actions) if isinstance(getattr(action, "message", None), Handshake)
    )
    pull.accept(incarnation=2)
    pull.grant(60_000, "new", incarnation=2)
    for read_id in pull.reads_of("old"):
        pull.end_read(read_id, PeerUnreachable("closed"))
    pull.end_reads()
    assert pull.ended["new"].error is None


def test_second_refused_connection_ends_the_load_of_the_next_incarnation_too(pull):
    pull.start_reading("old")
    pull.start("new", transfer_id="new", incarnation=2)
    pull.disconnect()
    pull.disconnect()
    assert pull.failed == {"old": "peer_lost", "new": "peer_lost"}
