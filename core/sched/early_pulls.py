"""The early pulls of one engine: prompts of which a prefill worker has sealed a part, and the blocks that are held for them.

Holds; decides nothing (``core.sched.early_loading`` does). An early pull loads the sealed prefix of a prompt in rounds. Each
round is a ``Request`` for a prefix of the prompt that loads and never runs. Its verified blocks are ordinary prefix hits: the
round only keeps them from being evicted until the request itself is admitted. So nothing relies on a round, and it may end at
any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from core.request import Request, RequestStatus
from core.wire.kv import KVHandoff


@dataclass(slots=True)
class EarlyPull:
    """One prompt. ``prompt`` has its tokens and hashes and is never scheduled.

    ``handoff`` covers what can be read now; None = nothing new. ``round`` holds blocks: it loads, or has loaded.
    """

    name: str
    prompt: Request
    handoff: KVHandoff | None = None
    round: Request | None = None
    num_failures: int = 0
    claimants: set[str] = field(default_factory=set)  # the requests that continue with its blocks, once they are here
    num_bytes: int = 0  # of its rounds so far
    num_tokens: int = 0

    @property
    def is_loading(self) -> bool:
        """True while blocks of it may be written."""
        return self.round is not None and self.round.status is RequestStatus.WAITING_FOR_REMOTE_KVS


class EarlyPulls:
    """Early pulls by name, in the order of their arrival. True in a boolean context if there is one."""

    def __init__(self) -> None:
        self._pulls: dict[str, EarlyPull] = {}
        self.spoiled: set[str] = set()  # rounds whose blocks must not be used: their loads failed, or their KV was evicted
        self.leaving: set[str] = set()  # aborted rounds whose blocks are free as soon as the connector says so
        self.num_begun = 0  # rounds, since the start
        self.num_rounds = 0  # that were verified, since the start
        self.num_bytes = 0  # that they read
        self.num_given_way = 0  # pulls that ended because others needed their blocks

    def __bool__(self) -> bool:
        return bool(self._pulls)

    def __iter__(self) -> Iterator[EarlyPull]:
        return iter(list(self._pulls.values()))

    def __len__(self) -> int:
        return len(self._pulls)

    def get(self, name: str) -> EarlyPull | None:
        """Return an early pull; None if there is none of this name."""
        return self._pulls.get(name)

    def add(self, pull: EarlyPull) -> None:
        """Add a new one."""
        self._pulls[pull.name] = pull

    def remove(self, pull: EarlyPull) -> None:
        """Remove one; its round has ended."""
        self._pulls.pop(pull.name, None)

    def rounds(self) -> list[Request]:
        """Return the rounds that hold blocks."""
        return [pull.round for pull in self._pulls.values() if pull.round is not None]

    def spoil_holders(self, tables: Mapping[str, set[int]], invalid: set[int]) -> None:
        """Spoil the rounds that hold an invalid block. ``tables`` are their blocks, by id of the round."""
        self.spoiled.update(name for name, block_ids in tables.items() if not block_ids.isdisjoint(invalid))
