"""Deliberate defects of early pulls, looked for in the short runs of ``kvferry sim --chunks``.

Each replaces one function of the real code by a plausible mistake. ``python -m tests.sim.chunk_mutants`` prints for each
the first of some hundred seeds that finds it, and how.
"""

from __future__ import annotations

import core.sched.admission
import core.sched.running
from connectors.p2p.consumer.verification import SealCheck, Verdict
from core.request import RequestStatus
from core.sched import early_loading
from core.sched.early_pulls import EarlyPulls
from core.sched.scheduler import Scheduler
from decode.early_pulls import AnnouncedEarlyPulls
from kvferry.sim.runs import run_seed
from tests.sim.protocol_mutants import Mutant, Patch, main, returns

NUM_RUNS = 400


def commit_rounds_whose_loads_have_failed(patch: Patch) -> None:
    """Of a preempted or killed prefill worker, too."""
    real = early_loading._settle

    def settle(state, pull, request):
        state.early_pulls.spoiled.discard(request.request_id)
        real(state, pull, request)

    patch(early_loading, "_settle", settle)


def switch_the_seal_check_off(patch: Patch) -> None:
    patch(SealCheck, "verdict", lambda self, seals, digests: Verdict(good=list(self._units)))


def keep_early_pulls_beyond_their_deadline(patch: Patch) -> None:
    patch(AnnouncedEarlyPulls, "pop_due", returns([]))


def preempt_running_requests_before_early_pulls_give_way(patch: Patch) -> None:
    patch(core.sched.running, "give_way", returns(False))


def let_no_early_pull_give_way_to_an_admission(patch: Patch) -> None:
    patch(core.sched.admission, "give_way", returns(False))


def keep_the_early_pull_of_a_request_that_does_not_fit_beside_it(patch: Patch) -> None:
    real = early_loading.give_way
    patch(
        core.sched.admission, "give_way", lambda state, claimant=None: any(_others(state, claimant)) and real(state, claimant)
    )


def _others(state, claimant):
    own = state.early_pulls.get(claimant.early_pull)
    return (pull.round is not None for pull in state.early_pulls if pull is not own)


def keep_the_early_pull_of_a_request_that_is_gone(patch: Patch) -> None:
    real = early_loading.settle_rounds

    def settle_rounds(state):
        for pull in state.early_pulls:
            pull.claimants.clear()
        real(state)

    patch(core.sched.scheduler, "settle_rounds", settle_rounds)


def free_the_blocks_of_an_aborted_round_at_once(patch: Patch) -> None:
    real = early_loading._end_round

    def end_round(state, pull):
        request = pull.round
        if request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.status = RequestStatus.WAITING
        real(state, pull)

    patch(early_loading, "_end_round", end_round)


def forget_that_early_pulls_are_work(patch: Patch) -> None:
    def has_unfinished_requests(self):
        state = self.state
        return bool(state.running or state.waiting or state.kv_holding_waiting or state.grammar_waiting)

    patch(Scheduler, "has_unfinished_requests", has_unfinished_requests)


def wait_for_an_early_pull_that_has_nothing_on_the_way(patch: Patch) -> None:
    def is_arriving(state, request):
        return bool(request.early_pull) and state.early_pulls.get(request.early_pull) is not None

    patch(core.sched.admission, "is_arriving", is_arriving)


def forget_the_blocks_of_a_round_that_was_aborted(patch: Patch) -> None:
    """A running request is preempted although blocks are free in a moment, and those of a pull are lost."""
    patch(EarlyPulls, "remove", returns(None))


MUTANTS = (
    Mutant(commit_rounds_whose_loads_have_failed, 0),
    Mutant(switch_the_seal_check_off, 0),
    Mutant(keep_early_pulls_beyond_their_deadline, 21),
    Mutant(preempt_running_requests_before_early_pulls_give_way, 71),
    Mutant(let_no_early_pull_give_way_to_an_admission, 170),
    Mutant(keep_the_early_pull_of_a_request_that_does_not_fit_beside_it, None),
    Mutant(keep_the_early_pull_of_a_request_that_is_gone, 251),
    Mutant(free_the_blocks_of_an_aborted_round_at_once, 8),
    Mutant(forget_that_early_pulls_are_work, 0),
    Mutant(wait_for_an_early_pull_that_has_nothing_on_the_way, 0),
    Mutant(forget_the_blocks_of_a_round_that_was_aborted, 14),
)


def violations_of(seed: int) -> list[str]:
    """Play a seed; a mistake of the mutant itself is no find."""
    violations = run_seed(seed, is_chunked=True).violations
    assert not any("TypeError" in each or "AttributeError" in each or "NameError" in each for each in violations), violations
    return violations


if __name__ == "__main__":
    main(MUTANTS, NUM_RUNS, violations_of)
