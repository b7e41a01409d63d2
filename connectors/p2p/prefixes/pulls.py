"""Which requests of a reader wait for an answer about the beginning of their prompt. Runs on the engine thread.

A request asks when it is about to be admitted, and again after each preemption, if its source holds at least a block more than
this worker. It waits for the answer without blocks; without one by the deadline it computes its prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from connectors.p2p.prefixes.messages import AskPrefix, CancelPrefixAsk, PrefixAnswered
from core.request import Request
from core.wire.kv import KVHandoff
from core.wire.messages import TransferUsage

DEFAULT_PATIENCE_S = 5.0  # where the router does not say how long computing would take
LEAST_PATIENCE_S = 0.25  # a source answers between two of its steps


class PrefixPulls:
    """Questions by request. ``post`` sends to the event loop; ``block_size`` is that of this worker's blocks."""

    def __init__(self, block_size: int, hash_block_size: int, post: Callable[[object], None]) -> None:
        self.least_patience_s = LEAST_PATIENCE_S
        self._block_size = block_size
        self._hash_block_size = hash_block_size
        self._post = post
        self._waiting: dict[str, Request] = {}
        self._asked: dict[str, int] = {}  # by request, its preemptions when it asked last
        self._answers: dict[str, PrefixAnswered] = {}  # with a handoff, until its load is over

    def is_waiting(self, request: Request) -> bool:
        """True while a question has no answer."""
        return request.request_id in self._waiting

    def ask_if_worthwhile(self, request: Request, num_computed_tokens: int) -> bool:
        """Ask the source of a request, once between two preemptions; return True if it has been asked."""
        source = request.kv_source
        if source is None or self._asked.get(request.request_id) == request.num_preemptions:
            return False
        if request.has_failed_load or request.skip_reading_prefix_cache:
            return False
        most = request.num_tokens - 1  # the last token is computed here in any case
        most -= most % self._block_size
        if min(source.num_tokens, most) < num_computed_tokens + self._block_size:
            return False
        self._asked[request.request_id] = request.num_preemptions
        self._waiting[request.request_id] = request
        patience_s = max(self.least_patience_s, source.patience_ms / 1e3) if source.patience_ms else DEFAULT_PATIENCE_S
        chain = b"".join(request.block_hashes[: most // self._hash_block_size])
        self._post(AskPrefix(request.request_id, source, self._block_size, chain, patience_s))
        return True

    def asks_again(self, request_id: str) -> bool:
        """True if a request has asked since it was preempted."""
        return self._asked.get(request_id, 0) > 0

    def take_answer(self, answer: PrefixAnswered) -> Request | None:
        """Return the request that an answer belongs to; None if it waits no more. An answer with a handoff is kept."""
        request = self._waiting.pop(answer.request_id, None)
        if request is not None and answer.handoff is not None:
            self._answers[answer.request_id] = answer
        return request

    def answer_of(self, request_id: str) -> PrefixAnswered | None:
        """Return the answer from which a request loads or is about to; None if it does not."""
        return self._answers.get(request_id)

    def drop_answer(self, request_id: str) -> None:
        """The load from an answer is over, or not needed."""
        self._answers.pop(request_id, None)

    def stop_waiting(self, request_id: str) -> None:
        """The request has got its blocks without the answer: another connector loads them."""
        if self._waiting.pop(request_id, None) is not None:
            self._post(CancelPrefixAsk(request_id))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._asked.pop(request_id, None) is not None:
            self._waiting.pop(request_id, None)
            self._post(CancelPrefixAsk(request_id))

    def add_time_asked(self, usage: dict[str, TransferUsage]) -> None:
        """Count the times until the answers as waits before the loads that came from them."""
        for request_id in usage.keys() & self._answers.keys():
            asked_ms = 1e3 * self._answers[request_id].asked_s
            usage[request_id] = msgspec.structs.replace(usage[request_id], queue_ms=asked_ms)


def is_answer_to(handoff: KVHandoff, request: Request, unit: int) -> bool:
    """Return True if an answer covers tokens that were asked for."""
    return 0 < handoff.num_tokens < request.num_tokens and not handoff.num_tokens % unit
