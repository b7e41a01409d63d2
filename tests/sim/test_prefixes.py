"""Clusters whose workers load beginnings of prompts from each other, with faults."""

from __future__ import annotations

import pytest

from connectors.p2p.prefixes.pins import PrefixPins
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.runs import Summary

pytestmark = pytest.mark.slow

SEEDS = range(12)


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


def test_a_pin_that_is_never_freed_is_noticed(monkeypatch):
    monkeypatch.setattr(PrefixPins, "on_ended", lambda self, transfer_id, manager: None)
    assert any(SimCluster(draw_plan(seed, peer_prefixes=True)).run().violations for seed in SEEDS)


def test_a_share_of_the_seeds_has_prefixes():
    plans = [draw_plan(seed) for seed in range(40)]
    assert 0 < sum(plan.config.connector.peer_prefixes for plan in plans) < len(plans)
