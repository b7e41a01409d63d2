"""Handoffs that no engine will read: the server is told, so that it does not keep their blocks until the lease is over.

vLLM has no route for that. But when it refuses a request, it tells its connector, which releases the handoff that the request
has brought. So a request that must be refused brings the handoff back to the server that has made it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from agent.vllm_server import VllmServer
from core.errors import EngineDead

MAX_KEPT = 512  # handoffs that may be released, up to 0.2 MB each; older ones end with their lease
_OF_PLUGIN = "kvferry"


class HandoffReleases:
    """The handoffs that the server has made for this agent. Belongs to the event loop."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._params: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by transfer id
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, transfer_id: str, params: dict[str, Any]) -> None:
        """Note a handoff by what the server says of it. Those of other connectors than ours are not released."""
        if _OF_PLUGIN not in params:
            return
        self._params[transfer_id] = params
        if len(self._params) > MAX_KEPT:
            self._params.popitem(last=False)

    def release(self, transfer_ids: Sequence[str]) -> None:
        """Begin to release handoffs; unknown ones are ignored."""
        found = [params for transfer_id in transfer_ids if (params := self._params.pop(transfer_id, None)) is not None]
        if found:
            task = asyncio.get_running_loop().create_task(self._send(found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def cancel_all(self) -> list[asyncio.Task[None]]:
        """End what has begun; return the tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def _send(self, found: Sequence[dict[str, Any]]) -> None:
        for params in found:
            with contextlib.suppress(EngineDead):  # the lease ends by itself
                await self._server.refuse(params)
