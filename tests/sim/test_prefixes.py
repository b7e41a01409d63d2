"""Clusters whose workers load beginnings of prompts from each other, with faults."""

from __future__ import annotations

import pytest

from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.runs import Summary
from tests.sim.prefix_mutants import MUTANTS, violations_of

pytestmark = pytest.mark.slow

SEEDS = (*range(12), 84)  # in the last one a source has lost what it is asked for


@pytest.fixture(scope="module")
def runs() -> Summary:
    summary = Summary()
    for seed in SEEDS:
        summary.add(SimCluster(draw_plan(seed, peer_prefixes=True)).run())
    return summary


def test_loaded_prefixes_change_no_answer_and_leave_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.kinds, failure.violations) for failure in runs.failures]


@pytest.mark.parametrize("happening", ["prefix_held", "prefix_load_ok", "prefix_missing"])
def test_prefixes_are_loaded_and_refused(happening, runs):
    assert runs.happened[happening] > 0


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.seed is not None], ids=lambda mutant: mutant.name)
def test_a_defect_is_found(mutant, monkeypatch):
    mutant.apply(monkeypatch.setattr)
    assert violations_of(mutant.seed)


def test_a_share_of_the_seeds_has_prefixes():
    plans = [draw_plan(seed) for seed in range(40)]
    assert 0 < sum(plan.config.connector.peer_prefixes for plan in plans) < len(plans)
