"""Faults at the boundaries of chunks, while decode workers read what is sealed: no answer changes, and nothing is left."""

from __future__ import annotations

import msgspec
import pytest

from core.wire.early import PullEarly
from decode import early_pulls
from kvferry.sim.chunk_plan import draw_chunk_plan
from kvferry.sim.faults import Fault
from kvferry.sim.runs import Summary, command, run_seeds
from tests.sim.chunk_mutants import MUTANTS, NUM_RUNS, violations_of
from tests.sim.protocol_mutants import find

SEEDS_PER_TEST = 100
FOUND = [mutant for mutant in MUTANTS if mutant.seed is not None]


def play(seeds: range) -> Summary:
    runs = run_seeds(seeds, is_chunked=True)
    told = [f"{command(failure.seed, is_chunked=True)}: {failure.violations[0]}" for failure in runs.failures]
    assert not told, "\n".join(["replay with", *told])
    return runs


@pytest.mark.slow
def test_prompts_of_many_chunks_are_read_early_under_faults():
    runs = play(range(20))
    assert runs.happened["early_loads"] > 40
    assert sum(number for name, number in runs.happened.items() if name.startswith("chunk_")) > 8
    assert runs.outcomes["ok"] > 20


def test_every_kind_of_fault_strikes_at_some_boundary():
    drawn = {fault.kind for seed in range(200) for fault in draw_chunk_plan(seed).faults.at_chunks}
    assert drawn >= {Fault.CRASH, Fault.FREEZE, Fault.HANG, Fault.TWIN, Fault.DRAIN, Fault.SQUEEZE, Fault.ABORT, Fault.CUT}


@pytest.mark.full
@pytest.mark.parametrize("first", range(20_000, 20_800, SEEDS_PER_TEST))
def test_no_fault_at_a_boundary_changes_an_answer(first):
    runs = play(range(first, first + SEEDS_PER_TEST))
    assert runs.happened["early_loads"]
    assert runs.happened["load_stale"]


@pytest.mark.full
@pytest.mark.parametrize("mutant", FOUND, ids=lambda mutant: mutant.name)
def test_defect_is_found_by_its_seed_and_the_seed_is_good_without(mutant, monkeypatch):
    assert not violations_of(mutant.seed)
    mutant.apply(monkeypatch.setattr)
    assert violations_of(mutant.seed)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_defects_are_found_within_some_hundred_runs():
    found = [mutant.name for mutant in MUTANTS if find(mutant, range(NUM_RUNS), violations_of) is not None]
    assert len(found) >= len(FOUND) - 1, found


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
    runs = play(range(8))
    assert runs.happened["early_loads"] == 0
    assert runs.happened["load_stale"] > 0
