"""A device without a GPU: copies that are done later, in order within a stream and in any order between streams.

Owns the streams and when their work is done, which a seeded source of randomness decides: at a submission, at a wait, or when
the test says so. What a real device may reorder is reordered here, and what it may not is not. The device's memory is a tensor
in host memory that only its streams should touch. Takes the place of ``core.block_copier.CudaCopyQueue``.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from core.block_copier import TensorBlockCopier
from core.kv.pool_region import KVPoolRegion

SHARE_OF_WORK = 0.3  # how likely a stream does its next piece of work when it gets the chance
NUM_SLOTS = 6  # of a copier of a pool

Work = Callable[[], object]


class DelayedDevice:
    """Streams and the order in which their work is done. Any thread."""

    def __init__(self, seed: int, share: float = SHARE_OF_WORK) -> None:
        self._random = random.Random(seed)
        self._share = share
        self._lock = threading.RLock()
        self._streams: list[DelayedStream] = []
        self.num_late = 0  # pieces of work that only a wait for them got done

    def new_stream(self) -> DelayedStream:
        """Return a stream, ordered with no other."""
        with self._lock:
            self._streams.append(DelayedStream(self))
            return self._streams[-1]

    def new_copier(self, rows: torch.Tensor, num_slots: int) -> TensorBlockCopier:
        """Return a copier with a stream of its own. ``rows`` [num_blocks, block_bytes] uint8 is memory of this device."""
        return TensorBlockCopier(rows, self.new_stream(), num_slots)

    def holding(self, pool: KVPoolRegion) -> KVPoolRegion:
        """Return a pool as if its memory were that of this device."""
        assert pool.buffer is not None
        row_bytes = pool.block_bytes // pool.layout.num_planes
        rows = torch.frombuffer(pool.buffer, dtype=torch.uint8).view(-1, row_bytes)
        return replace(pool, buffer=None, memory_fd=None, device="cuda:0", new_copier=partial(self.new_copier, rows, NUM_SLOTS))

    def go_on(self) -> None:
        """Let each stream, in any order, do a part of its work."""
        with self._lock:
            for stream in self._random.sample(self._streams, len(self._streams)):
                while stream.work and self._random.random() < self._share:
                    stream.do_next()

    def finish(self) -> None:
        """Let all streams do all their work: wait for the device."""
        with self._lock:
            for stream in self._streams:
                stream.do_until(stream.num_submitted)

    @property
    def lock(self) -> threading.RLock:
        """Held while work is submitted or done."""
        return self._lock


class DelayedStream:
    """Work in order, some of it not done yet."""

    def __init__(self, device: DelayedDevice) -> None:
        self._device = device
        self.work: deque[Work] = deque()
        self.num_submitted = self.num_done = 0

    def submit(self, copy: Work) -> DelayedEvent:
        """Queue a piece of work after all others; see ``core.block_copier.CopyQueue``."""
        with self._device.lock:
            self.work.append(copy)
            self.num_submitted += 1
            event = DelayedEvent(self._device, self, self.num_submitted)
            self._device.go_on()
        return event

    def do_next(self) -> None:
        """Do the oldest piece of work."""
        self.work.popleft()()
        self.num_done += 1

    def do_until(self, number: int) -> None:
        """Do all work up to the piece with this number, counted from 1."""
        with self._device.lock:
            while self.num_done < number:
                self.do_next()
                self._device.num_late += 1


class DelayedEvent:
    """The end of a piece of work."""

    def __init__(self, device: DelayedDevice, stream: DelayedStream, number: int) -> None:
        self._device = device
        self._stream = stream
        self._number = number

    def query(self) -> bool:
        """Return True if it is done; some work may be done meanwhile, this or other."""
        self._device.go_on()
        return self._stream.num_done >= self._number

    def synchronize(self) -> None:
        """Return once it is done; other streams may have come further, too."""
        self._device.go_on()
        self._stream.do_until(self._number)
