"""The path of one request: its workers, the times, and the reasons of its moves.

Recorded by the simulated router as it acts. Times are the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class WorkerTurn:
    """One worker's turn: from the message with the request until the next one, or the end."""

    engine_id: str
    role: str
    start: float
    has_handoff: bool = False  # it got a handoff


@dataclass(frozen=True, slots=True)
class Setback:
    """A worker has failed the request, or was lost, and the request continued without it."""

    at: float
    engine_id: str
    code: str


@dataclass(slots=True)
class RequestPath:
    """The path of one request through one router: its clients do not change routers."""

    router: str
    submitted_at: float = 0.0
    turns: list[WorkerTurn] = field(default_factory=list)
    setbacks: list[Setback] = field(default_factory=list)
    first_output_at: float | None = None
    last_output_at: float = 0.0
    answered_at: float | None = None  # when its router had the end; a slow client reads it later
    gaps: list[tuple[float, float]] = field(default_factory=list)  # periods without new output

    @property
    def names(self) -> frozenset[str]:
        """All processes on the path."""
        return frozenset((self.router, *(turn.engine_id for turn in self.turns)))

    @property
    def waits_since(self) -> float:
        """When the last worker of the request was lost; when it was submitted, if none was."""
        return self.setbacks[-1].at if self.setbacks else self.submitted_at

    def note_output(self, now: float) -> None:
        """Record new output for the client."""
        self.gaps.append((self.last_output_at or self.submitted_at, now))
        self.first_output_at = now if self.first_output_at is None else self.first_output_at
        self.last_output_at = now

    def start_of_turn(self, engine_id: str, at: float) -> float:
        """Return since when a worker had the request that it lost at a time."""
        starts = [turn.start for turn in self.turns if turn.engine_id == engine_id and turn.start <= at]
        return max(starts, default=self.submitted_at)

    def start_of_handoff(self) -> float:
        """Return when the prompt was sent to the worker that made the handoff."""
        starts = [turn.start for turn in self.turns if turn.role == "prefill"]
        return max(starts, default=self.submitted_at)
