"""The handshakes of waiting loads: shared, repeated, refused, and the transports that they offer."""

from connectors.p2p.actions import CloseControl, HandshakeUnsent, OpenPeer
from connectors.reports import LoadEnded
from core.errors import ConnectorUnavailable, LayoutMismatch, PeerUnreachable
from core.wire.kv import Handshake, HandshakeRefused, LeaseRenew

ADDRESS = "tcp://10.0.0.1:5600"
OTHER = "tcp://10.0.0.2:5600"


def test_handshake_names_the_reader_and_its_transports(pull, make_identity):
    pull.start()
    (handshake,) = pull.messages(Handshake)
    ours = make_identity()
    assert (handshake.engine_id, handshake.incarnation, handshake.host_id) == (ours.engine_id, ours.incarnation, ours.host_id)
    assert (handshake.layout, handshake.model_fingerprint) == (ours.layout, ours.model_fingerprint)
    assert handshake.transports == ("shm", "tcp")


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


def cannot_send(pull, message, address):
    """Let a handshake stay unsent."""
    return pull.take(pull.protocol.on_unsent(HandshakeUnsent(address, message, "Too many open files"), pull.now))


def test_handshake_that_was_not_sent_fails_all_waiting_loads_at_once(pull, address):
    pull.start("a")
    pull.start("b", transfer_id="u")
    pull.start("c", transfer_id="v", address=OTHER)
    cannot_send(pull, pull.messages(Handshake)[0], address)
    assert pull.failed == {"a": "peer_lost", "b": "peer_lost"}
    assert pull.ended["a"].error.message == f"the handshake with {address} could not be sent: Too many open files"
    assert pull.protocol.counts.failed_handshakes == 1
    pull.start("d", transfer_id="w")
    assert len(pull.messages(Handshake)) == 3
    pull.accept()
    pull.grant(60_000, "w")
    assert pull.reads_of("d")


def test_handshake_that_was_sent_again_or_answered_is_not_given_up_as_unsent(pull, address):
    pull.start()
    (unsent,) = pull.messages(Handshake)
    pull.disconnect()
    pull.start("b", transfer_id="u")
    for _ in range(2):
        assert cannot_send(pull, unsent, address) == []
        pull.accept()
    pull.grant(60_000, "u")
    assert pull.reads_of("b")


def test_handshake_that_was_not_sent_leaves_open_peers_their_connection(pull, address):
    pull.start_reading("a")
    pull.start("b", incarnation=2)
    assert CloseControl(address) not in cannot_send(pull, pull.messages(Handshake)[-1], address)
    assert pull.failed == {"b": "peer_lost"}
    pull.end_reads()
    assert pull.ended["a"].error is None


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
    return pull.fail_to_open(error=error)


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
    pull.fail_to_open(opened)
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
    pull.fail_to_open(opened)
    pull.abort()
    assert pull.ended["r"].quarantined_block_ids == (0, 1, 2)
    for read in posted:
        pull.end_read(read.read_id, PeerUnreachable(f"{address} is not open"))
    assert not pull.quarantined


def test_load_that_has_got_something_does_not_start_over(pull):
    pull.start_reading(num_rows=3)
    seal_read = pull.end_data_reads()
    pull.fail_to_open()
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


def test_refused_connection_fails_loads_that_wait_for_the_handshake(pull, address):
    pull.start()
    actions = pull.disconnect()
    assert pull.failed == {"r": "peer_lost"}
    assert CloseControl(address) in actions
    assert pull.protocol.counts.failed_handshakes == 1
    assert not pull.open_peers


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
