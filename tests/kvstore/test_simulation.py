"""The store's machines under a virtual clock and faults from a seed: no wrong byte, no late write, nothing left behind."""

import pytest

from kvstore.testing.sim_store import SimStore, StoreFaults

PEACE = StoreFaults()
STORM = StoreFaults(
    loss=0.03, freeze=0.03, death=0.02, restart=0.01, broken_link=0.02, arena_corruption=0.03, tier_corruption=0.03
)


def run(seed, faults, **options):
    sim = SimStore(seed, faults, **options)
    sim.run(30.0)
    assert sim.violations == [], f"seed {seed}"
    return sim


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
def test_in_peace_everything_is_read_and_nothing_rejected(write_back):
    for seed in range(4):
        sim = run(seed, PEACE, write_back=write_back)
        assert sim.num_reads > 100
        assert sim.num_rejected == 0


@pytest.mark.parametrize("write_back", [False, True], ids=["through", "back"])
@pytest.mark.parametrize("start", [0, *(pytest.param(start, marks=pytest.mark.full) for start in range(10, 200, 10))])
def test_under_faults_a_block_is_right_or_missing(start, write_back):
    sims = [run(seed, STORM, write_back=write_back) for seed in range(start, start + 10)]
    assert sum(sim.num_reads for sim in sims) > 250
    assert sum(sim.num_rejected for sim in sims) > 3
    assert sum(sim.num_restarts for sim in sims) > 3


def test_a_pin_whose_release_was_lost_ends():
    run(18, STORM, write_back=True)


def test_a_seed_replays_exactly():
    first, second = (run(7, STORM) for _ in range(2))
    assert (first.num_reads, first.num_rejected, first.clock.now()) == (
        second.num_reads,
        second.num_rejected,
        second.clock.now(),
    )
    assert first.store.counts == second.store.counts
