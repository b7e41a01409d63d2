"""What the metrics and the log say of a worker's requests: tokens, latencies, and how each ended.

Owns their wording and their order. Knows the requests in hand (``core.worker.served``), and no routers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from core.log import event
from core.metrics import WorkerMetrics
from core.request import EngineCoreOutput
from core.wire.early import PrefillProgress
from core.wire.messages import EncodeDone, EncodeFailed, ErrorInfo, PrefillDone, RequestFailed, Tokens
from core.worker.role import Reply
from core.worker.served import Served, ServedRequests

logger = logging.getLogger("core.worker.state")  # as in core.worker.serving


class RequestAccounts:
    """Counts and logs the requests of one worker. Times are seconds of its clock."""

    def __init__(self, metrics: WorkerMetrics, requests: ServedRequests) -> None:
        self._metrics = metrics
        self._requests = requests

    def count(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Count the tokens and ends of one engine step."""
        for output in outputs:
            stats = output.prefill_stats
            if stats is not None:
                self._metrics.count_prompt(
                    stats.num_prompt_tokens, stats.num_local_cached_tokens, stats.num_external_cached_tokens
                )
            if output.transfer_usage is not None and output.transfer_usage.exposed_ms:
                self._metrics.observe_exposed_transfer(output.transfer_usage.exposed_ms / 1e3)
            if output.new_token_ids:
                self._metrics.count_generated(len(output.new_token_ids))
            if output.finish_reason is not None and output.error is None:
                self._metrics.count_finished(output.finish_reason)

    def note(self, served: Served, reply: Reply, now: float) -> None:
        """Record a reply to a request's router: its failure, or its tokens; the places of ended choices become free."""
        if isinstance(reply, RequestFailed | EncodeFailed):
            served.failure = reply.error.code
            self._metrics.count_failed(reply.error.code)
            self.log_failure(reply.request_id, reply.error)
            return
        if isinstance(reply, EncodeDone | PrefillProgress):
            return
        if isinstance(reply, Tokens) and reply.finish_reason is not None:
            self._requests.free_choices(served, 1)
        served.num_output_tokens += len(reply.choices) if isinstance(reply, PrefillDone) else len(reply.token_ids)
        if served.first_token_s is None and served.num_output_tokens:
            served.first_token_s = now - served.arrival_time
            self._metrics.observe_first_token(served.first_token_s)

    def log_failure(self, request_id: str, error: ErrorInfo) -> None:
        """Log why a request has failed."""
        logger.warning(event("request_failed", request_id=request_id, code=error.code, message=error.message))

    def drop(self, request_id: str, outcome: str) -> Served | None:
        """Forget a request that is stopped before its end; return it, None if it is unknown."""
        served = self._requests.forget(request_id)
        if served is not None:
            logger.info(event("finished", request_id=request_id, outcome=outcome, output_tokens=served.num_output_tokens))
        return served

    def finish(self, request_id: str, now: float) -> None:
        """Forget a request that has had its last reply; unknown ids are ignored."""
        served = self._requests.forget(request_id)
        if served is None:
            return
        seconds = now - served.arrival_time
        if not served.failure:
            self._metrics.observe_latency(seconds)
        logger.info(
            event(
                "finished",
                request_id=request_id,
                outcome=served.failure or "served",
                prompt_tokens=served.num_prompt_tokens,
                output_tokens=served.num_output_tokens,
                ttft_ms=(served.first_token_s or 0.0) * 1e3,
                total_ms=seconds * 1e3,
            )
        )
