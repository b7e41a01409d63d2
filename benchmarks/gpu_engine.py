"""What the engine does on one device: decode by batch and context, prefill by length, and what the host does meanwhile.

Owns the engine under test and how its steps are timed. Steps are driven as in a worker, by ``EngineCore.step``; a device is
done when a step's tokens are on the host, so the wall clock is enough. Prompts of one engine begin alike in no two sequences,
and a smaller case takes up the prompts of a larger one, which are cached: only their last tokens are computed again.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import Shape

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import BuiltEngine, build_engine
from core.request import NewRequest
from core.wire.sampling import SamplingParams

Tokens = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSize:
    """What an engine is built for."""

    max_num_seqs: int
    max_context: int
    step_tokens: int
    num_blocks: int = 0  # 0 = what memory allows
    memory_share: float = 0.85  # of the device
    dtype: str = "bfloat16"
    changes: tuple[tuple[str, object], ...] = ()  # further settings, by their paths


def settings(model: Path, size: EngineSize, device: str) -> dict[str, object]:
    """Return the settings of an engine."""
    found: dict[str, object] = {
        "model.name": str(model),
        "model.cache_dir": str(model.parent / "cache"),
        "model.device": device,
        "model.dtype": size.dtype,
        "model.max_model_len": size.max_context,
        "scheduler.max_num_seqs": size.max_num_seqs,
        "scheduler.max_num_batched_tokens": size.step_tokens,
        "scheduler.async_scheduling": "on",  # as on a GPU, on a CPU too
        "cache.gpu_memory_utilization": size.memory_share,
    }
    return found | ({"cache.num_blocks": size.num_blocks} if size.num_blocks else {}) | dict(size.changes)


@dataclass(frozen=True, slots=True)
class HostTime:
    """Milliseconds of one step, means over some: all of it, the scheduler's part, and the device's.

    The last one is None on a CPU, and where the profiler is not let see what the device does.
    """

    wall_ms: float
    scheduler_ms: float
    device_ms: float | None

    @property
    def idle_share(self) -> float | None:
        """How much of a step the device has nothing to do: what of the host's work is not hidden."""
        return None if self.device_ms is None else max(0.0, 1 - self.device_ms / self.wall_ms)


class EngineBench:
    """An engine and the measurements on it. ``device`` is "cuda" or "cpu"."""

    def __init__(self, model: Path, shape: Shape, size: EngineSize, device: str) -> None:
        self.shape = shape
        self.device = device
        self.built: BuiltEngine = build_engine(load_config(overrides=settings(model, size, device)), SystemClock())
        self.engine = self.built.engine
        self.dtype_bytes = 2 if size.dtype != "float32" else 4
        self._count = 0
        self._prompts = Prompts(shape.vocab)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the pool holds."""
        return (self.built.num_blocks - 1) * self.built.layout.block_size

    def fits(self, batch: int, context: int) -> bool:
        """Say whether so many sequences of this length have room at a time."""
        return batch * (context + self.built.layout.block_size) <= self.num_cached_tokens

    def decode_rate(self, batch: int, context: int, num_steps: int) -> float:
        """Return output tokens per second of ``batch`` sequences with ``context`` tokens each."""
        names = self._start([self._prompts.kept(number, context) for number in range(batch)], 4 * num_steps + 64)
        self._step_until_all_decode(names)
        for _ in range(2):
            self.engine.step()
        begin = time.perf_counter()
        num_tokens = sum(len(output.new_token_ids) for _ in range(num_steps) for output in self.engine.step())
        elapsed = time.perf_counter() - begin
        self._abort(names)
        return num_tokens / elapsed

    def prefill_s(self, num_tokens: int, repeats: int) -> float:
        """Return the median time from a prompt's arrival to its first token; nothing of it is cached."""
        times = []
        for _ in range(repeats + 1):  # the first one is not counted
            begin = time.perf_counter()
            names = self._start([self._prompts.new(num_tokens)], 1)
            self._finish()
            times.append(time.perf_counter() - begin)
        assert names
        return statistics.median(times[1:])

    def host_time(self, batch: int, context: int, num_steps: int) -> HostTime:
        """Time steps of a decode batch, first by themselves, then under the profiler for what the device does."""
        names = self._start([self._prompts.kept(number, context) for number in range(batch)], 4 * num_steps + 64)
        self._step_until_all_decode(names)
        scheduler_s, restore = _timed(self.engine.scheduler, ("schedule", "update_from_output"))
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.engine.step()
        wall_s = time.perf_counter() - begin
        restore()
        device_s = (self._device_s(num_steps) or None) if self.device == "cuda" else None
        self._abort(names)
        ms = 1e3 / num_steps
        return HostTime(wall_s * ms, sum(scheduler_s) * ms, None if device_s is None else device_s * ms)

    def close(self) -> None:
        """Give the device's memory back."""
        self.engine.shutdown()
        self.built.pool.close()
        del self.engine, self.built
        release_memory()

    def _device_s(self, num_steps: int) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num_steps):
                self.engine.step()
            torch.cuda.synchronize()
        return busy_s(profile.events())

    def _start(self, prompts: Sequence[Tokens], num_tokens: int) -> list[str]:
        names = []
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        for prompt in prompts:
            self._count += 1
            names.append(f"r{self._count}")
            self.engine.add_request(NewRequest(request_id=names[-1], prompt_token_ids=prompt, sampling=sampling))
        return names

    def _step_until_all_decode(self, names: Sequence[str]) -> None:
        waiting = set(names)
        while waiting:
            assert self.engine.has_work(), "the sequences do not fit into the pool"
            waiting -= {output.request_id for output in self.engine.step() if output.new_token_ids}

    def _abort(self, names: Sequence[str]) -> None:
        self.engine.abort_requests(names)
        self._finish()

    def _finish(self) -> None:
        while self.engine.has_requests():
            self.engine.step()


class Prompts:
    """Random prompts. ``kept`` gives the same one for the same number, longer or shorter."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._last_seed = 1 << 20

    def kept(self, number: int, num_tokens: int) -> Tokens:
        return self._draw(number, num_tokens)

    def new(self, num_tokens: int) -> Tokens:
        self._last_seed += 1
        return self._draw(self._last_seed, num_tokens)

    def _draw(self, seed: int, num_tokens: int) -> Tokens:
        drawn: Tokens = np.random.default_rng(seed).integers(3, self._vocab, num_tokens).tolist()
        return drawn


def busy_s(events: Any) -> float:  # noqa: ANN401 - the profiler's own
    """Return the seconds in which the device did something: the union of its events' times."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total, end = 0.0, float("-inf")
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total / 1e6


def release_memory() -> None:
    """Give back what is not used any more."""
    import gc

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _timed(target: object, names: Sequence[str]) -> tuple[list[float], Callable[[], None]]:
    """Have the seconds of every call of these methods noted, until the second function is called."""
    seconds: list[float] = []
    originals = {name: getattr(target, name) for name in names}

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: object, **kwargs: object) -> Any:  # noqa: ANN401
            begin = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - begin)

        return call

    for name, method in originals.items():
        setattr(target, name, timed(method))

    def restore() -> None:
        for name in originals:
            delattr(target, name)

    return seconds, restore
