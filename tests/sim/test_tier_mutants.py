"""Deliberate defects of what surrounds a tier, each of which the simulation must notice. See ``test_mutants``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

import connectors.async_worker
from connectors.reports import LoadEnded
from connectors.tier.save_planner import SavePlanner
from connectors.tier.worker import TierConnectorWorker
from core.engine.core import EngineCore
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvstore.memory import MemoryTier
from tests.support.unverified_store import use_what_a_store_gives_unverified

pytestmark = pytest.mark.slow

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr
NUM_RUNS = 40  # within which each must be found


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect and the fault under which it shows. ``apply`` gets ``monkeypatch.setattr``."""

    name: str
    kind: Fault
    apply: Callable[[Patch], None]

    def finds(self, seed: int) -> bool:
        return not SimCluster(draw_plan(seed, (self.kind,))).run().is_good


def returns(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


def believe_failed_loads(patch: Patch) -> None:
    real = connectors.async_worker.add_load_ended

    def add_load_ended(ended, output):
        real(LoadEnded(ended.request_id, ended.usage), output)

    patch(connectors.async_worker, "add_load_ended", add_load_ended)


def keep_for_ever_what_is_saved(patch: Patch) -> None:
    patch(SavePlanner, "end", returns(None))


def free_what_is_saved_before_it_is_copied(patch: Patch) -> None:
    real_take, real_end = SavePlanner.take, SavePlanner.end

    def take(self):
        items = real_take(self)
        real_end(self, [item.block_id for item in items])
        return items

    patch(SavePlanner, "take", take)
    patch(SavePlanner, "end", returns(None))


def never_unpin_in_the_store(patch: Patch) -> None:
    patch(MemoryTier, "unpin", returns(None))


def forget_to_say_that_the_tier_has_answered(patch: Patch) -> None:
    patch(TierConnectorWorker, "wake", returns(None))


def step_without_a_pause_until_blocks_come_back(patch: Patch) -> None:
    """As it was when the simulation found it."""
    real = EngineCore._finish

    def finish(self, step, runner_output):
        outputs = real(self, step, runner_output)
        self._is_stalled = self._is_stalled and not step.awaits_blocks
        return outputs

    patch(EngineCore, "_finish", finish)


MUTANTS = (
    Mutant("use what a store gives unverified", Fault.STORE_CORRUPT, use_what_a_store_gives_unverified),
    Mutant("believe failed loads", Fault.STORE_CORRUPT, believe_failed_loads),
    Mutant("keep for ever what is saved", Fault.STORE_CRASH, keep_for_ever_what_is_saved),
    Mutant("free what is saved before it is copied", Fault.STORE_CRASH, free_what_is_saved_before_it_is_copied),
    Mutant("never unpin in the store", Fault.STORE_FULL, never_unpin_in_the_store),
    Mutant("forget to say that the tier has answered", Fault.STORE_LOSS, forget_to_say_that_the_tier_has_answered),
    Mutant("step without a pause until blocks come back", Fault.STORE_FREEZE, step_without_a_pause_until_blocks_come_back),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defect_is_found(mutant, monkeypatch):
    mutant.apply(monkeypatch.setattr)
    assert any(map(mutant.finds, range(NUM_RUNS))), f"{NUM_RUNS} runs saw nothing wrong"
