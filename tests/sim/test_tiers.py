"""Clusters with a tier below their pools: its faults cost time, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import STORE_FAULTS, Fault
from kvferry.sim.runs import Summary, run_seed, run_seeds
from tests.support.only_full import rest_in_full

pytestmark = pytest.mark.slow

REMARKABLE = (
    (5, (Fault.STORE_LOSS,)),  # an engine waits while a save is open
    (833, None),  # a preempted answer comes back from the tier: more than the prompt is loaded
)


@pytest.fixture(scope="module")
def runs() -> Summary:
    """Return what all that can befall a tier comes to, one kind at a time."""
    summary = Summary()
    for kind in STORE_FAULTS:
        summary.merge(run_seeds(range(9, 15), (kind,)))
    return summary


def test_faults_of_a_tier_change_no_answer_and_leave_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.kinds, failure.violations) for failure in runs.failures]


def test_faults_of_a_tier_are_an_error_only_for_clients_that_ask_for_errors(runs):
    assert set(runs.outcomes) <= {"ok", "store_miss", "digest"}
    assert runs.outcomes["ok"] > 20 * (runs.outcomes["store_miss"] + runs.outcomes["digest"])


@pytest.mark.parametrize(
    "happening",
    [
        "flipped_bits",
        "tier_failed_blocks",
        "tier_known_blocks",
        "tier_loaded_blocks",
        "tier_refused_puts",
        "tier_rejected_digest",
        "tier_restarts_noticed",
        "tier_saved_blocks",
        "tier_timeouts",
    ],
)
def test_what_is_to_be_survived_does_happen(happening, runs):
    assert runs.happened[happening] > 0


@pytest.mark.parametrize(("seed", "kinds"), REMARKABLE)
def test_remarkable_seeds_stay_good(seed, kinds):
    plan = replace(draw_plan(seed, kinds), keeps_order=False)  # as they were found
    assert not SimCluster(plan).run().violations


@pytest.mark.parametrize("kind", rest_in_full(STORE_FAULTS))
def test_same_seed_gives_the_same_events(kind):
    assert run_seed(6, (kind,), keeps_log=True).log == run_seed(6, (kind,), keeps_log=True).log


def test_some_seeds_have_a_store_some_an_offload_tier_and_most_neither():
    tiers = [draw_plan(seed).tier for seed in range(60)]
    names = [tier.name for tier in tiers if tier is not None]
    assert {"store", "offload"} == set(names)
    assert len(names) < len(tiers) / 2
