"""Compares the durations that a simulated worker reports with what the simulation has seen of the same request.

The router takes the rest of a total as *relay*, so the parts of a time always add up, right or wrong. Here each measurement of
a worker is compared with the moments, on the same worker's clock, at which the simulation saw it begin and end:

    computing   from the step that first computes tokens of a request to its first token
    transfer    from the order that reached the p2p agent to the last block, and with the verification to the report

Sees one incarnation of one worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.p2p.metadata import P2PConnectorMetadata
from connectors.reports import LoadEnded
from core.clock import Clock
from core.request import EngineCoreOutput, SchedulerOutput
from core.wire.messages import PrefillDone, TransferUsage
from core.worker.role import choice_id

_ROUNDING_S = 1e-6


class TimingChecks:
    """Compares durations. ``complain`` receives violations."""

    def __init__(self, name: str, clock: Clock, complain: Callable[[str], None]) -> None:
        self._name = name
        self._clock = clock
        self._complain = complain
        self._first_steps: dict[str, float] = {}  # engine request → when it was first given tokens
        self._ended: set[str] = set()  # of these; a later request with this id is another one
        self._orders: dict[str, float] = {}  # engine request → when the agent got the order to load
        self._rows: dict[str, frozenset[int]] = {}
        self._waits: dict[str, float] = {}  # engine request → its wait for a load before its first step
        self._landings: dict[int, float] = {}  # local block → when it was first written since it was ordered
        self.num_compared = 0

    # ---- computing ---------------------------------------------------------------------------------------------------

    def on_scheduled(self, output: SchedulerOutput) -> None:
        """Record the requests whose first tokens this step computes."""
        self._ended |= output.finished_req_ids & self._first_steps.keys()
        for request_id in output.num_scheduled_tokens:
            if request_id not in self._first_steps or request_id in self._ended:
                self._first_steps[request_id] = self._clock.now()
                self._ended.discard(request_id)

    def on_outputs(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Check the reports sent with first tokens."""
        for output in outputs:
            times, loading_s = output.first_token_times, self._waits.pop(output.request_id, 0.0)
            if times is None:
                continue
            self._compare(output.request_id, "computing", times.compute_s, self._since(self._first_steps[output.request_id]))
            if loading_s > times.wait_s + _ROUNDING_S:
                self._complain(f"{self._name}: {output.request_id} has loaded for {loading_s} s, but waited {times.wait_s} s")

    def on_prefill_done(self, message: PrefillDone) -> None:
        """Check the report to the router on a prompt; it covers all choices at once."""
        first_step = self._first_steps[choice_id(message.request_id, 0)]
        self._compare(message.request_id, "prefill", message.prefill_ms / 1e3, self._since(first_step))

    # ---- loads -------------------------------------------------------------------------------------------------------

    def on_order(self, metadata: P2PConnectorMetadata) -> None:
        """Record the loads that the agent begins."""
        for pull in metadata.pulls:
            self._orders[pull.request_id] = self._clock.now()
            self._rows[pull.request_id] = frozenset(pull.local_rows)
            for row in pull.local_rows:
                self._landings.pop(row, None)

    def on_landing(self, block_id: int) -> None:
        """Record the first arrival of bytes; reading them again after a wrong digest counts as verification."""
        self._landings.setdefault(block_id, self._clock.now())

    def on_load_ended(self, ended: LoadEnded) -> None:
        """Check the report of a load."""
        ordered_at, rows = self._orders.pop(ended.request_id, None), self._rows.pop(ended.request_id, frozenset())
        if ordered_at is None or ended.usage is None:
            return
        self._compare(ended.request_id, "loading", _duration_s(ended.usage), self._since(ordered_at))
        if ended.request_id not in self._first_steps or ended.request_id in self._ended:
            self._waits[ended.request_id] = self._since(ordered_at)
        last_landing = max((self._landings[row] for row in rows & self._landings.keys()), default=ordered_at)
        if ended.error is None and ended.usage.transfer_ms / 1e3 < last_landing - ordered_at - _ROUNDING_S:
            self._complain(f"{self._name}: bytes of {ended.request_id} came after the end of its transfer: {ended.usage}")

    def _since(self, moment: float) -> float:
        return self._clock.now() - moment

    def _compare(self, request_id: str, what: str, told_s: float, seen_s: float) -> None:
        self.num_compared += 1
        if abs(told_s - seen_s) > _ROUNDING_S:
            self._complain(f"{self._name}: {what} {request_id} took {seen_s} s, told as {told_s} s")


def _duration_s(usage: TransferUsage) -> float:
    return (usage.transfer_ms + usage.verify_ms) / 1e3
