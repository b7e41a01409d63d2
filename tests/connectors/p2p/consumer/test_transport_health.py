"""The circuit breaker of a transport: when it opens, when it probes, and what closes it."""

import math

import pytest

from connectors.p2p.actions import EndProbe, OpenPeer, ProbeEnded, StartProbe, TransportBroken, TransportRestored
from connectors.p2p.consumer.transport_health import BreakerTerms, TransportHealth
from connectors.p2p.transport.interface import PeerId
from connectors.testing.transport_owner import layout_of_rows
from core.errors import PeerUnreachable, TransferTimeout
from core.testing.clock import FakeClock

ADDRESS = "tcp://10.0.0.1:5600"
PEER = PeerId(ADDRESS, 1)
BY_TCP = OpenPeer(PEER, "tcp", b"metadata", 100, layout_of_rows(1024))
STALL = TransferTimeout("no byte came")
TERMS = BreakerTerms(retry_s=1.0, retry_max_s=8.0, probe_timeout_s=2.0, max_failures=3)


class Breakers:
    def __init__(self):
        self.log = []
        self.health = TransportHealth(TERMS, self.log.append)
        self.clock = FakeClock()

    @property
    def now(self):
        return self.clock.now()

    def take(self):
        taken = list(self.log)
        self.log.clear()
        return taken

    def tick(self, seconds):
        self.clock.advance(seconds)
        self.health.on_timer(self.now)
        assert self.health.next_timer() > self.now
        return self.take()

    def break_(self, opened=BY_TCP):
        self.health.open_breaker(opened, STALL, self.now)

    def answer(self, probe, error=None):
        return self.health.on_probe_ended(ProbeEnded(probe.probe_id, error), self.now)

    def is_usable(self, peer=PEER, transport="tcp"):
        return self.health.is_usable(peer, transport)


@pytest.fixture
def breakers():
    return Breakers()


def test_breaker_is_closed_at_first(breakers):
    assert breakers.is_usable()
    assert breakers.health.next_timer() == math.inf
    assert breakers.health.num_broken() == {}


def test_open_breaker_is_of_one_peer_and_one_transport(breakers):
    breakers.break_()
    assert not breakers.is_usable()
    assert breakers.is_usable(transport="shm")
    assert breakers.is_usable(PeerId(ADDRESS, 2))
    assert breakers.health.num_broken() == {"tcp": 1}
    assert breakers.health.reasons(PEER) == {"tcp": "no byte came"}


def test_opening_is_reported_once(breakers):
    breakers.break_()
    breakers.break_()
    assert breakers.take() == [TransportBroken(PEER, "tcp", "no byte came", 1.0)]
    assert breakers.health.counts.broken_transports == 1


def test_probe_begins_after_the_back_off(breakers):
    breakers.break_()
    breakers.take()
    assert breakers.tick(0.9) == []
    assert breakers.tick(0.1) == [StartProbe(1, BY_TCP)]
    assert not breakers.is_usable(), "a probe is no permission"


def test_one_probe_at_a_time(breakers):
    breakers.break_()
    breakers.tick(1.0)
    assert breakers.tick(1.9) == []
    assert breakers.health.counts.transport_probes == 1


def test_good_probe_closes_the_breaker(breakers):
    breakers.break_()
    _, probe = breakers.tick(1.0)
    breakers.clock.advance(0.5)
    assert breakers.answer(probe) == BY_TCP
    assert breakers.is_usable()
    assert breakers.take() == [TransportRestored(PEER, "tcp", 1.5)]
    assert breakers.health.next_timer() == math.inf
    assert breakers.health.counts.restored_transports == 1


def test_failed_probes_double_the_back_off_up_to_its_bound(breakers):
    breakers.break_()
    breakers.take()
    waits = []
    for _ in range(6):
        waits.append(breakers.health.next_timer() - breakers.now)
        (probe,) = breakers.tick(waits[-1])
        assert breakers.answer(probe, PeerUnreachable("refused")) is None
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert breakers.take() == [], "a failed probe is no news"
    assert breakers.health.reasons(PEER) == {"tcp": "refused"}


def test_probe_without_an_answer_is_abandoned_and_counts_as_failed(breakers):
    breakers.break_()
    _, probe = breakers.tick(1.0)
    assert breakers.tick(2.0) == [EndProbe(probe.probe_id)]
    assert breakers.answer(probe) is None, "its answer is too late"
    assert not breakers.is_usable()
    assert breakers.tick(1.9) == []
    (second,) = breakers.tick(0.1)
    assert second.probe_id != probe.probe_id


def test_back_off_continues_where_it_was_if_only_probes_succeed(breakers):
    breakers.break_()
    _, probe = breakers.tick(1.0)
    breakers.answer(probe)
    breakers.take()
    breakers.break_()
    assert breakers.take() == [TransportBroken(PEER, "tcp", "no byte came", 2.0)]


def test_loaded_handoff_resets_the_back_off(breakers):
    breakers.break_()
    _, probe = breakers.tick(1.0)
    breakers.answer(probe)
    breakers.health.count_success(PEER, "tcp")
    breakers.take()
    breakers.break_()
    assert breakers.take() == [TransportBroken(PEER, "tcp", "no byte came", 1.0)]


def test_handoff_that_ends_well_late_does_not_close_an_open_breaker(breakers):
    breakers.break_()
    breakers.health.count_success(PEER, "tcp")
    assert not breakers.is_usable()


def test_failures_in_a_row_open_the_breaker(breakers):
    for _ in range(2):
        breakers.health.count_failure(BY_TCP, PeerUnreachable("reset"), breakers.now)
    assert breakers.is_usable()
    breakers.health.count_failure(BY_TCP, PeerUnreachable("reset"), breakers.now)
    assert breakers.health.reasons(PEER) == {"tcp": "reset"}


def test_success_between_failures_starts_their_count_again(breakers):
    for _ in range(5):
        for _ in range(2):
            breakers.health.count_failure(BY_TCP, PeerUnreachable("reset"), breakers.now)
        breakers.health.count_success(PEER, "tcp")
    assert breakers.is_usable()


def test_restored_transport_may_fail_as_often_as_a_new_one(breakers):
    for _ in range(3):
        breakers.health.count_failure(BY_TCP, PeerUnreachable("reset"), breakers.now)
    _, probe = breakers.tick(1.0)
    breakers.answer(probe)
    breakers.health.count_failure(BY_TCP, PeerUnreachable("reset"), breakers.now)
    assert breakers.is_usable()


def test_forgotten_peer_is_not_probed(breakers):
    breakers.break_()
    _, probe = breakers.tick(1.0)
    breakers.health.forget_at(ADDRESS)
    assert breakers.take() == [EndProbe(probe.probe_id)]
    assert breakers.is_usable()
    assert breakers.tick(100) == []


def test_only_the_present_incarnation_at_an_address_is_remembered(breakers):
    later = PeerId(ADDRESS, 2)
    breakers.break_()
    breakers.break_(OpenPeer(later, "tcp", b"", 1, layout_of_rows(1)))
    breakers.health.forget_at(ADDRESS, but_for=2)
    assert breakers.is_usable(PEER)
    assert not breakers.is_usable(later)
