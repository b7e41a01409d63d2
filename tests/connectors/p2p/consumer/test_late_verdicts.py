"""The verdict about a transport whose loads have ended before it had its time: by their late reads, for it alone."""

from __future__ import annotations

import pytest

from connectors.p2p.actions import TransportBroken
from connectors.p2p.transport.interface import PeerId
from core.errors import PeerUnreachable
from tests.connectors.p2p.consumer.transport_steps import end_probe, fall_back_to_tcp, offered, tell_progress


@pytest.fixture
def peer(address):
    return PeerId(address, 1)


def restore_shm_for_a_waiting_load(pull, peer):
    """Let ``b`` wait for the end of a slow load by tcp, and be read by shm, which works again, from now on."""
    fall_back_to_tcp(pull, peer, "a")
    pull.tick(1.0)
    end_probe(pull)
    pull.start("b", transfer_id="u")
    while "a" not in pull.ended:  # slow, not dead
        pull.tick(2.0)
        tell_progress(pull, peer, has_advanced=True)
        pull.grant(60_000, "t", "u")
    pull.end_reads(PeerUnreachable("closed"))
    pull.tick(0.25)
    pull.accept(transport="shm")
    pull.grant(60_000, "u")
    assert pull.reads_of("b")


def let_pass(pull, peer, seconds):
    """Let time pass by a transport that counts no bytes, as shm and nixl, while the peer holds its leases."""
    for _ in range(int(2 * seconds)):
        pull.tick(0.5)
        if peer in pull.open_peers:
            tell_progress(pull, peer, has_advanced=None)
            pull.grant(60_000, "t", "u", "v")


def test_wait_for_other_loads_does_not_count_against_the_restored_transport(pull, peer):
    restore_shm_for_a_waiting_load(pull, peer)
    pull.tick(6.0)
    assert pull.failed == {"a": "deadline", "b": "deadline"}
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm"], "for the stall before, not once more"
    assert pull.open_peers == {peer}


def test_restored_transport_without_blocks_is_broken_by_late_reads(pull, peer):
    restore_shm_for_a_waiting_load(pull, peer)
    let_pass(pull, peer, 1.0)
    pull.start("c", transfer_id="v")
    let_pass(pull, peer, 28.5)
    assert pull.open_peers == {peer}
    num_fenced = pull.protocol.counts.fenced_peers
    let_pass(pull, peer, 0.5)
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm", "shm"]
    assert pull.protocol.counts.fenced_peers == num_fenced + 1
    assert offered(pull) == ("tcp",)
    pull.end_reads(PeerUnreachable("closed"))
    pull.accept(transport="tcp")
    pull.grant(60_000, "v")
    pull.end_reads()
    assert pull.ended["c"].error is None


def test_late_reads_of_a_slow_transport_do_not_break_it(pull, peer):
    restore_shm_for_a_waiting_load(pull, peer)
    pull.start("c", transfer_id="v")
    let_pass(pull, peer, 10.0)
    assert "b" in pull.failed
    pull.end_read(min(pull.reads_of("c")))
    let_pass(pull, peer, 25.0)
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm"], "for the stall before, not once more"


@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_loads_that_end_early_break_a_dead_transport_by_late_reads(pull, peer, end):
    pull.start("hurried", deadline=pull.now + 10.0)
    pull.tick(0.25)
    pull.accept(transport="shm")
    pull.grant()
    let_pass(pull, peer, 5.0)
    if end == "abort":
        pull.abort("hurried")
    let_pass(pull, peer, 5.0)
    pull.start("next")
    let_pass(pull, peer, 20.0)
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm"]
    assert offered(pull) == ("tcp",)
    assert "next" not in pull.failed


def end_by_dead_shm(pull, peer):
    """Let ``a`` end after 30 s in which shm has brought nothing; ``b`` began 20 ms after it."""
    began = pull.now
    pull.start("a")
    pull.accept(transport="shm")
    pull.grant()
    pull.tick(0.02)
    pull.start("b")
    let_pass(pull, peer, 29.5)
    pull.tick(began + 30 - pull.now)


def test_time_by_a_dead_transport_does_not_count_against_the_next_one(pull, peer):
    end_by_dead_shm(pull, peer)
    assert pull.failed == {"a": "deadline"}
    pull.end_reads(PeerUnreachable("closed"))
    pull.accept(transport="tcp")
    pull.grant()
    assert pull.reads_of("b")
    pull.tick(0.021)
    assert pull.failed == {"a": "deadline", "b": "deadline"}
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm"]
    assert pull.open_peers == {peer}


@pytest.mark.parametrize("end", ["deadline", "abort"])
def test_reads_left_with_a_dead_transport_do_not_count_against_the_next_one(pull, peer, end):
    end_by_dead_shm(pull, peer)
    pull.accept(transport="tcp")
    pull.grant()
    if end == "abort":
        pull.abort("b")
    pull.tick(0.021)
    assert "b" in pull.ended
    pull.end_reads(PeerUnreachable("closed"))
    pull.tick(40.0)
    assert [told.transport for told in pull.actions(TransportBroken)] == ["shm"]
    assert pull.open_peers == {peer}


def test_early_fence_of_a_full_quarantine_breaks_no_transport(make_pull, peer):
    pull = make_pull(max_quarantined_blocks=2)
    pull.start_reading("first")
    pull.end_reads()
    pull.tick(40.0)
    pull.start("second")
    pull.grant()
    assert pull.reads_of("second")
    pull.tick(1.0)
    pull.abort("second")
    pull.tick(1.0)
    assert not pull.open_peers
    assert not pull.actions(TransportBroken)


def test_late_reads_that_end_well_are_progress(make_pull, peer):
    """As those of nixl, which cannot be cancelled."""
    pull = make_pull(max_reads_in_flight=4)
    pull.start("a", num_rows=8)
    pull.accept(transport="shm")
    pull.grant()
    let_pass(pull, peer, 1.0)
    pull.abort("a")
    for _ in range(3):
        let_pass(pull, peer, 9.0)
        pull.end_read(min(pull.data_reads("a")))
    let_pass(pull, peer, 2.0)
    assert not pull.actions(TransportBroken)


def test_aborted_load_of_a_slow_peer_does_not_have_it_fenced(make_pull, peer):
    pull = make_pull()
    pull.start("a", num_rows=400)
    pull.accept(transport="shm")
    pull.grant()
    for second in range(29):
        let_pass(pull, peer, 1.0)
        if second == 20:
            pull.start("b", num_rows=40, transfer_id="u")
            pull.grant(60_000, "u")
        pull.end_read(min(pull.data_reads("a")))
        if second > 20:
            pull.end_read(min(pull.data_reads("b")))
    let_pass(pull, peer, 0.5)
    pull.abort("a")
    let_pass(pull, peer, 1.0)
    assert pull.open_peers == {peer}
    assert "b" not in pull.ended
