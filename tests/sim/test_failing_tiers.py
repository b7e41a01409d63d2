"""Disks and servers below a store that are full, cannot be read or lose blocks: that costs time, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from core.errors import Unavailable
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import TIER_FAULTS, Fault
from kvferry.sim.lower_tier import SimLowerTier
from kvferry.sim.runs import Summary, run_seed, run_seeds
from kvstore.memory import MemoryTier
from kvstore.tiering import Tiering
from kvstore.tiers.worker import TierRunner
from tests.support.only_full import rest_in_full

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr
NUM_RUNS = 40  # within which each defect must be found
KEY = b"key"


# ---- the tier itself


@pytest.fixture
def lost_reads() -> list[str]:
    return []


def make_tier(lost_reads: list[str], *, must_be_asked: bool = False, now: Callable[[], float] = lambda: 0.0) -> SimLowerTier:
    """Return a tier that has a block."""
    tier = SimLowerTier(now, lambda: lost_reads.append("lost"), must_be_asked=must_be_asked)
    tier.values[KEY] = b"seal", bytearray(b"block")
    return tier


def test_unreadable_disk_fails_and_forgets_what_was_wanted(lost_reads):
    tier = make_tier(lost_reads)
    tier.fail(Fault.TIER_UNREADABLE, 1.0)
    with pytest.raises(Unavailable):
        tier.load(KEY, memoryview(bytearray(8)))
    assert not tier.knows(KEY)
    assert lost_reads


def test_unreadable_server_answers_nothing_and_keeps_what_it_has(lost_reads):
    tier = make_tier(lost_reads, must_be_asked=True)
    tier.fail(Fault.TIER_UNREADABLE, 1.0)
    for call in (lambda: tier.locate([KEY]), lambda: tier.load(KEY, memoryview(bytearray(8)))):
        with pytest.raises(Unavailable):
            call()
    assert KEY in tier.values


def test_disk_announces_what_has_vanished_until_it_is_wanted(lost_reads):
    tier = make_tier(lost_reads)
    tier.fail(Fault.TIER_LOSS, 0.0)
    assert tier.knows(KEY)
    with pytest.raises(Unavailable):
        tier.load(KEY, memoryview(bytearray(8)))
    assert not tier.knows(KEY)
    assert lost_reads


def test_server_has_nothing_of_what_has_vanished(lost_reads):
    tier = make_tier(lost_reads, must_be_asked=True)
    tier.fail(Fault.TIER_LOSS, 0.0)
    assert tier.locate([KEY]) == [False]
    assert tier.load(KEY, memoryview(bytearray(8))) is None
    assert lost_reads


def test_full_tier_refuses_what_is_new_and_a_healed_one_takes_it(lost_reads):
    times = [0.0, 0.5, 1.5]
    tier = make_tier(lost_reads, now=lambda: times.pop(0))
    tier.fail(Fault.TIER_FULL, 1.0)
    assert not tier.save(b"other", b"seal", memoryview(b"block"))
    assert tier.save(b"other", b"seal", memoryview(b"block"))
    assert not lost_reads


# ---- in runs


@pytest.mark.slow
@pytest.mark.parametrize("kind", TIER_FAULTS)
def test_each_failure_is_drawn_for_some_seeds_and_told(kind):
    plans = [plan for plan in map(draw_plan, range(100)) if kind in plan.kinds]
    assert 0 < len(plans) < 20
    assert any(f" {kind} store-0 tier-" in line for plan in plans for line in plan.describe())


@pytest.fixture(scope="module")
def runs() -> Summary:
    """Return what failing tiers come to, one kind at a time."""
    summary = Summary()
    for kind in TIER_FAULTS:
        summary.merge(run_seeds(range(13, 20), (kind,)))
    return summary


@pytest.mark.slow
def test_failing_tiers_change_no_answer_and_leave_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.kinds, failure.violations) for failure in runs.failures]


@pytest.mark.slow
def test_failing_tiers_are_an_error_only_for_clients_that_ask_for_errors(runs):
    assert set(runs.outcomes) <= {"ok", "store_miss"}
    assert runs.outcomes["ok"] > 50 * runs.outcomes["store_miss"]


@pytest.mark.slow
def test_store_answers_at_once_although_its_tiers_fail(runs):
    assert not runs.happened["tier_timeouts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "happening",
    [
        "fallback_store_miss",
        "tier_failed_reads",
        "tier_full_saves",
        "tier_loaded_blocks",
        "tier_missing_reads",
        "tier_unanswered_questions",
        "tier_vanished_reads",
    ],
)
def test_what_is_to_be_survived_does_happen(happening, runs):
    assert runs.happened[happening] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", rest_in_full(TIER_FAULTS))
def test_same_seed_gives_the_same_events(kind):
    assert run_seed(6, (kind,), keeps_log=True).log == run_seed(6, (kind,), keeps_log=True).log


# ---- deliberate defects


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect and the fault under which it shows. ``apply`` gets ``monkeypatch.setattr``."""

    kind: Fault
    apply: Callable[[Patch], None]
    seed: int  # played first: one that finds it

    @property
    def name(self) -> str:
        return self.apply.__name__.replace("_", " ")

    def finds(self, seed: int) -> bool:
        result = SimCluster(draw_plan(seed, (self.kind,))).run()
        return not result.is_good or result.happened["tier_timeouts"] > 0


def let_the_failure_of_a_tier_end_the_store(patch: Patch) -> None:
    def run(runner, job):
        job.is_skipped = not job.is_wanted
        if not job.is_skipped:
            runner._do(job)

    patch(TierRunner, "run", run)


def keep_pinned_what_a_tier_did_not_save(patch: Patch) -> None:
    real = Tiering._on_saved

    def on_saved(tiering, job):
        if job.is_saved:
            real(tiering, job)

    patch(Tiering, "_on_saved", on_saved)


def lose_the_slot_of_a_block_that_did_not_come(patch: Patch) -> None:
    patch(MemoryTier, "give_back", lambda memory, resident: None)


def forget_who_waits_for_a_block_that_did_not_come(patch: Patch) -> None:
    real = Tiering._on_loaded

    def on_loaded(tiering, job):
        answered = real(tiering, job)
        return answered if job.loaded is not None else []

    patch(Tiering, "_on_loaded", on_loaded)


def call_a_failure_a_miss_that_needs_no_cause(patch: Patch) -> None:
    """Not of the product: without trouble that is noted, the oracle must ask for a cause."""
    patch(SimLowerTier, "_has", lambda tier, kind: False)
    patch(SimLowerTier, "load", lambda tier, key, target: None)


MUTANTS = (
    Mutant(Fault.TIER_UNREADABLE, let_the_failure_of_a_tier_end_the_store, 0),
    Mutant(Fault.TIER_FULL, keep_pinned_what_a_tier_did_not_save, 0),
    Mutant(Fault.TIER_UNREADABLE, lose_the_slot_of_a_block_that_did_not_come, 18),
    Mutant(Fault.TIER_LOSS, lose_the_slot_of_a_block_that_did_not_come, 17),
    Mutant(Fault.TIER_UNREADABLE, forget_who_waits_for_a_block_that_did_not_come, 18),
    Mutant(Fault.TIER_UNREADABLE, call_a_failure_a_miss_that_needs_no_cause, 17),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.name}-{mutant.kind}")
def test_defect_is_found(mutant, monkeypatch):
    mutant.apply(monkeypatch.setattr)
    assert any(map(mutant.finds, (mutant.seed, *range(NUM_RUNS)))), f"{NUM_RUNS} runs saw nothing wrong"
