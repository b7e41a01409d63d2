"""The lease table: what is held, until when, and what late messages do."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connectors.p2p.producer import leases
from connectors.p2p.producer.leases import LeaseTable, LeaseTerms
from core.testing.clock import FakeClock

TERMS = LeaseTerms(grant_s=30.0, renew_s=20.0, max_s=100.0)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def table(clock) -> LeaseTable:
    return LeaseTable(TERMS)


def test_granted_lease_expires_after_its_time(table, clock):
    table.grant("t", "r", 3, clock.now())
    assert table.next_expiry() == clock.now() + 30
    clock.advance(29.75)
    assert table.expire(clock.now()) == []
    clock.advance(0.25)
    assert table.expire(clock.now()) == ["r"]
    assert len(table) == 0
    assert table.next_expiry() is None
    assert table.counts.expired == 1


def test_gauge_counts_the_blocks_of_what_is_held(table, clock):
    table.grant("a", "ra", 3, clock.now())
    table.grant("b", "rb", 4, clock.now())
    table.grant("c", "rc", 5, clock.now())
    assert table.num_blocks == 12
    table.release(["b"])
    assert table.num_blocks == 8
    clock.advance(30)
    table.renew(["a"], clock.now())
    table.expire(clock.now())
    assert table.num_blocks == 0


def test_longest_lease_is_what_a_drain_waits_for(table, clock):
    assert table.longest_left_s(clock.now()) == 0.0
    table.grant("a", "ra", 1, clock.now())
    clock.advance(15)
    table.grant("b", "rb", 1, clock.now())
    assert table.longest_left_s(clock.now()) == 30.0
    table.release(["b"])
    assert table.longest_left_s(clock.now()) == 15.0
    table.renew(["a"], clock.now())
    assert table.longest_left_s(clock.now()) == 20.0


def test_release_is_idempotent_and_names_the_request_once(table, clock):
    table.grant("t", "r", 1, clock.now())
    assert table.release(["t", "t"]) == ["r"]
    assert table.release(["t"]) == []
    assert (table.counts.released, table.counts.late, table.counts.unknown) == (1, 2, 0)


def test_released_lease_never_expires(table, clock):
    table.grant("t", "r", 1, clock.now())
    table.release(["t"])
    assert table.next_expiry() is None
    clock.advance(1000)
    assert table.expire(clock.now()) == []
    assert table.counts.expired == 0


def test_renewal_says_what_is_left(table, clock):
    table.grant("t", "r", 1, clock.now())
    clock.advance(25)
    assert table.renew(["t"], clock.now()) == {"t": 20_000}
    assert table.next_expiry() == clock.now() + 20


def test_early_renewal_never_shortens_a_lease(table, clock):
    table.grant("t", "r", 1, clock.now())
    clock.advance(5)
    assert table.renew(["t"], clock.now()) == {"t": 25_000}


def test_renewals_end_at_the_absolute_cap(table, clock):
    table.grant("t", "r", 1, clock.now())
    for _ in range(9):
        clock.advance(10)
        table.renew(["t"], clock.now())
    assert table.renew(["t"], clock.now()) == {"t": 10_000}
    clock.advance(9.5)
    assert table.renew(["t"], clock.now()) == {"t": 500}
    clock.advance(0.5)
    assert table.expire(clock.now()) == ["r"]


def test_grant_is_capped_too(clock):
    table = LeaseTable(LeaseTerms(grant_s=30, renew_s=20, max_s=10))
    table.grant("t", "r", 1, clock.now())
    assert table.next_expiry() == clock.now() + 10


def test_unknown_and_late_messages_are_counted_apart(table, clock):
    table.grant("t", "r", 1, clock.now())
    clock.advance(30)
    table.expire(clock.now())
    assert table.renew(["t", "never"], clock.now()) == {"t": 0, "never": 0}
    assert table.release(["t", "never"]) == []
    assert (table.counts.late, table.counts.unknown) == (2, 2)
    assert table.counts.renewed == 0


def test_due_lease_does_not_come_back_before_it_is_collected(table, clock):
    table.grant("t", "r", 1, clock.now())
    clock.advance(30)
    assert table.renew(["t"], clock.now()) == {"t": 0}
    assert (table.counts.late, table.counts.unknown) == (1, 0)
    assert table.expire(clock.now()) == ["r"]


def test_renewed_lease_at_the_head_does_not_hide_expired_ones_after_it(table, clock):
    table.grant("head", "rh", 1, clock.now())
    clock.advance(1)
    table.grant("behind", "rb", 1, clock.now())
    clock.advance(28)
    table.renew(["head"], clock.now())
    clock.advance(3)
    assert table.expire(clock.now()) == ["rb"]
    assert len(table) == 1


def test_longest_overdue_expires_first(table, clock):
    for name in ("a", "b", "c"):
        table.grant(name, f"r{name}", 1, clock.now())
        clock.advance(1)
    clock.advance(100)
    assert table.expire(clock.now()) == ["ra", "rb", "rc"]


def test_second_grant_of_a_held_id_is_a_bug_of_ours(table, clock):
    table.grant("t", "r", 1, clock.now())
    with pytest.raises(AssertionError, match="granted twice"):
        table.grant("t", "other", 1, clock.now())


def test_memory_of_ended_leases_is_bounded(table, monkeypatch, clock):
    monkeypatch.setattr(leases, "MAX_REMEMBERED_ENDS", 2)
    for name in ("a", "b", "c"):
        table.grant(name, name, 1, clock.now())
        table.release([name])
    table.release(["a", "b", "c"])
    assert (table.counts.late, table.counts.unknown) == (2, 1)


class LeasesAgainstNaiveModel(RuleBasedStateMachine):
    """A dict that is scanned completely does the same. Times are multiples of 1/4 s, so nothing is rounded."""

    ids = st.sampled_from([f"t{index}" for index in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.table = LeaseTable(TERMS)
        self.held: dict[str, tuple[str, int, float, float]] = {}  # request, blocks, expiry, cap
        self.ended: set[str] = set()
        self.num_strays = [0, 0]

    def end(self, transfer_id: str) -> str:
        self.ended.add(transfer_id)
        return self.held.pop(transfer_id)[0]

    def count_stray(self, transfer_id: str) -> None:
        self.num_strays[transfer_id not in self.ended and transfer_id not in self.held] += 1

    @rule(transfer_id=ids, num_blocks=st.integers(1, 5))
    def grant(self, transfer_id: str, num_blocks: int) -> None:
        if transfer_id in self.held:
            return
        now = self.clock.now()
        self.table.grant(transfer_id, f"r{transfer_id}", num_blocks, self.clock.now())
        self.held[transfer_id] = (f"r{transfer_id}", num_blocks, now + 30, now + 100)

    @rule(transfer_ids=st.lists(ids, unique=True))
    def renew(self, transfer_ids: list[str]) -> None:
        now, left = self.clock.now(), {}
        for transfer_id in transfer_ids:
            request_id, num_blocks, expiry, cap = self.held.get(transfer_id, ("", 0, 0.0, 0.0))
            if expiry <= now:
                self.count_stray(transfer_id)
                left[transfer_id] = 0
                continue
            expiry = max(expiry, min(now + 20, cap))
            self.held[transfer_id] = (request_id, num_blocks, expiry, cap)
            left[transfer_id] = int(1000 * (expiry - now))
        assert self.table.renew(transfer_ids, self.clock.now()) == left

    @rule(transfer_ids=st.lists(ids))
    def release(self, transfer_ids: list[str]) -> None:
        expected = []
        for transfer_id in transfer_ids:
            if transfer_id in self.held:
                expected.append(self.end(transfer_id))
            else:
                self.count_stray(transfer_id)
        assert self.table.release(transfer_ids) == expected

    @rule(quarters=st.integers(0, 130))
    def advance(self, quarters: int) -> None:
        self.clock.advance(quarters / 4)

    @rule()
    def expire(self) -> None:
        now = self.clock.now()
        due = sorted((lease[2], transfer_id) for transfer_id, lease in self.held.items() if lease[2] <= now)
        assert self.table.expire(self.clock.now()) == [self.end(transfer_id) for _, transfer_id in due]

    @invariant()
    def same(self) -> None:
        assert len(self.table) == len(self.held)
        assert self.table.num_blocks == sum(lease[1] for lease in self.held.values())
        assert self.table.next_expiry() == min((lease[2] for lease in self.held.values()), default=None)
        assert [self.table.counts.late, self.table.counts.unknown] == self.num_strays
        assert self.table.counts.granted == self.table.counts.released + self.table.counts.expired + len(self.held)


TestLeasesAgainstNaiveModel = LeasesAgainstNaiveModel.TestCase
TestLeasesAgainstNaiveModel.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
