"""The consumer's state machine where the data path of a peer is dead and its control connection is not."""

import pytest

from connectors.p2p.actions import (
    AskProgress,
    ClosePeer,
    OpenPeer,
    StartProbe,
    TransportBroken,
    TransportRestored,
)
from connectors.p2p.producer.handshake import UNKNOWN_CODE
from connectors.p2p.transport.interface import PeerId
from core.errors import ConnectorUnavailable, LeaseExpired, PeerUnreachable
from core.wire.kv import ControlError, Handshake, HandshakeRefused, LeaseRenew, LeaseState, kind_of
from tests.connectors.p2p.consumer.transport_steps import end_probe, fall_back_to_tcp, offered, stall, tell_progress


@pytest.fixture
def peer(address):
    return PeerId(address, 1)


def refuse(pull, code=ConnectorUnavailable.code):
    return pull.receive(HandshakeRefused(engine_id="prefill-0", incarnation=1, code=code, message="no common transport"))


def break_all(pull, peer):
    """Load by tcp until it is broken; the owner has nothing else."""
    pull.start_reading("first")
    stall(pull, peer)
    refuse(pull)
    pull.end_reads(PeerUnreachable("closed"))


def test_load_goes_over_when_nothing_comes_by_its_transport(pull, peer):
    pull.start_reading()
    actions = stall(pull, peer)
    assert ClosePeer(peer) in actions, "late bytes of the old transport are fenced"
    assert offered(pull) == ("shm",)
    pull.end_reads(PeerUnreachable("closed"))
    pull.accept(transport="shm")
    pull.grant()
    pull.end_reads()
    assert not pull.failed
    assert pull.ended["r"].usage.transport == "shm"
    (told,) = pull.actions(TransportBroken)
    assert (told.peer, told.transport) == (peer, "tcp")
    assert "no byte came" in told.reason


def test_new_transport_is_not_read_into_blocks_that_the_old_one_may_write(pull, peer):
    pull.start_reading()
    stall(pull, peer)
    old = dict(pull.open_reads)
    pull.accept(transport="shm")
    pull.grant()
    assert pull.open_reads == old, "the reads of the old transport are not terminal"
    for read_id in sorted(old):
        pull.end_read(read_id, PeerUnreachable("closed"))
    assert pull.open_reads
    pull.end_reads()
    assert pull.ended["r"].error is None


def test_load_that_has_got_blocks_fails_when_its_transport_stalls(pull, peer):
    pull.start_reading(num_rows=4)
    pull.end_read(min(pull.open_reads))
    stall(pull, peer)
    assert pull.failed == {"r": "deadline"}
    assert pull.now < 1030.0


def test_peer_of_silent_reads_is_asked_for_an_answer(pull, peer):
    pull.start_reading()
    num_questions = len(pull.messages(LeaseRenew))
    pull.tick(2.5)
    assert len(pull.messages(LeaseRenew)) == num_questions + 1


def test_slow_peer_keeps_its_transport(pull, peer):
    pull.start_reading()
    for _ in range(5):
        pull.tick(2.5)
        pull.grant()
        tell_progress(pull, peer)
        pull.tick(2.5)
        tell_progress(pull, peer, has_advanced=True)
    assert pull.open_peers == {peer}
    assert not pull.actions(TransportBroken)


def test_peer_that_does_not_answer_either_is_not_abandoned_early(pull, peer):
    pull.start_reading()
    for _ in range(11):
        pull.tick(2.5)
        tell_progress(pull, peer)
    assert not pull.ended
    pull.tick(2.5)
    assert pull.failed == {"r": "deadline"}


def test_deadline_of_a_silent_peer_breaks_its_transport(pull, peer):
    pull.start_reading("first")
    pull.tick(30)
    assert pull.failed == {"first": "deadline"}
    pull.start("second")
    assert offered(pull) == ("shm",)


def test_deadline_of_a_load_that_was_slow_breaks_no_transport(pull, peer):
    pull.start_reading(num_rows=4)
    pull.tick(10)
    pull.end_read(min(pull.open_reads))
    pull.grant()
    pull.tick(20)
    assert pull.failed == {"r": "deadline"}
    assert not pull.actions(TransportBroken)


def test_deadline_of_a_load_without_a_read_breaks_no_transport(pull):
    pull.start()
    pull.accept()
    pull.tick(30)
    assert pull.failed == {"r": "deadline"}
    assert not pull.actions(TransportBroken)


def test_reads_that_end_in_time_keep_their_transport(pull, peer):
    pull.start_reading(num_rows=12)
    for _ in range(4):
        pull.tick(2.4)
        pull.end_read(min(pull.open_reads))
        pull.grant()
    assert not pull.actions(AskProgress)


def test_progress_is_asked_for_again_after_a_change_of_transport(pull, peer):
    pull.start_reading("first")
    pull.tick(2.5)
    tell_progress(pull, peer, has_advanced=None)
    pull.tick(27.5)
    pull.end_reads(PeerUnreachable("closed"))
    num_asked = len(pull.actions(AskProgress))
    pull.start("second")
    pull.accept(transport="shm")
    pull.grant()
    pull.tick(2.5)
    assert len(pull.actions(AskProgress)) == num_asked + 1


def test_own_hurry_of_a_request_breaks_no_transport(pull, peer):
    pull.start(deadline=pull.now + 2.0)
    pull.accept()
    pull.grant()
    pull.tick(2.0)
    assert pull.failed == {"r": "deadline"}
    assert not pull.actions(TransportBroken)


def test_read_failures_in_a_row_break_the_transport(pull, peer):
    for number in range(3):
        assert not pull.actions(TransportBroken)
        pull.start_reading(f"r{number}")
        pull.end_read(min(pull.open_reads), PeerUnreachable("reset"))
        pull.end_reads(PeerUnreachable("closed"))
    assert [told.reason for told in pull.actions(TransportBroken)] == ["reset"]
    pull.start("next")
    assert offered(pull) == ("shm",)


def test_loaded_handoff_between_failures_keeps_the_transport(pull, peer):
    for number in range(4):
        pull.start_reading(f"bad{number}")
        pull.end_read(min(pull.open_reads), PeerUnreachable("reset"))
        pull.end_reads(PeerUnreachable("closed"))
        pull.start_reading(f"good{number}")
        pull.end_reads()
    assert not pull.actions(TransportBroken)


def test_loads_of_nothing_between_failures_do_not_keep_the_transport(pull, peer):
    for number in range(3):
        pull.start_reading(f"bad{number}")
        pull.end_read(min(pull.open_reads), PeerUnreachable("reset"))
        pull.end_reads(PeerUnreachable("closed"))
        pull.start(f"expired{number}", transfer_id=f"t{number}")
        if number < 2:
            pull.accept()
            pull.receive(LeaseState(incarnation=1, left_ms={f"t{number}": 0}, number=pull.messages(LeaseRenew)[-1].number))
            assert pull.failed[f"expired{number}"] == LeaseExpired.code
    assert pull.actions(TransportBroken)


def test_owner_without_a_common_transport_is_asked_again_for_each_load(pull):
    for number in range(2):
        pull.start(f"r{number}")
        refuse(pull)
    assert len(pull.messages(Handshake)) == 2
    assert offered(pull) == ("shm", "tcp")


def test_loads_are_refused_at_once_while_no_transport_works(pull, peer):
    break_all(pull, peer)
    num_handshakes = len(pull.messages(Handshake))
    pull.start("second")
    assert pull.failed["second"] == "peer_lost"
    assert "no byte came" in pull.ended["second"].error.message
    assert len(pull.messages(Handshake)) == num_handshakes
    assert pull.protocol.counts.loads_without_transport == 1


def test_refusal_for_another_reason_takes_no_transport_away(pull, peer):
    pull.start_reading("first")
    stall(pull, peer)
    refuse(pull, UNKNOWN_CODE)
    num_handshakes = len(pull.messages(Handshake))
    pull.start("second")
    assert len(pull.messages(Handshake)) == num_handshakes + 1
    assert offered(pull) == ("shm",)


def test_probe_brings_a_broken_transport_back(pull, peer):
    break_all(pull, peer)
    pull.tick(1.0)
    end_probe(pull)
    assert [told.transport for told in pull.actions(TransportRestored)] == ["tcp"]
    pull.start("second")
    assert offered(pull) == ("tcp",), "the owner has no other"
    pull.accept()
    pull.end_reads()
    assert pull.ended["second"].error is None


def test_preferred_transport_is_used_again_when_it_works(pull, peer):
    fall_back_to_tcp(pull, peer, "second")
    pull.tick(1.0)
    actions = end_probe(pull)
    assert ClosePeer(peer) not in actions, "a load is using the other one"
    pull.start("third")
    assert not pull.reads_of("third"), "it waits until that is over"
    pull.end_reads()
    assert pull.ended["second"].usage.transport == "tcp"
    assert offered(pull) == ("shm", "tcp")
    pull.accept(transport="shm")
    pull.end_reads()
    assert pull.ended["third"].usage.transport == "shm"
    assert [opened.transport for opened in pull.actions(OpenPeer)][-3:] == ["shm", "tcp", "shm"]


def test_loads_that_wait_for_a_better_transport_outlive_the_loss_of_the_other(pull, peer):
    fall_back_to_tcp(pull, peer, "first")
    pull.tick(1.0)
    end_probe(pull)
    pull.start("second")
    pull.end_read(min(pull.open_reads), PeerUnreachable("reset"))
    assert pull.failed == {"first": "peer_lost"}
    pull.end_reads(PeerUnreachable("closed"))
    assert offered(pull) == ("shm", "tcp")
    pull.accept(transport="shm")
    pull.end_reads()
    assert pull.ended["second"].error is None


def wait_for_retirement(pull, peer):
    """Let a load by tcp go on while shm works again, let ``b`` wait for its end, and ask for the handoff of another process."""
    fall_back_to_tcp(pull, peer, "a")
    pull.tick(1.0)
    end_probe(pull)
    pull.start("b")
    pull.start("old", transfer_id="o", incarnation=7)


def test_load_that_waits_for_a_retiring_peer_outlives_an_unanswered_handshake(pull, peer):
    wait_for_retirement(pull, peer)
    pull.tick(5.0)
    assert pull.failed == {"old": "peer_lost"}


def test_load_that_waits_for_a_retiring_peer_outlives_a_refused_handshake(pull, peer):
    wait_for_retirement(pull, peer)
    pull.receive(ControlError(code=UNKNOWN_CODE, message="what?", kind=kind_of(Handshake)))
    assert pull.failed.keys() == {"old"}


def test_answer_to_another_handshake_starts_no_load_on_a_retiring_peer(pull, peer):
    wait_for_retirement(pull, peer)
    pull.accept(transport="tcp")
    pull.accept(transport="shm")
    assert pull.failed.keys() == {"old"}
    assert not pull.reads_of("b")
    pull.end_reads()
    assert offered(pull) == ("shm", "tcp")
    pull.accept(transport="shm")
    pull.end_reads()
    assert pull.ended["b"].usage.transport == "shm"


def test_abort_of_the_last_load_lets_the_others_continue(pull, peer):
    fall_back_to_tcp(pull, peer, "first")
    pull.tick(1.0)
    end_probe(pull)
    pull.start("second")
    pull.abort("first")
    assert offered(pull) == ("shm", "tcp")


def test_idle_peer_goes_back_to_the_better_transport_at_once(pull, peer):
    fall_back_to_tcp(pull, peer, "first")
    pull.end_reads()
    pull.tick(1.0)
    assert ClosePeer(peer) in end_probe(pull)
    pull.start("second")
    assert offered(pull) == ("shm", "tcp")


def test_probe_of_a_worse_transport_changes_nothing(pull, peer):
    pull.start_reading("first")
    stall(pull, peer)
    pull.end_reads(PeerUnreachable("closed"))
    pull.accept(transport="shm")
    pull.tick(1.0)
    assert end_probe(pull)
    assert pull.open_peers == {peer}
    pull.end_reads()
    assert pull.ended["first"].usage.transport == "shm"


def test_lost_control_connection_forgets_what_was_broken(pull, peer):
    break_all(pull, peer)
    pull.disconnect()
    pull.start("second")
    assert offered(pull) == ("tcp",)


def test_restarted_peer_is_read_by_every_transport(pull, peer):
    break_all(pull, peer)
    pull.start("second", incarnation=2, transfer_id="t2")
    assert offered(pull) == ("shm", "tcp")
    pull.accept(incarnation=2, transport="shm")
    assert pull.protocol.peers.health.num_broken() == {}
    pull.tick(1.0)
    assert not pull.actions(StartProbe), "the dead incarnation is not probed"


def break_shm(pull, peer):
    """Let a load that has got something stall by shm: nobody waits for another transport."""
    pull.start("first", num_rows=4)
    pull.accept(transport="shm")
    pull.grant()
    pull.end_read(min(pull.open_reads))
    stall(pull, peer)
    pull.end_reads(PeerUnreachable("closed"))


def test_stale_handoff_does_not_open_its_successor_by_a_broken_transport(pull, peer):
    break_shm(pull, peer)
    pull.start("old", transfer_id="o", incarnation=7)
    pull.accept(transport="shm")  # the present process: asked again over another connection
    pull.accept(transport="shm")
    assert pull.failed == {"first": "deadline", "old": "stale"}
    assert not pull.open_peers
    pull.tick(1.0)
    assert pull.actions(StartProbe), "of a peer that is not open"
    end_probe(pull)
    pull.start("next")
    pull.accept(transport="shm")
    pull.grant()
    pull.end_reads()
    assert pull.ended["next"].usage.transport == "shm"


def test_load_behind_a_stale_handoff_shakes_hands_without_the_broken_transport(pull, peer):
    break_shm(pull, peer)
    pull.start("old", transfer_id="o", incarnation=7)
    pull.start("next")
    assert offered(pull) == ("shm", "tcp")
    pull.accept(transport="shm")
    pull.accept(transport="shm")
    assert not pull.open_peers
    assert offered(pull) == ("tcp",)
    pull.accept(transport="tcp")
    pull.grant()
    pull.end_reads()
    assert pull.ended["next"].usage.transport == "tcp"
    assert pull.ended["next"].error is None


def test_load_with_open_reads_is_not_begun_when_a_replaced_process_is_left(pull, peer):
    pull.start_reading(num_rows=6)  # two reads of two rows are in flight, the other rows wait
    stall(pull, peer)
    old = dict(pull.open_reads)
    pull.accept(transport="shm")
    pull.start("old", transfer_id="o", incarnation=7)
    pull.grant()
    assert pull.open_reads == old, "the reads of the old transport are not terminal"
    for read_id in sorted(old):
        pull.end_read(read_id, PeerUnreachable("closed"))
    assert pull.open_peers == {peer}
    pull.grant()
    pull.end_reads()
    assert pull.ended["r"].error is None
    assert pull.ended["r"].usage.transport == "shm"
