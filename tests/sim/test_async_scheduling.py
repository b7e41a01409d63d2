"""Clusters in which a step is in flight while the next one is scheduled: what must happen, and defects that must be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from msgspec.structs import replace as replace_struct

import core.sched.inflight_steps
import core.sched.outputs
import core.sched.running
import core.sched.scheduler
from core.engine.kv_sizing import max_in_flight_tokens
from core.testing.hash_model import hash_model_kv_config
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import FIRST_REQUEST_S, draw_plan, draw_shape
from kvferry.sim.faults import Fault
from kvferry.sim.plan import MAX_MODEL_LEN, ClusterPlan
from kvferry.sim.runs import Summary

pytestmark = pytest.mark.slow

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr

_SLOW = (Fault.PRESSURE, Fault.SLOW)


def draw_tight_plan(seed: int) -> ClusterPlan:
    """Return a run in which prompts are computed in many chunks and take each other's blocks, always with a step in flight."""
    plan = draw_plan(seed, (Fault.PRESSURE,), async_scheduling=True)
    scheduler = replace_struct(
        plan.config.scheduler, max_num_batched_tokens=128, long_prefill_token_threshold=16, max_num_seqs=8
    )
    config = replace_struct(plan.config, scheduler=scheduler)
    shape = draw_shape(Random(f"{seed}/shape"), config)
    workers = [replace(worker, num_blocks=shape.num_needed(worker.block_size, scheduler) + 1) for worker in plan.workers]
    requests = [replace(request, at=FIRST_REQUEST_S + 0.02 * index) for index, request in enumerate(plan.requests)]
    return replace(plan, config=config, workers=tuple(workers), requests=tuple(requests))


@pytest.fixture(scope="module")
def runs() -> Summary:
    plans = [*[draw_plan(seed, async_scheduling=True) for seed in range(14)], *map(draw_tight_plan, range(8))]
    summary = Summary()
    for plan in plans:
        summary.add(SimCluster(plan).run())
    return summary


def test_steps_in_flight_change_no_answer_and_leave_nothing(runs):
    assert not runs.failures, [(failure.seed, failure.kinds, failure.violations) for failure in runs.failures]


@pytest.mark.parametrize("happening", ["kept_steps", "pinned_blocks", "preemptions", "quarantined_blocks"])
def test_what_is_to_be_survived_does_happen(happening, runs):
    assert runs.happened[happening] > 0


def test_a_share_of_the_seeds_has_async_scheduling():
    plans = [draw_plan(seed) for seed in range(60)]
    assert 0 < sum(plan.async_scheduling for plan in plans) < len(plans) // 2
    assert "in flight" in "\n".join(next(plan for plan in plans if plan.async_scheduling).describe())


def test_async_scheduling_changes_nothing_else_of_a_plan():
    with_it, without = draw_plan(1, async_scheduling=True), draw_plan(1, async_scheduling=False)
    assert with_it.requests == without.requests
    assert with_it.faults.events == without.faults.events
    assert [worker.step_s for worker in with_it.workers] == [worker.step_s for worker in without.workers]


@pytest.mark.parametrize(("seed", "kinds"), [*[(seed, _SLOW) for seed in (*range(20), 117)], (455, None)])
def test_pools_have_room_for_a_step_in_flight_beside_the_longest_request(seed, kinds):
    plan = draw_plan(seed, kinds, async_scheduling=True)
    num_in_flight = max_in_flight_tokens(plan.config.scheduler)
    longest = max(len(request.prompt_token_ids) + request.max_tokens for request in plan.requests)
    for worker in plan.workers:
        config = hash_model_kv_config(worker.num_blocks, worker.block_size, plan.attentions)
        assert config.max_tokens_of_sequence(num_in_flight, MAX_MODEL_LEN) >= longest


def test_requests_do_not_preempt_themselves_repeatedly_while_loads_hold_blocks():
    plan = draw_plan(31, (Fault.STALL, Fault.READ_ERROR, Fault.ABORT, Fault.PRESSURE), async_scheduling=True)
    result = SimCluster(plan).run()
    assert result.is_good
    assert result.happened["preemptions"] < len(plan.requests)


# ---- defects


def fill_blocks_whoever_has_them_now(patch: Patch) -> None:
    """The blocks that a step completes for requests that have left, reused or rewritten since or not."""

    def filled_blocks(state, departure):
        start = core.sched.inflight_steps._first_written(departure.step, departure.request, departure.start)
        groups = zip(departure.tables, state.kv_cache_manager.kv_cache_config.groups, strict=True)
        for group_id, (blocks, group) in enumerate(groups):
            size = group.spec.block_size
            for block, _ in blocks[start // size : departure.end // size]:
                if not block.is_null:
                    yield block, group_id, size

    patch(core.sched.inflight_steps, "_filled_blocks", filled_blocks)


def give_up_blocks_that_a_step_still_writes(patch: Patch) -> None:
    patch(core.sched.inflight_steps, "_pin", lambda *_: None)


def never_let_go_of_what_a_step_kept(patch: Patch) -> None:
    real = core.sched.scheduler.end_step

    def end_step(state, step):
        step.pinned.clear()
        real(state, step)

    patch(core.sched.scheduler, "end_step", end_step)


def take_tokens_of_void_steps(patch: Patch) -> None:
    real = core.sched.outputs.process_sampled_tokens

    def process_sampled_tokens(state, step, model_output, dropped):
        step.void.clear()
        return real(state, step, model_output, dropped)

    patch(core.sched.scheduler, "process_sampled_tokens", process_sampled_tokens)


def forget_steps_in_flight_at_preemption(patch: Patch) -> None:
    patch(core.sched.running, "detach_from_inflight_steps", lambda *_args, **_kwargs: None)


@pytest.mark.parametrize(
    ("apply", "first"),  # played first is a seed that shows the defect
    [
        (fill_blocks_whoever_has_them_now, 18),
        (forget_steps_in_flight_at_preemption, 3),
        (never_let_go_of_what_a_step_kept, 0),
        (take_tokens_of_void_steps, 3),
    ],
)
def test_defect_is_found(apply, first, monkeypatch):
    apply(monkeypatch.setattr)
    assert any(not SimCluster(draw_tight_plan(seed)).run().is_good for seed in (first, *range(20)))


def test_blocks_that_a_step_still_writes_are_missed_when_they_are_released(monkeypatch):
    give_up_blocks_that_a_step_still_writes(monkeypatch.setattr)
    assert any(not SimCluster(draw_plan(seed, _SLOW, async_scheduling=True)).run().is_good for seed in (14, 15, 29))
