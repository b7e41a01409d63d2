"""Faults are a function of the seed, and no kind happens that was not drawn."""

from random import Random

import pytest

from kvferry.sim.faults import CLUSTER_FAULTS, Fault, draw_faults, draw_kinds

WORKERS = ["prefill-0", "decode-0"]


def draw(seed: int, kinds=frozenset(Fault)):
    return draw_faults(Random(seed), kinds, WORKERS, ["router-0"], [1.0, 5.0])


def test_same_seed_gives_the_same_faults():
    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_every_kind_is_drawn_and_so_is_none():
    drawn = [draw_kinds(Random(seed)) for seed in range(300)]
    assert frozenset() in drawn
    assert frozenset(CLUSTER_FAULTS) in drawn
    assert set().union(*drawn) == set(CLUSTER_FAULTS), "a tier's faults are drawn with the tier"


@pytest.mark.parametrize("seed", range(10))
def test_without_kinds_nothing_goes_wrong(seed):
    calm = draw(seed, frozenset())
    assert calm.events == []
    assert not any(value for name, value in vars_of(calm.network).items() if name.endswith("_rate"))
    assert not any(value for name, value in vars_of(calm.reads).items() if name.endswith("_rate"))
    assert calm.quiet_at == 6.0


@pytest.mark.parametrize("seed", range(10))
def test_after_the_last_event_it_is_quiet(seed):
    found = draw(seed)
    assert found.events == sorted(found.events)
    assert found.quiet_at >= max(event.end for event in found.events)
    assert all(set(event.targets) <= {*WORKERS, "router-0"} for event in found.events)
    found.calm_down()
    for weather in (found.network, found.reads):
        assert not any(value for name, value in vars_of(weather).items() if name.endswith("_rate"))


def vars_of(weather) -> dict[str, object]:
    return {name: getattr(weather, name) for name in weather.__slots__}
