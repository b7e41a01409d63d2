"""Eviction policies of the memory tier: LRU, S3-FIFO and ARC with one interface.

A policy owns the order of the keys and knows no slots, bytes or pins. The caller's ``can_evict`` excludes keys that must stay
(pinned, or not yet on disk). Callers report the blocks of a prompt from its end to its beginning, so that the end is evicted
first: a prefix without its end is still a hit, an end without its prefix never is. docs/kvstore.md says how the default was
chosen.

Sources: J. Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023 (S3-FIFO); N. Megiddo and D. Modha,
"ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar

from core.errors import ConfigError

K = TypeVar("K", bound=Hashable)

_SMALL_SHARE = 0.1  # of the capacity for keys used once: S3-FIFO's small queue, the minimum of ARC's recent list
_MAX_COUNT = 3  # uses that S3-FIFO remembers of a key


class EvictionPolicy(ABC, Generic[K]):
    """Order of the keys in a cache of ``capacity`` keys. A key is inserted, used any number of times, evicted or removed."""

    name: ClassVar[str]

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def insert(self, key: K) -> None:
        """Add a new key."""

    @abstractmethod
    def use(self, key: K) -> None:
        """Record a hit. Unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Forget a key that was removed for another reason. Unknown keys are ignored."""

    @abstractmethod
    def evict(self, can_evict: Callable[[K], bool]) -> K | None:
        """Choose a key that may be evicted and forget it; None if there is none."""

    @abstractmethod
    def candidates(self) -> Iterator[K]:
        """Yield the keys, roughly in the order in which they will be evicted. The policy must not be changed meanwhile."""


class LRU(EvictionPolicy[K]):
    """The least recently used key is evicted first."""

    name = "lru"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._keys: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Add a new key as the most recent."""
        self._keys[key] = None

    def use(self, key: K) -> None:
        """Make the key the most recent."""
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget the key."""
        self._keys.pop(key, None)

    def evict(self, can_evict: Callable[[K], bool]) -> K | None:
        """Choose the least recent key that may be evicted."""
        victim = next((key for key in self._keys if can_evict(key)), None)
        if victim is not None:
            del self._keys[victim]
        return victim

    def candidates(self) -> Iterator[K]:
        """Yield the keys, the least recent first."""
        return iter(self._keys)


class S3FIFO(EvictionPolicy[K]):
    """Three queues: new keys pass a small one, and only those used meanwhile enter the main one, which gives second chances.

    Keys that fell out of the small queue are remembered; if one is inserted again, it enters the main queue at once.
    """

    name = "s3fifo"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_target = max(1, int(capacity * _SMALL_SHARE))
        self._small: OrderedDict[K, int] = OrderedDict()  # key → uses
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Queue a new key; a remembered one skips the small queue."""
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        else:
            self._small[key] = 0

    def use(self, key: K) -> None:
        """Count the use; nothing moves."""
        queue = self._small if key in self._small else self._main
        if key in queue:
            queue[key] = min(_MAX_COUNT, queue[key] + 1)

    def remove(self, key: K) -> None:
        """Forget the key, also as a remembered one."""
        self._small.pop(key, None)
        self._main.pop(key, None)
        self._ghosts.pop(key, None)

    def evict(self, can_evict: Callable[[K], bool]) -> K | None:
        """Go through the queues; each step evicts a key, moves it on, or lowers its count, which bounds the number of steps."""
        for _ in range((_MAX_COUNT + 2) * (len(self._small) + len(self._main))):
            takes_small = self._small and (len(self._small) > self._small_target or not self._main)
            victim = self._step_small(can_evict) if takes_small else self._step_main(can_evict)
            if victim is not None:
                return victim
        return self._evict_any(can_evict)

    def candidates(self) -> Iterator[K]:
        """Yield the small queue, then the main one."""
        return chain(self._small, self._main)

    def _step_small(self, can_evict: Callable[[K], bool]) -> K | None:
        key, uses = self._small.popitem(last=False)
        if uses > 0:
            self._main[key] = 0
            return None
        if not can_evict(key):
            self._small[key] = uses
            return None
        self._ghosts[key] = None
        while len(self._ghosts) > self.capacity - self._small_target:
            self._ghosts.popitem(last=False)
        return key

    def _step_main(self, can_evict: Callable[[K], bool]) -> K | None:
        key, uses = self._main.popitem(last=False)
        if uses == 0 and can_evict(key):
            return key
        self._main[key] = max(0, uses - 1)
        return None

    def _evict_any(self, can_evict: Callable[[K], bool]) -> K | None:
        """Evict from either queue, because all keys of the chosen queue must stay."""
        victim = next((key for key in self.candidates() if can_evict(key)), None)
        if victim is not None:
            self.remove(victim)
        return victim


class ARC(EvictionPolicy[K]):
    """Two LRU lists, of keys used once (recent) and more often (frequent), whose sizes adapt to keys evicted too early.

    ``_target`` is the size that the recent list should have; recently evicted keys are remembered per list. The recent list
    keeps a tenth of the capacity in any case: the blocks of one prompt are inserted together, and must not evict each other.
    """

    name = "arc"

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._floor = capacity * _SMALL_SHARE
        self._target = 0.0
        self._recent: OrderedDict[K, None] = OrderedDict()
        self._frequent: OrderedDict[K, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[K, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K) -> None:
        """Take a new key as recent; a remembered one is frequent, and moves the target towards the list it fell out of."""
        if key in self._recent_ghosts:
            step = max(1.0, len(self._frequent_ghosts) / len(self._recent_ghosts))
            self._target = min(float(self.capacity), self._target + step)
            del self._recent_ghosts[key]
            self._frequent[key] = None
        elif key in self._frequent_ghosts:
            step = max(1.0, len(self._recent_ghosts) / len(self._frequent_ghosts))
            self._target = max(0.0, self._target - step)
            del self._frequent_ghosts[key]
            self._frequent[key] = None
        else:
            self._recent[key] = None

    def use(self, key: K) -> None:
        """Make the key the most recent of the frequent ones."""
        if key in self._recent:
            del self._recent[key]
            self._frequent[key] = None
        elif key in self._frequent:
            self._frequent.move_to_end(key)

    def remove(self, key: K) -> None:
        """Forget the key, also as a remembered one."""
        for keys in (self._recent, self._frequent, self._recent_ghosts, self._frequent_ghosts):
            keys.pop(key, None)

    def evict(self, can_evict: Callable[[K], bool]) -> K | None:
        """Choose from the list that is above its target, else from the other."""
        lists = [(self._recent, self._recent_ghosts), (self._frequent, self._frequent_ghosts)]
        if len(self._recent) <= max(self._target, self._floor):
            lists.reverse()
        for keys, ghosts in lists:
            victim = next((key for key in keys if can_evict(key)), None)
            if victim is not None:
                del keys[victim]
                ghosts[victim] = None
                while len(ghosts) > self.capacity:
                    ghosts.popitem(last=False)
                return victim
        return None

    def candidates(self) -> Iterator[K]:
        """Yield the recent keys, then the frequent ones."""
        return chain(self._recent, self._frequent)


POLICIES: dict[str, type[EvictionPolicy[Any]]] = {policy.name: policy for policy in (LRU, S3FIFO, ARC)}


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """Return a policy by its name.

    Raises:
        ConfigError: no policy has this name.
    """
    if name not in POLICIES:
        raise ConfigError(f"kvstore.eviction = {name!r}: allowed: {', '.join(POLICIES)}", param="kvstore.eviction")
    return POLICIES[name](capacity)
