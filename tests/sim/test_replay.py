"""A run depends on its seed alone: not on the process, not on the order of hashing, not on the clock."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from core.errors import ConfigError
from kvferry.cli import app
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.runs import command, run_seed

pytestmark = pytest.mark.slow

SEEDS = (1, 4, 10)
REPLAYED = (0, 1, 13, 23)  # the last two abort several fetches of embeddings at once
_DIGESTS = """
import hashlib, sys
from kvferry.sim.runs import run_seed, silence
silence()
for seed in map(int, sys.argv[1:]):
    print(hashlib.sha256("\\n".join(run_seed(seed, keeps_log=True).log).encode()).hexdigest())
"""


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
    digests = logs_of_a_process("1")
    assert digests == logs_of_a_process("2")
    assert len(set(digests)) == len(REPLAYED)


def logs_of_a_process(hash_seed: str) -> list[str]:
    """Return the digests of the logs of some seeds, played in a process that hashes in another order."""
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    arguments = [sys.executable, "-P", "-c", _DIGESTS, *map(str, REPLAYED)]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout.split()


def test_command_prints_the_events_and_how_it_ended(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["sim", "--seed", "4"])
    printed = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert printed[:-1] == run_seed(4, keeps_log=True).log
    assert printed[-1].startswith("seed 4: ")


def test_command_sums_up_many_runs(capsys):
    with pytest.raises(SystemExit) as ended:
        app(["sim", "--runs", "3", "--faults", "none"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "3 runs" in printed
    assert "0 bad" in printed


def test_command_says_which_seed_is_bad_and_how_to_replay_it(capsys, monkeypatch):
    monkeypatch.setattr("kvferry.sim.oracle.CausalOracle.judge", lambda self, client: ["made up"])
    with pytest.raises(SystemExit) as ended:
        app(["sim", "--seed", "4", "--quiet"])
    assert ended.value.code == 1
    assert "VIOLATION: made up" in capsys.readouterr().out


def test_command_refuses_faults_that_it_does_not_know():
    with pytest.raises(ConfigError, match="bogus"):
        app(["sim", "--faults", "crash,bogus"], standalone_mode=False)


def test_plan_reports_what_will_happen():
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
