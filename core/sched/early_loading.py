"""Early pulls: read the sealed prefix of a prompt while its prefill worker computes the rest.

    prefill worker |  chunk 1  |  chunk 2  |  chunk 3  | first token
    this worker                | round 1   | round 2   | the request: hits of rounds 1 and 2, loads chunk 3

A round is admitted like a load, by the bound of the whole prompt, after every request of the step. Its blocks become hits when
they are verified. They give way to any request: a pull ends before a running request is preempted, and before a request is
refused its blocks, if all pulls together have what it lacks. The request waits for a round that is loading, and takes over the
hits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from core.kv.block import NULL_BLOCK_ID
from core.kv.hashing import BlockHasher
from core.request import NewRequest, Request, RequestStatus
from core.sched.early_pulls import EarlyPull
from core.sched.finish import finish_requests
from core.sched.state import SchedulerState
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.sampling import SamplingParams

MAX_FAILURES = 2  # failed rounds of one pull; after them the request loads everything itself
_NEVER_RUNS = SamplingParams(max_tokens=1)


# ---- what comes from outside -----------------------------------------------------------------------------------------


def take_early(state: SchedulerState, new: NewRequest, hasher: BlockHasher | None) -> None:
    """Begin an early pull, or let one that has begun read more."""
    pull = state.early_pulls.get(new.request_id)
    if pull is None:
        if state.connector is None or len(state.early_pulls) >= state.config.max_num_seqs:
            return
        pull = EarlyPull(new.request_id, Request(new, hasher))
        state.early_pulls.add(pull)
    if not pull.claimants and pull.num_failures < MAX_FAILURES:
        pull.handoff = new.kv_handoff


def claim_early(state: SchedulerState, request: Request) -> None:
    """Let a request that has come take over its early pull: no further round begins."""
    pull = state.early_pulls.get(request.early_pull) if request.early_pull else None
    if pull is not None:
        pull.claimants.add(request.request_id)
        pull.handoff = None


def end_early(state: SchedulerState, names: Iterable[str]) -> None:
    """End these early pulls, unless a request has claimed them; unknown names are ignored."""
    pulls = [state.early_pulls.get(name) for name in names]
    _end_all(state, [pull for pull in pulls if pull is not None and not pull.claimants])


# ---- within a step ---------------------------------------------------------------------------------------------------


def settle_rounds(state: SchedulerState) -> None:
    """Make the blocks of the rounds that have loaded hits, and end the pulls whose requests are gone."""
    early = state.early_pulls
    early.leaving &= state.awaiting_recving
    for pull in early:
        if pull.round is not None and pull.round.request_id in state.finished_recving_kv_req_ids:
            _settle(state, pull, pull.round)
        if pull.round is not None and not pull.is_loading and pull.round.request_id in early.spoiled:
            _end_round(state, pull)
        if pull.claimants and not any(_is_unfinished(state, request_id) for request_id in pull.claimants):
            _end_all(state, [pull])
    early.spoiled &= {request.request_id for request in early.rounds()}


def is_arriving(state: SchedulerState, request: Request) -> bool:
    """Return True if blocks of the request's early pull are on the way: it is admitted when they are here."""
    pull = state.early_pulls.get(request.early_pull) if request.early_pull else None
    return pull is not None and pull.is_loading


def take_over(state: SchedulerState, request: Request) -> None:
    """End the early pull of a request that has got its blocks, and report what was read early with its first output."""
    pull = state.early_pulls.get(request.early_pull) if request.early_pull else None
    if pull is None:
        return
    if pull.num_bytes:
        state.note_early(request, pull.num_tokens, pull.num_bytes)
    _end_all(state, [pull])


def begin_rounds(state: SchedulerState, num_reserved_blocks: int) -> None:
    """Begin to load what can be read now, as far as free blocks suffice. ``num_reserved_blocks`` stay free for requests."""
    for pull in state.early_pulls:
        if pull.handoff is None or pull.is_loading:
            continue
        if not _begin_round(state, pull, pull.handoff, num_reserved_blocks):
            return


def give_way(state: SchedulerState, claimant: Request | None = None) -> bool:
    """End the newest early pull, the claimant's own last; return False if there is none with blocks.

    Its own may hold blocks of which it needs only some: a sliding group has moved on. Blocks that are being loaded are free a
    moment later: ``state.early_pulls.leaving``.
    """
    own = state.early_pulls.get(claimant.early_pull) if claimant is not None else None
    pulls = [pull for pull in state.early_pulls if pull.round is not None and pull is not own]
    if pulls:
        state.early_pulls.num_given_way += 1
        _end_all(state, pulls[-1:])
    elif own is not None and own.round is not None and claimant is not None:
        take_over(state, claimant)
    else:
        return False
    return True


def count_yielding_blocks(state: SchedulerState, *, with_leaving: bool = False) -> int:
    """Return how many blocks would be free if every early pull gave way, at the end of its reads.

    Blocks that others hold, too, do not count. ``with_leaving`` adds those of the rounds that have given way and still load.
    """
    rounds = {request.request_id for request in state.early_pulls.rounds()}
    if with_leaving:
        rounds |= state.early_pulls.leaving & state.awaiting_recving
    blocks = state.kv_cache_manager.block_pool.blocks
    num_holders = Counter(block_id for request_id in rounds for block_id in _block_ids(state, request_id))
    return sum(blocks[block_id].ref_cnt == count for block_id, count in num_holders.items())


# ---- details ---------------------------------------------------------------------------------------------------------


def _is_unfinished(state: SchedulerState, request_id: str) -> bool:
    request = state.requests.get(request_id)
    return request is not None and not request.status.is_finished


def _settle(state: SchedulerState, pull: EarlyPull, request: Request) -> None:
    """Hash and seal the blocks of a round. A failed round keeps none, not even its verified ones."""
    early, manager = state.early_pulls, state.kv_cache_manager
    usage = state.transfer_usage.pop(request.request_id, None)
    if request.request_id in early.spoiled:
        pull.num_failures += 1
        _end_round(state, pull)
        if pull.num_failures >= MAX_FAILURES:
            pull.handoff = None
        return
    state.finished_recving_kv_req_ids.remove(request.request_id)
    request.status = RequestStatus.WAITING
    manager.cache_blocks(request, request.num_computed_tokens)
    manager.seal_blocks(request, request.num_computed_tokens)
    early.num_rounds += 1
    if usage is not None:
        early.num_bytes += usage.transferred_bytes
        pull.num_bytes += usage.transferred_bytes
        pull.num_tokens += usage.transferred_tokens


def _begin_round(state: SchedulerState, pull: EarlyPull, handoff: KVHandoff, num_reserved_blocks: int) -> bool:
    """Begin the next round if the whole prompt would be admitted now; return False if it lacks blocks.

    The pull keeps its handoff for a later step if blocks are lacking, or if the connector cannot tell yet.
    """
    manager, connector = state.kv_cache_manager, state.connector
    assert connector is not None, "there is no early pull without one"
    covered = _cut(handoff, math.lcm(manager.coordinator.scheduler_block_size, handoff.layout.block_size), pull.prompt)
    if covered is None:
        pull.handoff = None
        return True
    num_held = len(_block_ids(state, pull.round.request_id)) if pull.round is not None else 0
    num_missing = manager.get_num_missing_blocks(pull.prompt) - num_held
    if num_missing > manager.block_pool.num_free_blocks - num_reserved_blocks:
        return False
    # An earlier pull of this name may have a round whose blocks are not free yet.
    request_id = f"{pull.name}/{state.early_pulls.num_begun}"
    request = _round_request(request_id, pull.prompt, covered, manager.hash_block_size)
    blocks, num_local_tokens = manager.get_computed_blocks(request)
    connector.on_new_request(request)
    state.requests[request.request_id] = request
    num_external_tokens, load_kv_async = connector.get_num_new_matched_tokens(request, num_local_tokens)
    has_blocks = False
    if num_external_tokens and load_kv_async:
        allocated = manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=num_local_tokens,
            new_computed_blocks=blocks,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=True,
            full_sequence_must_fit=True,
            reserved_blocks=num_reserved_blocks,
            has_scheduled_reqs=bool(state.running),
        )
        has_blocks = allocated is not None
    if not has_blocks or num_external_tokens is None:  # nothing to load, no answer yet, or no room
        finish_requests(state, [request.request_id], RequestStatus.FINISHED_ABORTED)
        state.finished_req_ids.discard(request.request_id)  # the runner has never had it, and no step is needed to forget it
        if num_external_tokens == 0:
            pull.handoff = None
        return not num_external_tokens
    connector.update_state_after_alloc(request, manager.get_blocks(request.request_id), num_external_tokens)
    request.num_computed_tokens = num_local_tokens + num_external_tokens
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    _end_round(state, pull)  # the next one holds its hits
    pull.round, pull.handoff = request, None
    state.early_pulls.num_begun += 1
    return True


def _round_request(request_id: str, prompt: Request, handoff: KVHandoff, hash_block_size: int) -> Request:
    """Return the request for a prefix of the prompt. It has one token more, the one that its next step would compute."""
    num_tokens = handoff.num_tokens
    new = NewRequest(
        request_id=request_id,
        prompt_token_ids=prompt.all_token_ids[: num_tokens + 1],
        sampling=_NEVER_RUNS,
        arrival_time=prompt.arrival_time,
        cache_salt=prompt.cache_salt,
        kv_handoff=handoff,
        is_early=True,
    )
    request = Request(new, None)
    request.extra_keys = prompt.extra_keys
    request.block_hashes = prompt.block_hashes[: num_tokens // hash_block_size]
    return request


def _cut(handoff: KVHandoff, alignment: int, prompt: Request) -> KVHandoff | None:
    """Return the part of a handoff that fills blocks on both sides and leaves a token to compute; None if there is none."""
    num_tokens = min(handoff.num_tokens, prompt.num_prompt_tokens - 1)
    num_tokens -= num_tokens % alignment
    if num_tokens <= 0:
        return None
    end = num_tokens // handoff.layout.block_size
    return msgspec.structs.replace(
        handoff, num_tokens=num_tokens, groups=tuple(_cut_group(group, end) for group in handoff.groups)
    )


def _cut_group(group: GroupBlocks, end: int) -> GroupBlocks:
    """Return the blocks of a group before position ``end``."""
    num_blocks = max(0, end - group.first_block)
    return msgspec.structs.replace(
        group,
        first_block=min(group.first_block, end),
        block_ids=group.block_ids[:num_blocks],
        generations=group.generations[:num_blocks],
        block_hashes=group.block_hashes[:num_blocks],
    )


def _end_all(state: SchedulerState, pulls: Iterable[EarlyPull]) -> None:
    for pull in pulls:
        _end_round(state, pull)
        state.early_pulls.remove(pull)


def _end_round(state: SchedulerState, pull: EarlyPull) -> None:
    """Give back the blocks of a pull's round, now or when its load has ended. Those that are hits stay hits."""
    request, pull.round = pull.round, None
    if request is None:
        return
    finish_requests(state, [request.request_id], RequestStatus.FINISHED_ABORTED)
    if request.request_id in state.awaiting_recving:
        state.early_pulls.leaving.add(request.request_id)


def _block_ids(state: SchedulerState, request_id: str) -> set[int]:
    tables = state.kv_cache_manager.get_block_ids(request_id)
    return {block_id for block_ids in tables for block_id in block_ids} - {NULL_BLOCK_ID}
