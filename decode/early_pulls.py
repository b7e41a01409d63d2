"""The early pulls of a decode worker's requests: which blocks of each prompt were announced, and until when they are wanted.

Puts the parts of a handoff that arrive chunk by chunk together. A message that does not continue what is known is ignored, so a
lost or late one only means that less is read early.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from core.request import NewRequest
from core.wire.early import PullEarly
from core.wire.kv import GroupBlocks, KVHandoff
from core.wire.sampling import SamplingParams

DEADLINE_FACTOR = 3.0  # on the predicted time until the prompt is computed
MIN_WAIT_S = 1.0  # predictions of short prompts are rough, and the request passes the router

_NEVER_RUNS = SamplingParams(max_tokens=1)


@dataclass(slots=True)
class _Pull:
    new: NewRequest  # with everything that was announced
    until: float


class AnnouncedEarlyPulls:
    """Early pulls by the request's id on the wire, until the request comes, is aborted, or is overdue."""

    def __init__(self) -> None:
        self._pulls: dict[str, _Pull] = {}

    def on_message(self, message: PullEarly, now: float) -> NewRequest | None:
        """Return what the engine may read now; None if the message adds nothing."""
        known = self._pulls.get(message.request_id)
        new = known.new if known is not None else _begin(message, now)
        handoff = _join(new.kv_handoff, message) if new is not None else None
        if new is None or handoff is None:
            return None
        until = now + max(MIN_WAIT_S, DEADLINE_FACTOR * message.ready_ms / 1e3)
        new = replace(new, kv_handoff=handoff)
        self._pulls[message.request_id] = _Pull(new, until)
        return new

    def pop(self, request_id: str) -> str:
        """Forget a pull; return its name in the engine, empty if there is none."""
        return "" if self._pulls.pop(request_id, None) is None else _name(request_id)

    def pop_due(self, now: float) -> list[str]:
        """Forget the pulls whose requests should have come by now; return their names in the engine."""
        return [self.pop(request_id) for request_id, pull in list(self._pulls.items()) if pull.until <= now]

    def next_timer(self) -> float | None:
        """Return when the next pull is overdue; None without one."""
        return min((pull.until for pull in self._pulls.values()), default=None)


def _name(request_id: str) -> str:
    return f"{request_id}/early"


def _begin(message: PullEarly, now: float) -> NewRequest | None:
    """Return a new pull; None if the message that began it was lost."""
    if not message.prompt_token_ids:
        return None
    return NewRequest(
        request_id=_name(message.request_id),
        prompt_token_ids=message.prompt_token_ids,
        sampling=_NEVER_RUNS,
        arrival_time=now,
        cache_salt=message.cache_salt,
        mm_features=message.mm_features,
        is_early=True,
    )


def _join(known: KVHandoff | None, message: PullEarly) -> KVHandoff | None:
    """Return the handoff of everything that was announced, or None if parts are missing or come from another process.

    A part that begins earlier replaces what is known from there on: its owner has computed the prompt again.
    """
    part, first_token = message.kv_handoff, message.first_token
    if first_token == 0:
        return part
    if known is None or first_token > known.num_tokens or first_token % part.layout.block_size:
        return None
    if (known.incarnation, known.control_address, known.layout) != (part.incarnation, part.control_address, part.layout):
        return None
    if len(known.groups) != len(part.groups):
        return None
    first = first_token // part.layout.block_size
    groups = [_join_group(old, new, first) for old, new in zip(known.groups, part.groups, strict=True)]
    return msgspec.structs.replace(part, groups=tuple(groups))


def _join_group(old: GroupBlocks, new: GroupBlocks, first: int) -> GroupBlocks:
    """Return the blocks of ``old`` before position ``first``, and those of ``new`` from there on.

    A sliding group frees blocks on the way: where it has, and where it has used them again, only later blocks are named.
    """
    if new.first_block > first or not new.block_ids:
        return new
    reused = set(new.block_ids)
    kept = [index for index in range(first - old.first_block) if index < len(old.block_ids)]
    start = max((index + 1 for index in kept if old.block_ids[index] in reused), default=0)
    if old.first_block + start + len(kept[start:]) != first:
        return new
    end = len(kept)
    return msgspec.structs.replace(
        new,
        first_block=old.first_block + start,
        block_ids=old.block_ids[start:end] + new.block_ids,
        generations=old.generations[start:end] + new.generations,
        block_hashes=old.block_hashes[start:end] + new.block_hashes,
    )
