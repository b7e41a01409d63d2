"""A pool that has no block for a running request, for a moment, as if others had taken them all."""

from __future__ import annotations

from typing import Any

from core.kv.manager import KVCacheBlocks, KVCacheManager
from core.request import Request, RequestStatus


class SqueezedManager(KVCacheManager):
    """Refuses the next ``num_refusals`` allocations of running requests."""

    num_refusals = 0

    def allocate_slots(  # type: ignore[override]
        self,
        request: Request,
        *arguments: Any,  # noqa: ANN401  passed on
        **options: Any,  # noqa: ANN401
    ) -> KVCacheBlocks | None:
        """Return the blocks, or None while it refuses."""
        if self.num_refusals and request.status is RequestStatus.RUNNING:
            self.num_refusals -= 1
            return None
        return super().allocate_slots(request, *arguments, **options)
