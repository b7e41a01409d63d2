"""Detects whether an engine makes progress: the age of the current step, against the usual time of such steps.

Owns the times of steps by their size class, and the time of the last progress. The engine's thread reports events; any thread
may take a ``reading``. Knows nothing of what a step computes. Times are arguments, so the simulation uses it too.

Progress is a message received or a step done. An engine that sleeps without work is not stalled; one that sleeps with a
message in its inbox has been stalled since that message arrived.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from core.wire.progress import stall_bound_s

MAX_KNOWN_SIZES = 1024
STEP_SPREAD = 3.0  # a step may take so many times as long as others of its size class: twice the tokens, and a busier machine
_SLOT_S = 10.0
_NUM_SLOTS = 7  # of ten seconds: the last minute, and the part of a slot that has passed
_MEMORY = 0.8  # weight of all earlier steps of a size at the next one
_LEAST_RESTART_BOUND_S = 10.0
_RESTART_FACTOR = 2.0
_MAX_LOOK_GAP_S = 3.0  # heartbeats look more often: after a longer gap the whole process stood still
_MAX_FIRST_S = 10.0  # of a first step's time that tells something of the next one; what took longer was compilation
_OUTLIER_SHARE = 0.4  # of the bound, as which a step that outlasted it counts


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a step computes, as far as it decides how long it takes."""

    num_tokens: int = 0
    num_requests: int = 0
    num_images: int = 0

    @property
    def size_class(self) -> tuple[int, int, int]:
        """Equal for steps within a factor of two: kernels are chosen, compiled and tuned by about that."""
        return self.num_tokens.bit_length(), self.num_requests.bit_length(), self.num_images.bit_length()


@dataclass(frozen=True, slots=True)
class StepReading:
    """The progress of an engine at one moment; seconds.

    ``is_warming_up``: the current step is the first of its size, whose usual time is unknown. ``restart_bound_s`` is later than
    ``bound_s``, by which routers leave the worker: that costs little if the engine comes back, a restart costs its cache.
    """

    stalled_s: float = 0.0  # since the last progress while there is work, without the pauses seen here; 0 without work
    since_progress_s: float = 0.0  # the same, with all pauses of the process
    slowest_step_s: float = 0.0  # of the last minute, first steps of a size apart
    predicted_step_s: float = 0.0
    is_warming_up: bool = False
    restart_bound_s: float = _LEAST_RESTART_BOUND_S

    @property
    def bound_s(self) -> float:
        """After how long without progress the engine is stalled, unless it warms up."""
        return stall_bound_s(self.slowest_step_s, self.predicted_step_s)

    @property
    def is_restart_due(self) -> bool:
        """True if only a new process is likely to help."""
        return self.stalled_s > self.restart_bound_s


@dataclass(frozen=True, slots=True)
class FirstSteps:
    """How first steps are judged: ``bound_s`` is how long one may take while no step times are known.

    A device that ``compiles_shapes`` may take any time for the first step of a size class. On other devices the times of
    other classes predict the first step of a class; ``known`` is a step that has been timed, in seconds.
    """

    bound_s: float = math.inf
    compiles_shapes: bool = True
    known: tuple[StepSize, float] | None = None


class StepTimes:
    """What steps took by size class. Beyond ``MAX_KNOWN_SIZES`` classes the oldest is forgotten, and is a first again."""

    def __init__(self, compiles_shapes: bool = True) -> None:
        self._compiles_shapes = compiles_shapes
        self._means: dict[tuple[int, int, int], float] = {}
        self._firsts: set[tuple[int, int, int]] = set()  # whose mean is the time of their first step
        self._slots = [(-_NUM_SLOTS, 0.0)] * _NUM_SLOTS  # (number of the slot, slowest step in it)

    def is_first(self, size: StepSize) -> bool:
        """True if nothing that has ended says how long such a step takes."""
        return size.size_class not in self._means and (self._compiles_shapes or not self._comparable_means(size))

    def predict_s(self, size: StepSize) -> float:
        """Return what such a step may take, by those of lately; 0 if nothing is known."""
        mean = self._means.get(size.size_class)
        if mean is None:
            known = self._comparable_means(size) if not self._compiles_shapes else {}
            mean = max((seconds * _growth(key, size.size_class) for key, seconds in known.items()), default=0.0)
        return STEP_SPREAD * mean

    def slowest_s(self, now: float) -> float:
        """Return the slowest step of the last minute."""
        oldest = int(now / _SLOT_S) - _NUM_SLOTS + 1
        return max((slowest for number, slowest in list(self._slots) if number >= oldest), default=0.0)

    def note(self, size: StepSize, seconds: float, now: float) -> None:
        """Learn from a step that has ended.

        One that outlasted the bound counts as a part of it: each stall may at most double the bound. So an engine that has
        become slow is soon left in peace, and one that hangs again is noticed soon.
        """
        key = size.size_class
        if self.is_first(size):
            self._remember(key, min(seconds, _MAX_FIRST_S))
            return
        bound_s = stall_bound_s(self.slowest_s(now), self.predict_s(size))
        if seconds > bound_s:
            seconds = bound_s * _OUTLIER_SHARE
        if key not in self._means:
            self._remember(key, seconds)
        self._means[key] = seconds if key in self._firsts else _MEMORY * self._means[key] + (1 - _MEMORY) * seconds
        self._firsts.discard(key)
        number = int(now / _SLOT_S)
        before, slowest = self._slots[number % _NUM_SLOTS]
        self._slots[number % _NUM_SLOTS] = (number, max(seconds, slowest if before == number else 0.0))

    def _comparable_means(self, size: StepSize) -> dict[tuple[int, int, int], float]:
        """Return the mean times of the classes that tell how long such a step takes: with images only those that have some."""
        return {key: seconds for key, seconds in list(self._means.items()) if (key[2] > 0) >= (size.num_images > 0)}

    def _remember(self, key: tuple[int, int, int], seconds: float) -> None:
        if len(self._means) >= MAX_KNOWN_SIZES:
            oldest = next(iter(self._means))
            del self._means[oldest]
            self._firsts.discard(oldest)
        self._means[key] = seconds
        self._firsts.add(key)

    def __len__(self) -> int:
        return len(self._means)


def _growth(known: tuple[int, int, int], wanted: tuple[int, int, int]) -> float:
    """Return how many times as long a step of one class takes as one of another, if its time grows with its largest count."""
    return float(2 ** max(0, *(there - here for here, there in zip(known, wanted, strict=True))))


class StepWatch:
    """Follows one engine. Senders call ``on_message``, one at a time; the engine's thread calls the other methods.

    ``step_size`` returns the size of the step in hand, or of the last one until the next is decided. Beyond the bound
    of ``first_steps`` a first step is judged as any other.
    """

    def __init__(self, step_size: Callable[[], StepSize], first_steps: FirstSteps) -> None:
        self._step_size = step_size
        self._warm_up_s = first_steps.bound_s
        self._times = StepTimes(first_steps.compiles_shapes)
        if first_steps.known is not None:
            self._times.note(*first_steps.known, now=0.0)
        self._progress_at = 0.0
        self._num_put = 0
        self._num_taken = 0
        self._waiting_since = 0.0  # when the oldest message came that has not been taken
        self._is_busy = False
        self._has_begun = False
        self._step_at: float | None = None
        self._looked_at: float | None = None
        self._looked_progress_at: float | None = None  # the last progress as of then
        self._paused_s = 0.0  # for which the whole process stood still since that

    def on_message(self, now: float) -> None:
        """A message is about to be put into the inbox."""
        if self._num_put == self._num_taken:
            self._waiting_since = now
        self._num_put += 1

    def take(self, now: float) -> None:
        """The engine has taken a message."""
        self._num_taken += 1
        self._note_progress(now)

    def rest(self) -> None:
        """The engine is about to sleep until a message comes."""
        self._has_begun = True
        self._is_busy = False

    def begin_step(self, now: float) -> None:
        """The engine decides what it computes next, and computes it."""
        self._note_progress(now)
        self._step_at = now

    def end_step(self, now: float) -> None:
        """The step in hand is done."""
        if self._step_at is not None:
            self._times.note(self._step_size(), now - self._step_at, now)
            self._step_at = None
        self._note_progress(now)

    def reading(self, now: float) -> StepReading:
        """Return how the engine does. Any thread."""
        since = self._stalled_since()
        paused_s = self._look(since, now)
        since_progress_s = 0.0 if since is None else max(0.0, now - since)
        stalled_s = max(0.0, since_progress_s - paused_s)
        has_step, size, slowest_s = self._step_at is not None, self._step_size(), self._times.slowest_s(now)
        is_first = not self._has_begun or (has_step and self._times.is_first(size))
        predicted_s = self._times.predict_s(size) if has_step else 0.0
        restart_bound_s = max(_LEAST_RESTART_BOUND_S, _RESTART_FACTOR * stall_bound_s(slowest_s, predicted_s))
        return StepReading(
            stalled_s=stalled_s,
            since_progress_s=since_progress_s,
            slowest_step_s=slowest_s,
            predicted_step_s=predicted_s,
            is_warming_up=is_first and stalled_s <= self._warm_up_s,
            restart_bound_s=self._warm_up_s if is_first else restart_bound_s,
        )

    def _look(self, since: float | None, now: float) -> float:
        """Return for how long since then the whole process stood still: its engine could not make progress."""
        if since != self._looked_progress_at:
            self._looked_progress_at, self._paused_s = since, 0.0
        if self._looked_at is not None:
            self._paused_s += max(0.0, now - self._looked_at - _MAX_LOOK_GAP_S)
        self._looked_at = now
        return self._paused_s

    def _stalled_since(self) -> float | None:
        if self._is_busy:
            return self._progress_at
        if self._num_put > self._num_taken:
            return max(self._progress_at, self._waiting_since)
        return None

    def _note_progress(self, now: float) -> None:
        self._has_begun = True
        self._progress_at = now
        self._is_busy = True
