"""The encoder cache as the scheduler accounts for it: the embeddings the worker holds, their users, and their eviction.

Owns a budget in embeddings (rows), the references of requests, and the order of eviction. Embeddings without a reference stay
until their space is needed, and the longest unused are evicted first; a later request with the same item reuses them. The
worker owns the tensors and deletes those that ``take_freed_identifiers`` names. After vLLM's ``EncoderCacheManager``.
"""

from __future__ import annotations

from collections import OrderedDict

from core.request import Request


class EncoderCacheManager:
    """Space for ``cache_size`` embeddings. The unit of every count is one embedding.

    ``num_free_slots`` are empty; ``num_freeable_slots`` are empty or hold embeddings without a reference.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.num_free_slots = cache_size
        self.num_freeable_slots = cache_size
        self._users: dict[bytes, set[str]] = {}  # by identifier: the requests that refer to it
        self._held: dict[str, dict[int, bytes]] = {}  # by request: identifiers by feature index
        self._freeable: OrderedDict[bytes, int] = OrderedDict()  # unused ones with their sizes, the longest unused first
        self._num_embeds: dict[bytes, int] = {}
        self._freed: list[bytes] = []

    # ---- one feature of one request ----------------------------------------------------------------------------------

    def check_and_update_cache(self, request: Request, index: int) -> bool:
        """Take a reference to the embeddings of a feature if they are in the cache; return whether they are."""
        identifier = request.mm_features[index].identifier
        if identifier not in self._users:
            return False
        num_embeds = self._freeable.pop(identifier, 0)
        self.num_freeable_slots -= num_embeds
        self._refer(request, index, identifier)
        return True

    def can_allocate(self, request: Request, index: int, compute_budget: int, num_embeds_to_schedule: int) -> bool:
        """Return True, and make room, if a feature may be computed in addition to ``num_embeds_to_schedule`` embeddings.

        ``compute_budget`` is what the encoder may still compute in this step.
        """
        num_embeds = request.mm_features[index].num_embeds
        needed = num_embeds + num_embeds_to_schedule
        if num_embeds > compute_budget or needed > self.num_freeable_slots:
            return False
        while self.num_free_slots < needed:
            identifier, freed = self._freeable.popitem(last=False)
            self.num_free_slots += freed
            del self._users[identifier], self._num_embeds[identifier]
            self._freed.append(identifier)
        return True

    def allocate(self, request: Request, index: int) -> None:
        """Allocate room for a feature that is not in the cache, after ``can_allocate``; the request refers to it."""
        feature = request.mm_features[index]
        assert feature.identifier not in self._users, f"embeddings of feature {index} of {request!r} are in the cache"
        assert feature.num_embeds <= self.num_free_slots, f"no room for feature {index} of {request!r}"
        self.num_free_slots -= feature.num_embeds
        self.num_freeable_slots -= feature.num_embeds
        self._users[feature.identifier] = set()
        self._num_embeds[feature.identifier] = feature.num_embeds
        self._refer(request, index, feature.identifier)

    def free_encoder_input(self, request: Request, index: int) -> None:
        """Release a feature. The last reference makes its embeddings evictable; until then they stay a hit."""
        held = self._held.get(request.request_id, {})
        identifier = held.pop(index, None)
        if not held:
            self._held.pop(request.request_id, None)
        if identifier is None or identifier in held.values():
            return
        users = self._users[identifier]
        users.remove(request.request_id)
        if not users:
            self._freeable[identifier] = self._num_embeds[identifier]
            self.num_freeable_slots += self._num_embeds[identifier]

    def has(self, identifier: bytes) -> bool:
        """True if the embeddings are in the cache, for any request."""
        return identifier in self._users

    # ---- whole requests, whole entries -------------------------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Release all features of a request."""
        for index in list(self._held.get(request.request_id, ())):
            self.free_encoder_input(request, index)

    def get_cached_input_ids(self, request: Request) -> tuple[int, ...]:
        """Return the features that the request refers to."""
        return tuple(self._held.get(request.request_id, ()))

    def holds(self, request: Request, index: int) -> bool:
        """True if the request refers to the embeddings of a feature."""
        return index in self._held.get(request.request_id, ())

    @property
    def holder_ids(self) -> tuple[str, ...]:
        """The requests with references."""
        return tuple(self._held)

    def forget(self, identifier: bytes) -> None:
        """Drop an entry that is missing on the worker, with all its references. The worker needs no message."""
        if identifier not in self._users:
            return
        for request_id in sorted(self._users[identifier]):
            held = self._held[request_id]
            for index in [index for index, other in held.items() if other == identifier]:
                del held[index]
            if not held:
                del self._held[request_id]
        num_embeds = self._num_embeds.pop(identifier)
        if self._freeable.pop(identifier, None) is None:
            self.num_freeable_slots += num_embeds
        self.num_free_slots += num_embeds
        del self._users[identifier]

    def take_freed_identifiers(self) -> list[bytes]:
        """Return and forget the entries that the worker has to delete, in eviction order, except those that returned since."""
        freed, self._freed = self._freed, []
        return [identifier for identifier in dict.fromkeys(freed) if identifier not in self._users]

    @property
    def identifiers(self) -> set[bytes]:
        """The entries of the cache, evictable ones included."""
        return set(self._users)

    @property
    def usage(self) -> float:
        """Share of the space that requests refer to, 0..1."""
        return 1.0 - self.num_freeable_slots / self.cache_size if self.cache_size else 0.0

    def _refer(self, request: Request, index: int, identifier: bytes) -> None:
        self._users[identifier].add(request.request_id)
        self._held.setdefault(request.request_id, {})[index] = identifier
