"""Calls of the API that a worker's engine has of its own, such as vLLM's: the body of a client, and the parts of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from core.tracing import TraceContext
from core.wire.limits import AnyHttpStatus, Count, Name, Text, WholeMilliseconds

PLUGIN_VALUE = "kvferry"  # in the ``kv_transfer_params`` of a handoff by our plug-in for vLLM
_NO_MODEL = "kvferry: no model"  # that any server has


class EngineCall(msgspec.Struct, frozen=True, kw_only=True, tag="call", omit_defaults=True):
    """Post a JSON body to the API of the worker's engine. An ``Abort`` ends it. Only for workers that ``takes_calls``.

    ``deadline_ms`` is a duration from sending; 0 = none.
    """

    request_id: Name
    path: Name
    body: bytes
    deadline_ms: WholeMilliseconds = 0
    trace: TraceContext | None = None  # of the client; None = the call is not traced
    is_release: bool = False  # its body is ``release_body``: a full or draining worker takes it too, as it frees blocks there

    @property
    def needs_steps(self) -> bool:
        """True if the engine computes for it; rendering, counting and refusing need its front end only."""
        return not self.is_release and not self.path.endswith(("render", "count_tokens"))  # or "derender"


class EngineReply(msgspec.Struct, frozen=True, kw_only=True, tag="reply", omit_defaults=True):
    """A part of what the engine's API answers to an ``EngineCall``: status and type in the first part, then bytes in order."""

    request_id: Name
    position: Count  # of this part, from 0
    body: bytes
    status: AnyHttpStatus = 200
    content_type: Text = ""
    is_last: bool = False


def release_body(kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body for ``/v1/completions`` of the vLLM server that has made a handoff: it tells that nothing will read it.

    The server refuses the body, and says so to its connector, which releases the handoff that it brings.
    """
    return {"model": _NO_MODEL, "prompt": [1], "max_tokens": 1, "kv_transfer_params": kv_transfer_params}
