"""The clients of a simulation: each sends one request, may leave, and checks every token that it gets.

A wrong token, an undeclared error, a missing end or two ends are violations. Knows the router's updates, nothing of workers.
"""

from __future__ import annotations

from collections.abc import Callable

from core.errors import Cancelled, KVFerryError, RequestError, error_codes
from core.wire.messages import ErrorInfo
from core.wire.sampling import SamplingParams
from kvferry.sim.plan import RequestPlan
from kvferry.sim.request_path import RequestPath
from router.dispatch.timing import FirstTokenTiming, HandoffReport, SecondTokenTiming
from router.dispatch.types import ChoiceUpdate, Submission, Update

_ROUNDING_MS = 1e-6
ROUTER_LOST = "router_lost"  # the connection to the router broke: what an HTTP client sees when the router dies
DECLARED_CODES: frozenset[str] = frozenset(error_codes()) - {KVFerryError.code, RequestError.code} | {ROUTER_LOST}


class Client:
    """One request from its submission to its end. ``complain`` receives violations."""

    def __init__(self, plan: RequestPlan, complain: Callable[[str], None], *, has_tier: bool = False) -> None:
        self.plan = plan
        self.has_tier = has_tier
        self.outcome = ""  # error code, or "ok"; empty while it runs
        self.message = ""
        self.has_left = False
        self.was_cut = False  # by its router, because it did not read
        self.last_read_at = plan.at  # of a slow client
        self.ended_at: float | None = None
        self.report: HandoffReport | None = None
        self.path = RequestPath(plan.router, submitted_at=plan.at)
        self.ended_choices: list[int] = []  # by their text, since the router last heard of any
        self._complain = complain
        self._tokens: list[list[int]] = [[] for _ in range(plan.n)]
        self._finish_reasons: list[str | None] = [None] * plan.n
        self._error: ErrorInfo | None = None

    @property
    def is_over(self) -> bool:
        """True after the end."""
        return bool(self.outcome)

    @property
    def fallback_reason(self) -> str:
        """The reason why KV was computed instead of loaded; empty if it was loaded."""
        return self.report.cost.fallback_reason if self.report is not None else ""

    def on_update(self, update: Update) -> None:
        """Check an update: each token must be the one of a run without faults."""
        if self.is_over:
            self._complain(f"{self.plan.name}: an update after its end")
        if self._error is not None:
            self._complain(f"{self.plan.name}: an update after its error")
        self.report = update.handoff or self.report
        self._error = update.error
        for choice in update.choices:
            self._on_choice(choice)

    def _on_choice(self, choice: ChoiceUpdate) -> None:
        index, name, tokens = choice.index, f"{self.plan.name}/{choice.index}", self._tokens[choice.index]
        if self._finish_reasons[index] is not None and not self._has_text_ended(index):
            self._complain(f"{name}: tokens after its finish reason")
        tokens += choice.token_ids
        if tuple(tokens) != self.plan.expected[: len(tokens)]:
            self._complain(f"{name}: got {tokens}, expected {list(self.plan.expected)}")
        self._finish_reasons[index] = self._finish_reasons[index] or choice.finish_reason
        if self._finish_reasons[index] is None and self._has_text_ended(index):
            self._finish_reasons[index] = "stop"
            self.ended_choices.append(index)

    def on_end(self, error: ErrorInfo | None, now: float) -> None:
        """Check the end: everything was delivered, or an error was."""
        if error != self._error:
            self._complain(f"{self.plan.name}: ended with {error}, but was told {self._error}")
        if self.report is not None:
            self._check_report(self.report)
        if error is None:
            self._check_complete()
        elif error.code == Cancelled.code and not self.has_left:
            self._complain(f"{self.plan.name}: cancelled, but the client has not left: {error.message}")
        self.end(error.code if error is not None else "ok", error.message if error is not None else "", now)

    def end(self, outcome: str, message: str, now: float) -> None:
        """Record the end, once."""
        if self.is_over:
            self._complain(f"{self.plan.name}: ended as {self.outcome}, and again as {outcome}")
        if outcome != "ok" and outcome not in DECLARED_CODES:
            self._complain(f"{self.plan.name}: ended with the undeclared error {outcome}: {message}")
        self.outcome, self.message, self.ended_at = outcome, message, now

    def _has_text_ended(self, index: int) -> bool:
        """True if the client saw the end of a choice before its worker did."""
        return self.plan.text_ends_after is not None and len(self._tokens[index]) >= self.plan.text_ends_after

    def _check_complete(self) -> None:
        wanted = "stop" if self.plan.stop_token_ids else "length"
        for index, tokens in enumerate(self._tokens):
            if self._has_text_ended(index):
                continue
            if tuple(tokens) != self.plan.expected or self._finish_reasons[index] != wanted:
                got = f"{tokens} ({self._finish_reasons[index]})"
                self._complain(f"{self.plan.name}/{index}: ended with {got}, expected {list(self.plan.expected)} ({wanted})")

    def _check_report(self, report: HandoffReport) -> None:
        """The parts of both times add up, and no count exceeds its maximum."""
        first, second, cost = report.first_token, report.second_token, report.cost
        if first is not None and second is not None:
            self._check_times(first, second)
        if cost.recomputed_tokens and not cost.fallback_reason:
            self._complain(f"{self.plan.name}: tokens were computed again for no reason: {cost}")
        most = self.plan.n * len(self.plan.prompt_token_ids)
        may_load_again = self.has_tier  # on each worker, and with its output after a preemption
        if not may_load_again and (cost.transferred_tokens > most or cost.recomputed_tokens > most):
            self._complain(f"{self.plan.name}: {most} prompt tokens in all, told as {cost}")

    def _check_times(self, first: FirstTokenTiming, second: SecondTokenTiming) -> None:
        parts = [first.encode_ms or 0.0, first.queue_ms, first.prefill_ms, first.relay_ms]
        more_parts = [second.relay_ms, second.queue_ms, second.transfer_ms, second.verify_ms, second.first_step_ms]
        for name, total_ms, found in (("first", first.total_ms, parts), ("second", second.total_ms, more_parts)):
            if min(found) < 0 or abs(sum(found) - total_ms) > _ROUNDING_MS:
                self._complain(f"{self.plan.name}: the time to the {name} token, {total_ms} ms, is told as {found}")


def submission_of(plan: RequestPlan) -> Submission:
    """Return the client's submission to the router."""
    return Submission(
        request_id=plan.name,
        prompt_token_ids=plan.prompt_token_ids,
        sampling=SamplingParams(max_tokens=plan.max_tokens, stop_token_ids=plan.stop_token_ids),
        n=plan.n,
        priority=plan.priority,
        cache_salt=plan.cache_salt,
        kv_load_failure_policy=plan.policy,
        mm_features=plan.mm_features,
        media=plan.media,
    )
