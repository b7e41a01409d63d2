"""Releases handoffs that no engine will read, so that the server does not keep their blocks until the lease ends.

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
from core.wire.engine_calls import PLUGIN_VALUE

MAX_KEPT = 512  # handoffs that may be released; older ones end with their lease
MAX_KEPT_CHARS = 64 << 20  # in all of them; a handoff of a million tokens has about a million
_NEEDED = ("do_remote_prefill", "remote_engine_id", PLUGIN_VALUE)  # to release one


class HandoffReleases:
    """The handoffs that the server has made for this agent. Belongs to the event loop."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server
        self._params: OrderedDict[str, dict[str, Any]] = OrderedDict()  # by transfer id
        self._num_chars = 0  # of the plug-in's values in them
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, transfer_id: str, params: dict[str, Any]) -> None:
        """Note a handoff by what the server says of it. Those of other connectors than ours are not released."""
        value = params.get(PLUGIN_VALUE)
        if not isinstance(value, str):
            return
        self._params[transfer_id] = {name: params[name] for name in _NEEDED if name in params}
        self._num_chars += len(value)
        while len(self._params) > MAX_KEPT or self._num_chars > MAX_KEPT_CHARS:
            self._take(next(iter(self._params)))

    def release(self, transfer_ids: Sequence[str]) -> None:
        """Begin to release handoffs; unknown ones are ignored."""
        found = [self._take(transfer_id) for transfer_id in transfer_ids if transfer_id in self._params]
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

    def _take(self, transfer_id: str) -> dict[str, Any]:
        params = self._params.pop(transfer_id)
        self._num_chars -= len(params[PLUGIN_VALUE])
        return params

    async def _send(self, found: Sequence[dict[str, Any]]) -> None:
        for params in found:
            with contextlib.suppress(EngineDead):  # the lease ends by itself
                await self._server.refuse(params)
