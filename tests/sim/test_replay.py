"""A run depends on its seed alone: not on the process, not on the order of hashing, not on the clock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from core.testing.sim_faults import Fault
from kvferry.sim.plan import draw_plan
from kvferry.sim.runs import command, run_seed

SEEDS = (1, 4, 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_same_seed_gives_the_same_events(seed):
    assert run_seed(seed, keeps_log=True).log == run_seed(seed, keeps_log=True).log


def test_other_seeds_give_other_events():
    assert run_seed(1, keeps_log=True).log != run_seed(2, keeps_log=True).log


def test_log_changes_nothing():
    kept, not_kept = run_seed(4, keeps_log=True), run_seed(4)
    assert not not_kept.log
    assert (kept.num_events, kept.outcomes, kept.happened) == (not_kept.num_events, not_kept.outcomes, not_kept.happened)


def test_events_do_not_depend_on_the_order_of_hashing():
    logs = {replay(SEEDS[0], hash_seed) for hash_seed in ("1", "2", "3")}
    assert len(logs) == 1
    assert len(logs.pop().splitlines()) > 100


def replay(seed: int, hash_seed: str) -> str:
    """Return what ``kvferry sim`` prints in a process of its own."""
    arguments = [sys.executable, "-P", "-m", "kvferry", "sim", "--seed", str(seed)]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_plan_tells_what_will_happen():
    text = "\n".join(draw_plan(4).describe())
    assert "seed 4" in text
    assert all(request.name in text for request in draw_plan(4).requests)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (None, "kvferry sim --seed 3"),
        ((Fault.CRASH, Fault.CUT), "kvferry sim --seed 3 --faults crash,cut"),
        ((), "kvferry sim --seed 3 --faults none"),
    ],
)
def test_command_replays_the_same_kinds(kinds, expected):
    assert command(3, kinds) == expected
