"""Faults at the boundaries of chunks, while decode workers read what is sealed: no answer changes, and nothing is left."""

from __future__ import annotations

import msgspec
import pytest

from core.wire.early import PullEarly
from decode import early_pulls
from kvferry.sim.chunk_plan import chunk_boundaries, draw_chunk_plan
from kvferry.sim.cluster import SimCluster
from kvferry.sim.runs import Summary

STALLED_SEED = 260  # of a request that did not fit beside the blocks that were read early for it


def play(seeds: range) -> Summary:
    runs = Summary()
    for seed in seeds:
        runs.add(SimCluster(draw_chunk_plan(seed)).run())
    assert not runs.failures, [(failure.seed, failure.violations) for failure in runs.failures]
    return runs


def test_prompts_of_many_chunks_are_read_early_under_faults():
    runs = play(range(6))
    assert runs.happened["early_loads"] > 20
    assert runs.outcomes["ok"] > 5


def test_request_that_does_not_fit_beside_its_early_blocks_is_served():
    play(range(STALLED_SEED, STALLED_SEED + 1))


def test_faults_strike_at_boundaries():
    plan = draw_chunk_plan(1)
    assert plan.faults.events or any(request.abort_at for request in plan.requests)
    assert len(chunk_boundaries(plan)) > 3


@pytest.mark.full
def test_no_fault_at_a_boundary_changes_an_answer():
    runs = play(range(1000, 1600))
    assert runs.happened["early_evictions"]
    assert runs.happened["load_stale"]


@pytest.mark.slow
def test_blocks_of_another_generation_are_never_used(monkeypatch):
    """The readers' seals are the only guard of an early pull: a handoff that names other generations loads nothing."""
    joined = early_pulls._join

    def forge(known, message: PullEarly):
        handoff = joined(known, message)
        if handoff is None:
            return None
        groups = [
            msgspec.structs.replace(group, generations=tuple(number + 1 for number in group.generations))
            for group in handoff.groups
        ]
        return msgspec.structs.replace(handoff, groups=tuple(groups))

    monkeypatch.setattr(early_pulls, "_join", forge)
    runs = play(range(4))
    assert runs.happened["early_loads"] == 0
    assert runs.happened["load_stale"] > 0
