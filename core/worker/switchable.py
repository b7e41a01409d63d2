"""The handler of a worker that can switch its role: requests to hand over and all others, at the same time.

Owns nothing but the choice: the kind of a request decides, not the worker's present role, so requests of the former role end
as they began, and those of a router that does not know of a switch yet are served.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.request import EngineCoreOutput, NewRequest
from core.wire.early import PullEarly
from core.wire.messages import Generate
from core.worker.role import RoleHandler, RoleOutput


class SwitchableHandler(RoleHandler):
    """``prefill`` handles requests that are handed off after the first token, ``decode`` all others."""

    def __init__(self, prefill: RoleHandler, decode: RoleHandler) -> None:
        self._prefill = prefill
        self._decode = decode

    def on_generate(self, message: Generate, now: float) -> list[NewRequest]:
        """See ``RoleHandler``."""
        return (self._prefill if message.handoff else self._decode).on_generate(message, now)

    def on_pull_early(self, message: PullEarly, now: float) -> RoleOutput:
        """See ``RoleHandler``."""
        return self._decode.on_pull_early(message, now)

    def on_timer(self, now: float) -> RoleOutput:
        """See ``RoleHandler``."""
        return _both(self._prefill.on_timer(now), self._decode.on_timer(now))

    def next_timer(self) -> float | None:
        """See ``RoleHandler``."""
        times = (self._prefill.next_timer(), self._decode.next_timer())
        return min((time for time in times if time is not None), default=None)

    def on_outputs(self, outputs: Sequence[EngineCoreOutput], now: float) -> RoleOutput:
        """See ``RoleHandler``: each ignores what is not its own, and the prefill handler releases handoffs of no request."""
        return _both(self._prefill.on_outputs(outputs, now), self._decode.on_outputs(outputs, now))

    def on_abort(self, request_id: str) -> RoleOutput:
        """See ``RoleHandler``."""
        return _both(self._prefill.on_abort(request_id), self._decode.on_abort(request_id))

    def on_abort_choice(self, request_id: str, index: int) -> RoleOutput:
        """See ``RoleHandler``."""
        return _both(self._prefill.on_abort_choice(request_id, index), self._decode.on_abort_choice(request_id, index))


def _both(one: RoleOutput, other: RoleOutput) -> RoleOutput:
    """Return the consequences of both."""
    return RoleOutput(
        replies=[*one.replies, *other.replies],
        new_requests=[*one.new_requests, *other.new_requests],
        ended=[*one.ended, *other.ended],
        abort_ids=[*one.abort_ids, *other.abort_ids],
        release_transfer_ids=[*one.release_transfer_ids, *other.release_transfer_ids],
        release_sources=[*one.release_sources, *other.release_sources],
    )
