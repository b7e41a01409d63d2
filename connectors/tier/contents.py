"""What routers learn of a tier: the blocks that it is known to have, of the first group of layers with full attention.

The tier's own evictions are known if this process owns it, and otherwise what lookups and loads miss. So routers may expect too
much of a store of its own process, which costs time only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.connector import ContentFollower
from core.kv.spec import FullAttentionSpec, KVCacheSpec
from kvstore.key import StoreKey


class TierContents:
    """Passes on what enters and leaves a tier of this medium. Any thread.

    If it ``is_exact``, all that the tier evicts is passed on, and answers of lookups, which may be late, add nothing.
    """

    def __init__(self, medium: str = "") -> None:
        self._medium = medium
        self.is_exact = False
        self._group_id = 0
        self._publish: ContentFollower | None = None

    def follow(self, publish: ContentFollower) -> None:
        """Pass on to this function."""
        self._publish = publish

    def bind(self, specs: Sequence[KVCacheSpec]) -> None:
        """Choose the group by the specs of all."""
        self._group_id = next((number for number, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec)), 0)

    def store(self, keys: Iterable[StoreKey]) -> None:
        """Record that the tier has these blocks."""
        self._pass_on(keys, ())

    def remove(self, keys: Iterable[StoreKey]) -> None:
        """Record that the tier does not have these blocks."""
        self._pass_on((), keys)

    def answer(self, keys: Sequence[StoreKey], hits: Sequence[bool]) -> None:
        """Record what a lookup has found."""
        if len(hits) == len(keys) and not self.is_exact:
            found = list(zip(keys, hits, strict=True))
            self._pass_on((key for key, is_hit in found if is_hit), (key for key, is_hit in found if not is_hit))

    def _pass_on(self, stored: Iterable[StoreKey], removed: Iterable[StoreKey]) -> None:
        if self._publish is not None:
            self._publish(self._medium, self._hashes(stored), self._hashes(removed))

    def _hashes(self, keys: Iterable[StoreKey]) -> list[bytes]:
        return [key.block_hash for key in keys if key.group_id == self._group_id]
