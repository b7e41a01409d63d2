"""Whole clusters under mixed faults: no wrong token, no leak, no request without an end, nothing that no fault explains."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.race_plan import draw_race_plan
from kvferry.sim.runs import Summary, command, run_seeds

pytestmark = pytest.mark.slow

SEEDS_PER_TEST = 20
NUM_QUICKEST = 40  # in `make check`
NUM_QUICK = 60
NUM_FULL = 2000


def portions(first: int, end: int) -> list[range]:
    return [range(start, start + SEEDS_PER_TEST) for start in range(first, end, SEEDS_PER_TEST)]


def slow(seeds):
    return [pytest.param(each, marks=pytest.mark.slow) for each in seeds]


def name(seeds: range) -> str:
    return f"{seeds.start}-{seeds.stop - 1}"


@functools.cache
def played(seeds: range) -> Summary:
    """Return what runs under mixed faults came to; several tests look at the same ones."""
    return run_seeds(seeds)


def assert_good(summary: Summary, kinds: tuple[Fault, ...] | None = None) -> None:
    told = [f"{command(failure.seed, kinds)}: {failure.violations[0]}" for failure in summary.failures]
    assert not told, "\n".join(["replay with", *told])


@pytest.mark.parametrize("seeds", [*portions(0, NUM_QUICKEST), *slow(portions(NUM_QUICKEST, NUM_QUICK))], ids=name)
def test_mixed_faults(seeds):
    assert_good(played(seeds))


def test_a_transport_that_had_a_part_of_a_deadline_may_be_used_again():
    """The first transport of a load brought nothing; the second had the rest of its time, and is no dead one for that."""
    assert not SimCluster(draw_plan(1133)).run().violations


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [
        *((240, None), (1295, None), (6_000_043, None), (389, (Fault.PRESSURE, Fault.SLOW))),
        (113, (Fault.TWIN, Fault.DRAIN, Fault.SWITCH)),
    ],
)
def test_what_was_once_bad(seed, kinds):
    """240: choices that waited for blocks which other choices' handoffs held. 1295: a sleep that was none.

    389: requests that were refused because a prompt of one token had taken a while. 6000043: an aggregated worker of another
    layout went on with a request whose every reader was away, and the oracle knew no cause of that. 113: of two processes whose
    successor had left, the older one had their name first.
    """
    plan = replace(draw_plan(seed, kinds), keeps_order=False)  # as no transport did then
    assert not SimCluster(plan).run().violations


@pytest.mark.full
@pytest.mark.parametrize("seeds", portions(NUM_QUICK, NUM_FULL), ids=name)
def test_more_mixed_faults(seeds):
    assert_good(run_seeds(seeds))


@pytest.mark.slow
@pytest.mark.parametrize("kind", Fault)
def test_each_kind_of_fault_alone(kind, first_seeds):
    """Few faults tell most: every effect that they do not explain is a violation."""
    assert_good(run_seeds(first_seeds(2, 5), (kind,)), (kind,))


@pytest.mark.slow
def test_blocks_that_are_reused_under_their_readers_change_no_token(first_seeds):
    summary = Summary()
    for seed in first_seeds(10, 20):
        summary.add(SimCluster(draw_race_plan(seed)).run())
    assert not summary.failures, summary.failures[0].violations
    assert summary.happened["load_stale"] > summary.num_runs
    assert set(summary.outcomes) == {"ok"}


def test_without_faults_every_request_succeeds_and_no_kv_is_computed_twice():
    summary = run_seeds(range(10), ())
    assert_good(summary, ())
    assert set(summary.outcomes) == {"ok"}
    assert not [name for name in summary.happened if name.startswith(("fallback", "retry"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "happening",
    [
        "blocks_read_again",
        "converted_blocks",
        "corrupted_reads",
        "expired_leases",
        "failed_reads",
        "fallback_deadline",
        "fallback_digest",
        "fallback_peer_lost",
        "fallback_rejected",
        "fallback_stale",
        "fenced_peers",
        "leases_known_in_time",
        "load_lease_expired",
        "load_stale",
        "lost_connections",
        "preemptions",
        "prefix_hit_tokens",
        "quarantined_blocks",
        "retry_handoff",
        "retry_prefill",
        "retry_replay",
        "stalled_reads",
        "waits_for_staging",
    ],
)
def test_what_is_to_be_survived_does_happen(happening, mixed_runs):
    assert mixed_runs.happened[happening] > 0


@pytest.fixture(scope="module")
def mixed_runs() -> Summary:
    summary = run_seeds(range(10), (Fault.CORRUPT,))
    for seeds in portions(0, 60):
        summary.merge(played(seeds))
    return summary
