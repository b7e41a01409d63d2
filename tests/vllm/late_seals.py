"""A pool that seals as one on a device does: by a thread, some time after the step, with the variable ``LATE_SEALS``."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from core.kv.pool_region import KVPoolRegion

VARIABLE = "LATE_SEALS"

delay_s = 0.0  # from a step to its seals


class Step:
    """The step that was just submitted."""

    def synchronize(self) -> None:
        """Return some time after it."""
        time.sleep(delay_s)


def install() -> None:
    """Make the engine of this process one of these."""
    from connectors.vllm import connector

    real = connector.pool_of

    def pool_of(*arguments: Any, **options: Any) -> KVPoolRegion:
        return dataclasses.replace(real(*arguments, **options), bind_thread=lambda: None)

    connector.pool_of = pool_of
    connector.kv_written = lambda device: Step()
