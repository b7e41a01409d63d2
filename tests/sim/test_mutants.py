"""Deliberate defects: each breaks one rule that the design rests on, and the simulation must notice.

A simulation that finds nothing proves nothing unless it can find something. Each mutant replaces one function of the real code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

import connectors.async_worker
import connectors.p2p.consumer.verification
import connectors.p2p.worker
import core.sched.load_failures
import core.sched.scheduler
import router.dispatch.dispatcher
import router.dispatch.worker_messages
from connectors.p2p.actions import PostRead
from connectors.p2p.consumer.load import Load
from connectors.p2p.consumer.pull import PullProtocol
from connectors.p2p.consumer.verification import SealCheck, Verdict
from connectors.p2p.producer.leases import LeaseTable
from connectors.p2p.scheduler import P2PConnectorScheduler
from connectors.p2p.transfer.executor import TransferExecutor
from connectors.p2p.transfer.staging import StagingArea
from connectors.p2p.worker import P2PConnectorWorker
from core.engine.core import EngineCore
from core.kv.coordinator import KVCacheCoordinator
from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.kv.pool import BlockPool
from core.kv.seals import SEAL_BYTES
from core.kv.single_type import RecyclingManager
from core.kv.spec import SlidingWindowSpec
from core.worker.serving import Serving
from kvferry.sim.cluster import SimCluster
from kvferry.sim.draw_plan import draw_plan
from kvferry.sim.faults import Fault
from kvferry.sim.race_plan import draw_race_plan
from kvferry.sim.transport import SimTransport
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.handoffs import Handoffs
from router.dispatch.worker_messages import TokensLost

pytestmark = pytest.mark.slow

Patch = Callable[[object, str, object], None]  # monkeypatch.setattr


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect and the faults under which it shows, None = a race plan. ``apply`` gets ``monkeypatch.setattr``."""

    name: str
    kinds: tuple[Fault, ...] | None
    apply: Callable[[Patch], None]
    num_runs: int = 60  # within which it must be found
    seed: int = 0  # played first: one that finds it

    def finds(self, seed: int) -> bool:
        plan = draw_plan(seed, self.kinds) if self.kinds is not None else draw_race_plan(seed)
        violations = SimCluster(plan).run().violations
        assert not any("TypeError" in each or "AttributeError" in each for each in violations), (
            violations
        )  # of the mutant itself
        return bool(violations)


def returns(value: object) -> Callable[..., object]:
    return lambda *_args, **_kwargs: value


# ---- seals and generations


def accept_every_seal(patch: Patch) -> None:
    patch(SealCheck, "verdict", lambda self, seals, digests: Verdict(good=list(self._units)))


def accept_every_digest(patch: Patch) -> None:
    patch(connectors.p2p.consumer.verification, "_find_corruption", returns(None))


def never_break_seals(patch: Patch) -> None:
    patch(BlockPool, "break_seals", returns(None))


def break_seals_when_the_step_has_run(patch: Patch) -> None:
    real_break, real_finish = BlockPool.break_seals, EngineCore.finish_launched_steps
    late: dict[BlockPool, list] = {}

    def break_seals(self, blocks):
        late.setdefault(self, []).extend(blocks)

    def finish_launched_steps(self):
        pool = self.scheduler.kv_cache_manager.block_pool
        real_break(pool, late.pop(pool, []))
        return real_finish(self)

    patch(BlockPool, "break_seals", break_seals)
    patch(EngineCore, "finish_launched_steps", finish_launched_steps)


def read_seals_before_the_data(patch: Patch) -> None:
    real_post, real_ended = TransferExecutor._post, TransferExecutor._ended
    early: dict[tuple[TransferExecutor, int], bytes] = {}  # by the owner's block: race plans have one owner

    def post(self, command):
        transport = self._peers.get(command.peer)
        if isinstance(command, PostRead) and transport is not None:
            seals = transport._peers[command.peer].regions[1].buffer
            for remote in command.remote_rows:
                early[self, remote] = bytes(seals[remote * SEAL_BYTES : (remote + 1) * SEAL_BYTES])
        real_post(self, command)

    def ended(self, read, error, seals=b""):
        found = real_ended(self, read, error, seals)
        if not found.seals:
            return found
        return dataclasses.replace(found, seals=b"".join(early[self, remote] for remote in read.command.remote_rows))

    patch(TransferExecutor, "_post", post)
    patch(TransferExecutor, "_ended", ended)


def look_at_seals_when_they_are_asked_for(patch: Patch) -> None:
    """The defect of an owner that answers reads in order, but looks before earlier answers have left."""
    patch(SimTransport, "_has_to_wait", returns(False))


def begin_to_read_seals_when_they_are_ordered(patch: Patch) -> None:
    patch(TransferExecutor, "_has_to_wait", returns(False))
    patch(TransferExecutor, "_why_too_early", returns(None))


def seal_what_was_not_computed(patch: Patch) -> None:
    real = KVCacheManager.seal_blocks

    def seal_blocks(self, request, num_computed_tokens):
        real(self, request, num_computed_tokens + 16)

    patch(KVCacheManager, "seal_blocks", seal_blocks)


# ---- leases


def release_leases_early(patch: Patch) -> None:
    real = LeaseTable.grant

    def grant(self, transfer_id, request_id, num_blocks, now):
        self._terms = dataclasses.replace(self._terms, grant_s=0.01, renew_s=0.01)
        real(self, transfer_id, request_id, num_blocks, now)

    patch(LeaseTable, "grant", grant)


def never_expire_leases(patch: Patch) -> None:
    patch(LeaseTable, "expire", returns([]))
    patch(LeaseTable, "next_expiry", returns(None))


def free_blocks_in_spite_of_the_lease(patch: Patch) -> None:
    real = P2PConnectorScheduler.request_finished

    def request_finished(self, request, block_ids):
        _, handoff = real(self, request, block_ids)
        return False, handoff

    patch(P2PConnectorScheduler, "request_finished", request_finished)


# ---- quarantine


def free_quarantined_blocks_at_once(patch: Patch) -> None:
    patch(core.sched.scheduler, "quarantine_blocks", returns(None))


def never_release_quarantine(patch: Patch) -> None:
    patch(connectors.p2p.worker, "_end_quarantine", returns(None))


def report_no_open_rows(patch: Patch) -> None:
    patch(Load, "open_rows", returns(()))


# ---- invalid blocks


def believe_failed_loads(patch: Patch) -> None:
    real = connectors.async_worker.add_load_ended

    def add_load_ended(ended, output):
        real(dataclasses.replace(ended, error=None, invalid_block_ids=()), output)

    patch(connectors.async_worker, "add_load_ended", add_load_ended)


def keep_the_tokens_of_failed_loads(patch: Patch) -> None:
    real = core.sched.load_failures._roll_back

    def roll_back(state, affected, error):
        num_computed = affected.request.num_computed_tokens
        real(state, affected, error)
        affected.request.num_computed_tokens = num_computed

    patch(core.sched.load_failures, "_roll_back", roll_back)


def offer_a_failed_load_again(patch: Patch) -> None:
    real = P2PConnectorScheduler.update_state_after_alloc

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        offer = self._offers.get(request.request_id)
        real(self, request, blocks, num_external_tokens)
        if offer is not None and num_external_tokens:
            self._offers[request.request_id] = offer

    patch(P2PConnectorScheduler, "update_state_after_alloc", update_state_after_alloc)


# ---- prefix cache


def share_blocks_that_are_loading(patch: Patch) -> None:
    real = KVCacheManager.allocate_slots

    def allocate_slots(self, *args, **kwargs):
        return real(self, *args, **{**kwargs, "delay_cache_blocks": False})

    patch(KVCacheManager, "allocate_slots", allocate_slots)


def lose_a_block_when_freeing(patch: Patch) -> None:
    real = BlockPool.free_blocks

    def free_blocks(self, ordered_blocks):
        real(self, list(ordered_blocks)[1:])

    patch(BlockPool, "free_blocks", free_blocks)


# ---- groups and sizes of blocks


def load_a_group_into_the_blocks_of_another(patch: Patch) -> None:
    real = P2PConnectorScheduler._pull_request

    def pull_request(self, request, offer, blocks, num_external_tokens):
        return real(self, request, offer, KVCacheBlocks(tuple(reversed(blocks.blocks))), num_external_tokens)

    patch(P2PConnectorScheduler, "_pull_request", pull_request)


def forget_a_token_of_the_window_too_early(patch: Patch) -> None:
    real = SlidingWindowSpec.num_skipped_tokens

    def num_skipped_tokens(self, num_computed_tokens):
        return min(num_computed_tokens, real(self, num_computed_tokens) + 1)

    patch(SlidingWindowSpec, "num_skipped_tokens", num_skipped_tokens)


def describe_less_than_the_window(patch: Patch) -> None:
    real = P2PConnectorScheduler._describe_group

    def describe_group(self, group_id, ids, hashes, start=0):
        first = next((position for position, block_id in enumerate(ids) if block_id), 0)
        is_window = first > 0 and first + 1 < len(hashes)
        return real(self, group_id, [*[0] * (first + 1), *ids[first + 1 :]] if is_window else ids, hashes, start)

    patch(P2PConnectorScheduler, "_describe_group", describe_group)


def hash_a_block_that_lacks_its_first_tokens(patch: Patch) -> None:
    patch(RecyclingManager, "withhold_first_block", returns(None))


def go_back_to_where_a_group_holds_nothing(patch: Patch) -> None:
    patch(KVCacheCoordinator, "find_boundary", lambda self, _, num_tokens: self.floor_to_boundary(num_tokens))


def give_back_staged_rows_of_cancelled_reads(patch: Patch) -> None:
    real = TransferExecutor._cancel

    def cancel(self, read_id):
        real(self, read_id)
        read = self._reads.get(read_id)
        if read is not None and read.staged is not None:
            self._staging.give_back(read.staged)
            read.staged = None

    patch(TransferExecutor, "_cancel", cancel)


def take_the_tokens_of_a_block_one_too_far(patch: Patch) -> None:
    real = StagingArea.convert

    def convert(self, staged, read, theirs):
        shifted = tuple(copy._replace(remote_start=max(0, copy.remote_start - 1)) for copy in read.copies)
        real(self, staged, dataclasses.replace(read, copies=shifted), theirs)

    patch(StagingArea, "convert", convert)


# ---- engine and worker


def forget_to_wake_the_engine(patch: Patch) -> None:
    def report(self, report):
        self._reports.append(report)

    patch(P2PConnectorWorker, "report", report)


def sleep_while_others_load(patch: Patch) -> None:
    """Whoever comes meanwhile is only late: the end of the load wakes the engine."""
    real = EngineCore.has_work

    def has_work(self):
        state = self.scheduler.state
        return self._is_woken or (real(self) and (bool(state.running) or not state.kv_holding_waiting))

    patch(EngineCore, "has_work", has_work)


def sleep_with_work(patch: Patch) -> None:
    real = EngineCore.finish_launched_steps

    def finish_launched_steps(self):
        outputs = real(self)
        self._is_stalled = not outputs
        return outputs

    patch(EngineCore, "finish_launched_steps", finish_launched_steps)


def ignore_lost_connections(patch: Patch) -> None:
    patch(PullProtocol, "on_disconnected", returns([]))
    patch(PullProtocol, "on_timer", returns([]))


# ---- router


def drop_a_token_at_replay(patch: Patch) -> None:
    real = router.dispatch.dispatcher.resuming_generate

    def resuming_generate(request, now):
        message = real(request, now)
        if request.attempt.number == 1:
            return message
        choices = [
            msgspec.structs.replace(choice, output_token_ids=choice.output_token_ids[1:] or choice.output_token_ids)
            for choice in message.choices
        ]
        return msgspec.structs.replace(message, choices=tuple(choices))

    patch(router.dispatch.dispatcher, "resuming_generate", resuming_generate)


def deliver_repeated_tokens_again(patch: Patch) -> None:
    real = router.dispatch.worker_messages._check

    def check(request, item):
        real(request, item)
        request.output_token_ids[item.index] = request.output_token_ids[item.index][: item.position]

    patch(router.dispatch.worker_messages, "_check", check)


def forget_deadlines(patch: Patch) -> None:
    patch(Dispatcher, "on_timer", returns([]))
    patch(Serving, "_expire", returns([]))


def end_twice(patch: Patch) -> None:
    real = Dispatcher.abort

    def abort(self, request_id, reason, now):
        actions = real(self, request_id, reason, now)
        return actions + actions[-1:]

    patch(Dispatcher, "abort", abort)


_FROZEN = (Fault.STALL, Fault.FREEZE)
_LATE = (Fault.STALL, Fault.READ_ERROR, Fault.ABORT, Fault.PRESSURE)
# ---- defects that the simulation has found in the real code, as they were


def take_what_an_ended_choice_sends_for_a_gap(patch: Patch) -> None:
    real = router.dispatch.worker_messages._check

    def check(request, item):
        real(request, item)
        if item.position > len(request.output_token_ids[item.index]):
            raise TokensLost("tokens were lost on the way")

    patch(router.dispatch.worker_messages, "_check", check)


def give_up_a_silent_router_without_a_word(patch: Patch) -> None:
    patch(Serving, "give_up_of_link", lambda self, link, *_: Serving.abort_of_link(self, link))


def take_every_reader_that_cannot_for_one_of_another_layout(patch: Patch) -> None:
    real = Handoffs.keep_or_release

    def keep_or_release(self, request, decode):
        handoff, actions = request.handoff, real(self, request, decode)
        if handoff is not None and request.handoff is None:
            request.fallback_reason = "layout"
        return actions

    patch(Handoffs, "keep_or_release", keep_or_release)


_RACE = None
_SILENCE = (Fault.FREEZE, Fault.SLOW, Fault.PARTITION)

MUTANTS = (
    Mutant("accept every seal", _RACE, accept_every_seal),
    Mutant("accept every digest", (Fault.CORRUPT,), accept_every_digest),
    Mutant("never break seals", (), never_break_seals),
    Mutant("break seals when the step has run", _RACE, break_seals_when_the_step_has_run),
    Mutant("read seals before the data", _RACE, read_seals_before_the_data),
    Mutant("look at seals when they are asked for", _RACE, look_at_seals_when_they_are_asked_for, seed=2),
    Mutant("begin to read seals when they are ordered", _RACE, begin_to_read_seals_when_they_are_ordered),
    Mutant("seal what was not computed", (), seal_what_was_not_computed),
    Mutant("release leases early", (), release_leases_early),
    Mutant("never expire leases", (Fault.ROUTER_CRASH,), never_expire_leases),
    Mutant("free blocks in spite of the lease", (Fault.PRESSURE,), free_blocks_in_spite_of_the_lease),
    Mutant("free quarantined blocks at once", _LATE, free_quarantined_blocks_at_once),
    Mutant("never release quarantine", _LATE, never_release_quarantine),
    Mutant("report no open rows", _LATE, report_no_open_rows),
    Mutant("believe failed loads", (Fault.READ_ERROR,), believe_failed_loads),
    Mutant("keep the tokens of failed loads", (Fault.READ_ERROR,), keep_the_tokens_of_failed_loads),
    Mutant("offer a failed load again", (Fault.READ_ERROR,), offer_a_failed_load_again),
    Mutant("share blocks that are loading", (), share_blocks_that_are_loading),
    Mutant("lose a block when freeing", (), lose_a_block_when_freeing),
    Mutant("load a group into the blocks of another", (), load_a_group_into_the_blocks_of_another, seed=5),
    Mutant("forget a token of the window too early", (), forget_a_token_of_the_window_too_early, seed=23),
    Mutant("describe less than the window", (), describe_less_than_the_window, seed=5),
    Mutant("hash a block that lacks its first tokens", (), hash_a_block_that_lacks_its_first_tokens, seed=5),
    Mutant("go back to where a group holds nothing", (Fault.READ_ERROR,), go_back_to_where_a_group_holds_nothing, seed=19),
    Mutant("give back staged rows of cancelled reads", _FROZEN, give_back_staged_rows_of_cancelled_reads, 200, seed=5),
    Mutant("take the tokens of a block one too far", (), take_the_tokens_of_a_block_one_too_far, seed=3),
    Mutant("forget to wake the engine", (), forget_to_wake_the_engine),
    Mutant("sleep with work", (), sleep_with_work),
    Mutant("sleep while others load", (), sleep_while_others_load),
    Mutant("ignore lost connections", (Fault.CRASH,), ignore_lost_connections),
    Mutant("drop a token at replay", (Fault.CRASH,), drop_a_token_at_replay, 200, seed=3),
    Mutant("deliver repeated tokens again", (Fault.REPEAT,), deliver_repeated_tokens_again),
    Mutant("forget deadlines", (Fault.DEADLINE, Fault.SLOW), forget_deadlines, seed=1),
    Mutant("end twice", (Fault.ABORT,), end_twice),
    Mutant("take what an ended choice sends for a gap", (), take_what_an_ended_choice_sends_for_a_gap, seed=5),
    Mutant(
        "give up a silent router without a word",
        (Fault.FREEZE, Fault.SLOW, Fault.PARTITION),
        give_up_a_silent_router_without_a_word,
        seed=39,
    ),
    Mutant("name the wrong reason", (Fault.FREEZE, Fault.CRASH), take_every_reader_that_cannot_for_one_of_another_layout, 200),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_defect_is_found(mutant, monkeypatch):
    mutant.apply(monkeypatch.setattr)
    assert any(map(mutant.finds, (mutant.seed, *range(mutant.num_runs)))), f"{mutant.num_runs} runs saw nothing wrong"
