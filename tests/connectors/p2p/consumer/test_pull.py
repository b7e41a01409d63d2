"""The consumer's state machine: the good case, handshakes, restarted peers. Random histories: ``test_pull_properties``."""

import pytest

from connectors.p2p.actions import CloseControl, ClosePeer, OpenPeer, PeerFailed, PostRead, TransferReport
from connectors.p2p.transport.interface import PeerId
from connectors.reports import LoadEnded
from core.errors import ConnectorUnavailable, LayoutMismatch, PeerUnreachable, TransferError
from core.wire.kv import (
    ControlError,
    Handshake,
    HandshakeRefused,
    LeaseRelease,
    LeaseRenew,
)
from core.wire.messages import TransferUsage

ADDRESS = "tcp://10.0.0.1:5600"
OTHER = "tcp://10.0.0.2:5600"


# ---- the good case


def test_load_goes_from_question_to_blocks(pull, address, layout):
    first = pull.start(num_rows=1)
    assert [type(action.message) for action in first] == [LeaseRenew, Handshake]
    (opened,) = pull.accept()
    assert opened == OpenPeer(PeerId(address, 1), "tcp", b"metadata", 100_000, layout)
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


def test_handshake_names_the_reader_and_its_transports(pull, make_identity):
    pull.start()
    (handshake,) = pull.messages(Handshake)
    ours = make_identity()
    assert (handshake.engine_id, handshake.incarnation, handshake.host_id) == (ours.engine_id, ours.incarnation, ours.host_id)
    assert (handshake.layout, handshake.model_fingerprint) == (ours.layout, ours.model_fingerprint)
    assert handshake.transports == ("shm", "tcp")


def test_lease_may_be_confirmed_before_the_handshake(pull):
    pull.start()
    assert pull.grant() == []
    pull.accept()
    assert pull.actions(PostRead)


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


# ---- handshake


def test_many_waiting_loads_share_one_handshake(pull):
    for index in range(20):
        pull.start(f"r{index}", transfer_id=f"t{index}")
    assert len(pull.messages(Handshake)) == pull.protocol.counts.handshakes == 1
    pull.accept()
    pull.grant(60_000, *(f"t{index}" for index in range(20)))
    assert len(pull.actions(OpenPeer)) == 1
    assert all(pull.reads_of(f"r{index}") for index in range(20))


def test_open_peer_needs_no_second_handshake(pull):
    pull.start_reading("a")
    pull.end_reads()
    pull.start("b")
    assert len(pull.messages(Handshake)) == 1
    assert pull.reads_of("b")  # the lease of the same handoff is good still


def test_addresses_shake_hands_apart(pull):
    pull.start("a")
    pull.start("b", transfer_id="u", address=OTHER)
    assert len(pull.messages(Handshake)) == 2
    pull.accept(address=OTHER)
    pull.grant(60_000, "u", address=OTHER)
    assert pull.reads_of("b")
    assert not pull.reads_of("a")


def test_silent_peer_fails_all_waiting_loads_once_and_loses_its_connection(pull, address):
    pull.start("a")
    pull.start("b", transfer_id="u")
    assert pull.tick(4.5) == []
    actions = pull.tick(0.5)
    assert pull.failed == {"a": "peer_lost", "b": "peer_lost"}
    assert set(pull.ended) == {"a", "b"}
    assert CloseControl(address) in actions
    assert pull.protocol.counts.failed_handshakes == 1
    assert {type(action.message) for action in pull.tick(100)} == {LeaseRenew}


def test_lost_handshake_is_repeated_when_a_later_question_is_answered(pull):
    pull.start("a")
    pull.grant()  # asked for before the handshake: says nothing of it
    assert len(pull.messages(Handshake)) == 1
    pull.start("b", transfer_id="u")
    pull.grant(60_000, "u")
    pull.grant(60_000, "u")  # the repetition was asked after that question
    assert len(pull.messages(Handshake)) == pull.protocol.counts.handshakes == 2
    pull.accept()
    assert pull.reads_of("a")
    assert pull.reads_of("b")


def test_repeated_handshake_has_the_whole_time_again(pull):
    pull.start("a")
    pull.tick(4)
    pull.start("b", transfer_id="u")
    pull.grant(60_000, "u")
    pull.tick(4)
    assert pull.failed == {}
    pull.tick(1)
    assert pull.failed == {"a": "peer_lost", "b": "peer_lost"}


def test_a_load_that_comes_late_in_a_handshake_has_one_of_its_own(pull):
    pull.start("a")
    pull.tick(4)
    pull.start("b", transfer_id="u")
    pull.tick(1)
    assert pull.failed == {"a": "peer_lost"}
    assert len(pull.messages(Handshake)) == 2
    pull.accept()
    pull.grant(60_000, "u")
    assert pull.reads_of("b")


def test_loads_that_never_end_keep_no_handshake_open_forever(pull):
    for number in range(1, 11):
        pull.start(f"r{number}", transfer_id=f"t{number}")
        pull.tick(1)
    assert pull.failed.keys() == {f"r{number}" for number in range(1, 11)}
    assert pull.actions(CloseControl), "the next handshake has a connection of its own"


def test_load_after_a_failed_handshake_tries_again(pull):
    pull.start("a")
    pull.tick(5)
    pull.start("b", transfer_id="u")
    assert len(pull.messages(Handshake)) == 2
    pull.accept()
    pull.grant(60_000, "u")
    assert pull.reads_of("b")


def test_refusal_fails_waiting_loads_with_the_peers_words(pull, address):
    pull.start("a")
    pull.start("b", transfer_id="u")
    pull.receive(HandshakeRefused(engine_id="p", incarnation=1, code="layout", message="dtype float16 here, float32 there"))
    failures = pull.actions(LoadEnded)
    assert [failure.error.code for failure in failures] == ["layout", "layout"]
    assert failures[0].error.message == "dtype float16 here, float32 there"
    assert {failure.peer for failure in failures} == {address}
    assert set(pull.ended) == {"a", "b"}


def test_reply_of_another_model_is_not_believed(pull):
    pull.start()
    pull.accept(model_fingerprint=b"another")
    assert pull.failed == {"r": "layout"}
    assert not pull.open_peers


def test_transport_that_was_not_offered_is_not_used(pull):
    pull.start()
    pull.accept(transport="driver pigeon")
    assert pull.failed == {"r": "protocol_error"}
    assert not pull.open_peers


def test_late_reply_opens_nothing(pull):
    pull.start()
    pull.tick(5)
    assert pull.accept() == []
    assert pull.protocol.counts.unexpected_messages == 1


def test_second_reply_opens_nothing(pull):
    pull.start()
    pull.accept()
    assert pull.accept() == []
    assert pull.protocol.counts.unexpected_messages == 1


def cannot_open(pull, transport, error=None, *, incarnation=1, address=ADDRESS):
    """Let the handshake choose a transport by which the peer cannot be opened."""
    pull.accept(transport=transport, incarnation=incarnation, address=address)
    failed = PeerFailed(PeerId(address, incarnation), error or PeerUnreachable("denied"), transport)
    return pull.take(pull.protocol.on_transfer(TransferReport(failed, pull.now), pull.now))


def offered(pull):
    return pull.messages(Handshake)[-1].transports


def test_peer_that_can_be_opened_by_no_transport_fails_its_loads(pull):
    pull.start()
    cannot_open(pull, "shm")
    assert not pull.ended
    cannot_open(pull, "tcp", LayoutMismatch("rows differ"))
    assert pull.failed == {"r": "layout"}


def test_transport_that_could_not_be_opened_is_tried_again_if_no_other_is_common(pull):
    pull.start("first")
    cannot_open(pull, "shm")
    code = ConnectorUnavailable.code
    pull.receive(HandshakeRefused(engine_id="prefill-0", incarnation=1, code=code, message="no common transport"))
    assert pull.failed == {"first": "peer_lost"}
    assert "shm: denied" in pull.ended["first"].error.message
    pull.start("second")
    assert offered(pull) == ("shm",)
    pull.accept(transport="shm")
    pull.grant(60_000)
    pull.end_reads()
    assert list(pull.failed) == ["first"]


def test_load_that_waits_goes_over_to_the_next_transport(pull):
    pull.start()
    pull.start("second", transfer_id="t2")
    cannot_open(pull, "shm")
    assert offered(pull) == ("tcp",)
    assert len(pull.messages(Handshake)) == 2, "one more, for all who wait"
    pull.accept()
    pull.grant(60_000, "t", "t2")
    pull.end_reads()
    assert not pull.failed
    assert pull.usable_rows("r") | pull.usable_rows("second") == set(range(6))
    assert pull.ended["r"].usage.transport == "tcp"


def test_reads_that_were_posted_in_vain_are_posted_again_once_they_have_ended(pull, address):
    pull.hold()
    pull.grant()
    pull.start()
    opened, *posted = pull.accept(transport="shm")
    cannot_be_opened = PeerFailed(opened.peer, PeerUnreachable("denied"), "shm")
    pull.take(pull.protocol.on_transfer(TransferReport(cannot_be_opened, pull.now), pull.now))
    assert [type(action) for action in pull.accept()] == [OpenPeer], "a read that has not ended may still write"
    ended = [pull.end_read(read.read_id, PeerUnreachable(f"{address} is not open")) for read in posted]
    assert ended[:-1] == [[]] * (len(posted) - 1)
    assert [action.local_rows for action in ended[-1]] == [read.local_rows for read in posted]
    pull.end_reads()
    assert pull.usable_rows("r") == {0, 1, 2}


def test_load_that_ends_with_open_failed_reads_quarantines_their_blocks(pull, address):
    pull.hold()
    pull.grant()
    pull.start()
    opened, *posted = pull.accept(transport="shm")
    pull.take(
        pull.protocol.on_transfer(TransferReport(PeerFailed(opened.peer, PeerUnreachable("denied"), "shm"), pull.now), pull.now)
    )
    pull.abort()
    assert pull.ended["r"].quarantined_block_ids == (0, 1, 2)
    for read in posted:
        pull.end_read(read.read_id, PeerUnreachable(f"{address} is not open"))
    assert not pull.quarantined


def test_load_that_has_got_something_does_not_start_over(pull, address):
    pull.start_reading(num_rows=3)
    seal_read = pull.end_data_reads()
    pull.take(
        pull.protocol.on_transfer(
            TransferReport(PeerFailed(PeerId(address, 1), PeerUnreachable("denied"), "tcp"), pull.now), pull.now
        )
    )
    assert pull.failed == {"r": "peer_lost"}
    pull.end_read(seal_read, PeerUnreachable("gone"))


def test_transport_that_failed_is_not_used_though_the_peer_insists_on_it(pull):
    pull.start()
    cannot_open(pull, "shm")
    pull.accept(transport="shm")
    assert (pull.failed, len(pull.messages(Handshake))) == ({}, 2)
    pull.tick(5)
    assert pull.failed == {"r": "peer_lost"}


def test_transport_that_failed_for_an_incarnation_is_used_if_offered_to_another(pull):
    """It fails again, and the next one is offered."""
    pull.start("next life", transfer_id="t2", incarnation=2)
    cannot_open(pull, "shm", incarnation=2)
    pull.accept(transport="tcp", incarnation=2)
    pull.disconnect()
    pull.start("late", incarnation=1)
    assert offered(pull) == ("shm", "tcp")
    pull.start("new", transfer_id="t3", incarnation=2)
    cannot_open(pull, "shm", incarnation=2)
    assert "new" not in pull.ended
    assert offered(pull) == ("tcp",)


def test_failed_transport_is_not_offered_to_the_peer_again_if_another_is_left(pull):
    pull.start("first")
    assert offered(pull) == ("shm", "tcp")
    cannot_open(pull, "shm")
    assert offered(pull) == ("tcp",)
    cannot_open(pull, "tcp")
    pull.start("none is left")
    assert offered(pull) == ("shm", "tcp")
    cannot_open(pull, "shm")
    pull.start("elsewhere", address=OTHER)
    assert offered(pull) == ("shm", "tcp")
    pull.disconnect()
    pull.start("next life", transfer_id="t2", incarnation=2)
    cannot_open(pull, "tcp", incarnation=2)
    assert offered(pull) == ("shm",)


def test_second_answer_to_an_earlier_handshake_is_not_taken_for_this_one(pull):
    pull.start()
    cannot_open(pull, "shm")
    assert offered(pull) == ("tcp",)
    pull.accept(transport="shm")
    assert (pull.failed, pull.protocol.counts.unexpected_messages) == ({}, 1)
    pull.accept(transport="tcp")
    pull.grant()
    assert pull.reads_of("r")


def test_answer_by_a_transport_that_was_never_offered_ends_the_load(pull):
    pull.start()
    pull.accept(transport="nixl")
    assert pull.failed == {"r": "protocol_error"}


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


def test_refused_connection_fails_loads_that_wait_for_the_handshake(pull, address):
    pull.start()
    actions = pull.disconnect()
    assert pull.failed == {"r": "peer_lost"}
    assert CloseControl(address) in actions
    assert pull.protocol.counts.failed_handshakes == 1
    assert not pull.open_peers


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


def test_readers_demand_is_refused_by_itself_where_the_owner_did_not(make_pull):
    pull = make_pull(kv_verify="digest")
    pull.start()
    pull.accept(has_digests=False)
    assert pull.failed == {"r": "connector_unavailable"}
    assert "kv_verify = digest" in pull.ended["r"].error.message
    assert not pull.open_peers


def test_handshake_says_what_is_verified(make_pull):
    pull = make_pull(kv_verify="digest")
    pull.start()
    assert pull.messages(Handshake)[0].kv_verify == "digest"
