"""Deliberate defects of the protocol are found in plans as ``kvferry sim`` draws them, by the seeds that are known."""

from __future__ import annotations

import pytest

from tests.sim.protocol_mutants import CHOSEN, MUTANTS, NUM_RUNS, Mutant, find, violations_of

MIN_FOUND = 18  # of those chosen
FOUND = [mutant for mutant in MUTANTS if mutant.seed is not None]


def name(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FOUND, ids=name)
def test_defect_is_found_by_its_seed_and_the_seed_is_good_without(mutant, monkeypatch):
    assert mutant.seed is not None
    assert not violations_of(mutant.seed)
    mutant.apply(monkeypatch.setattr)
    assert violations_of(mutant.seed)


def test_known_seeds_are_of_the_first_hundred():
    assert all(mutant.seed in range(NUM_RUNS) for mutant in FOUND)


def test_most_of_the_chosen_defects_are_known_to_be_found():
    assert len(CHOSEN) == 22
    assert sum(mutant.seed is not None for mutant in CHOSEN) >= MIN_FOUND


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_most_of_the_chosen_defects_are_found_within_a_hundred_runs():
    found = [mutant.name for mutant in CHOSEN if find(mutant, range(NUM_RUNS)) is not None]
    assert len(found) >= MIN_FOUND, found
