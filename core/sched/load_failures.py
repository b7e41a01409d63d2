"""KV that could not be loaded: which requests it concerns, and what becomes of them.

A connector reports failures by request (``failed_recving``, asynchronous loads) or by block (``invalid_block_ids``). The policy
is *fail*: each request that would compute on such KV ends with an error, and nothing of the invalid part stays a hit. Called
by ``Scheduler.update_from_output`` before any output of the step is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from core.errors import TransferError
from core.kv.spec import ceil_div
from core.request import KVConnectorOutput, Request, RequestStatus
from core.sched.state import SchedulerState
from core.wire.messages import ErrorInfo


@dataclass(slots=True, frozen=True)
class AffectedRequest:
    """A request that relies on invalid blocks; ``position`` is the first of them in its block table."""

    request: Request
    position: int
    block_ids: list[int]

    @property
    def tail_block_ids(self) -> list[int]:
        """The first invalid block and all that follow: their content depends on it."""
        return self.block_ids[self.position :]


def handle_load_failures(
    state: SchedulerState, output: KVConnectorOutput, num_scheduled_tokens: Mapping[str, int]
) -> dict[str, ErrorInfo]:
    """Return the error of every request that a failed load ends. Their output of this step must not be used."""
    failed = _handle_invalid_blocks(state, output.invalid_block_ids, num_scheduled_tokens)
    return failed | _handle_failed_recving(state, output.failed_recving)


def _handle_failed_recving(state: SchedulerState, failed_recving: Mapping[str, ErrorInfo]) -> dict[str, ErrorInfo]:
    """Keep the failures of requests that still load; one that was aborted meanwhile has nothing left to fail."""
    return {
        request_id: error
        for request_id, error in failed_recving.items()
        if (request := state.requests.get(request_id)) and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    }


def _handle_invalid_blocks(
    state: SchedulerState, invalid_block_ids: set[int], num_scheduled_tokens: Mapping[str, int]
) -> dict[str, ErrorInfo]:
    """End every request that holds an invalid block, loading or running, and take the bad tails out of the prefix cache.

    Raises: RuntimeError with several KV cache groups, where a block id does not name one table position.
    """
    manager = state.kv_cache_manager
    num_unknown = sum(not 0 < block_id < manager.block_pool.num_blocks for block_id in invalid_block_ids)
    state.num_ignored_reports += num_unknown
    if len(invalid_block_ids) == num_unknown:
        return {}
    if len(manager.kv_cache_config.groups) > 1:
        raise RuntimeError("invalid_block_ids names blocks of one KV cache group; with several, report failed_recving")
    holders = chain(state.kv_holding_waiting, state.running)
    failed: dict[str, ErrorInfo] = {}
    for affected in find_affected_requests(state, holders, invalid_block_ids, num_scheduled_tokens):
        manager.evict_blocks(affected.tail_block_ids)
        message = f"the KV of block {affected.position} of the prompt could not be loaded"
        failed[affected.request.request_id] = ErrorInfo(
            code=TransferError.code,
            message=message,
            http_status=TransferError.http_status,
            retryable=TransferError.retryable,
        )
    return failed


def find_affected_requests(
    state: SchedulerState,
    requests: Iterable[Request],
    invalid_block_ids: set[int],
    num_scheduled_tokens: Mapping[str, int],
) -> list[AffectedRequest]:
    """Return the requests that rely on an invalid block, in the given order.

    Only blocks of tokens that were valid before the step are looked at; those that the step filled are nobody's load:

        table   | 0 | 1 | 2 | 3 | 4 |      4 blocks looked at: ceil(C / block_size)
        tokens  |---- C ------|-- scheduled --|
    """
    manager = state.kv_cache_manager
    block_size = manager.kv_cache_config.groups[0].spec.block_size
    affected: list[AffectedRequest] = []
    for request in requests:
        num_valid = request.num_computed_tokens - num_scheduled_tokens.get(request.request_id, 0)
        block_ids = manager.get_block_ids(request.request_id)[0]
        looked_at = block_ids[: ceil_div(num_valid, block_size)]
        position = next((i for i, block_id in enumerate(looked_at) if block_id in invalid_block_ids), None)
        if position is not None:
            affected.append(AffectedRequest(request, position, block_ids))
    return affected
