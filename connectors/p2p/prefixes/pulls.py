"""Which requests of a reader wait for an answer about the beginning of their prompt. Runs on the engine thread.

A request asks when it is about to be admitted, and again after each preemption, if its source holds at least a block more than
this worker. It waits for the answer without blocks. A source that has nothing to offer is followed by the next one, as long as
the patience lasts that all share; without an answer by then it computes its prompt.

A *prefix pull* is such a question and what is loaded by its answer. The load itself is a ``PullRequest``, as for a handoff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from connectors.p2p.prefixes.messages import AskPrefix, CancelPrefixAsk, PrefixAnswered, PrefixUnused
from core.request import Request
from core.wire.kv import KVHandoff, KVSource
from core.wire.messages import TransferUsage

DEFAULT_PATIENCE_S = 5.0  # where the router does not say how long computing would take
LEAST_PATIENCE_S = 0.25  # a source answers between two of its steps


@dataclass(slots=True)
class _Round:
    """The sources of a request that were asked since it was preempted last."""

    num_preemptions: int
    num_asked: int = 0
    asked_s: float = 0.0  # until their answers
    is_open: bool = True  # the next one may be asked

    def take_next(self, named: KVSource, least: int) -> KVSource | None:
        """Return the next source that is said to hold at least so many tokens; it counts as asked."""
        if not self.is_open:
            return None
        for source in (named, *named.others)[self.num_asked :]:
            self.num_asked += 1
            if source.num_tokens >= least:
                self.is_open = False
                return source
        return None


class PrefixPulls:
    """Questions by request. ``post`` sends to the event loop; ``block_size`` is that of this worker's blocks."""

    def __init__(self, block_size: int, hash_block_size: int, post: Callable[[object], None], now: Callable[[], float]) -> None:
        self.least_patience_s = LEAST_PATIENCE_S
        self._block_size = block_size
        self._hash_block_size = hash_block_size
        self._post = post
        self._now = now
        self._waiting: dict[str, Request] = {}
        self._rounds: dict[str, _Round] = {}  # by request
        self._answers: dict[str, PrefixAnswered] = {}  # with a handoff, until its load is over

    def is_waiting(self, request: Request) -> bool:
        """True while a question has no answer."""
        return request.request_id in self._waiting

    def ask_if_worthwhile(self, request: Request, num_computed_tokens: int) -> bool:
        """Ask the next source of a request, each once between two preemptions; return True if one has been asked."""
        named = request.kv_source
        if named is None:
            return False
        current = self._rounds.get(request.request_id)
        if current is None or current.num_preemptions != request.num_preemptions:
            current = _Round(request.num_preemptions)
        patience_s = max(self.least_patience_s, named.patience_ms / 1e3) if named.patience_ms else DEFAULT_PATIENCE_S
        patience_s -= current.asked_s
        most = request.num_tokens - 1  # the last token is computed here in any case
        most -= most % self._block_size
        least = num_computed_tokens + self._block_size
        if patience_s <= 0 or most < least:
            return False
        source = current.take_next(named, least)
        if source is None:
            return False
        self._rounds[request.request_id] = current
        self._waiting[request.request_id] = request
        chain = b"".join(request.block_hashes[: most // self._hash_block_size])
        self._post(AskPrefix(request.request_id, source, self._block_size, chain, patience_s))
        return True

    def take_answer(self, answer: PrefixAnswered) -> Request | None:
        """Return the request that an answer belongs to; None if it waits no more. An answer with a handoff is kept."""
        request = self._waiting.pop(answer.request_id, None)
        if request is None:
            return None
        if answer.handoff is not None:
            self._answers[answer.request_id] = answer
        else:
            current = self._rounds[answer.request_id]
            current.asked_s += answer.asked_s
            current.is_open = True
        return request

    def answer_of(self, request_id: str) -> PrefixAnswered | None:
        """Return the answer from which a request loads or is about to; None if it does not."""
        return self._answers.get(request_id)

    def is_late(self, request_id: str) -> bool:
        """True if a request has an answer, and a load that begins now could only fail."""
        answer = self._answers.get(request_id)
        return answer is not None and answer.deadline <= self._now()

    def give_up_answer(self, request_id: str) -> None:
        """The request will be computed: it has waited for blocks until its answer was late."""
        self._post(PrefixUnused(request_id))

    def drop_answer(self, request_id: str) -> None:
        """The load from an answer is over, or not needed."""
        self._answers.pop(request_id, None)

    def stop_waiting(self, request_id: str) -> None:
        """The request has got its blocks without the answer: another connector loads them."""
        if self._waiting.pop(request_id, None) is not None:
            self._post(CancelPrefixAsk(request_id))

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        if self._rounds.pop(request_id, None) is not None:
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
