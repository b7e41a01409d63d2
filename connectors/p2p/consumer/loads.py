"""The loads of a consumer that have not been reported: by request, by producer, by deadline."""

from __future__ import annotations

import math
from collections.abc import Iterator

from connectors.p2p.consumer.load import Load, LoadPhase
from connectors.p2p.transport.interface import PeerId


class Loads:
    """Loads in the order of their starts. All lists are copies: loads may end while a caller iterates."""

    def __init__(self) -> None:
        self._loads: dict[str, Load] = {}

    def __iter__(self) -> Iterator[Load]:
        return iter(list(self._loads.values()))

    def __contains__(self, load: Load) -> bool:
        return load.request.request_id in self._loads

    @property
    def num_rows(self) -> int:
        """Local blocks of all loads."""
        return sum(load.num_rows for load in self._loads.values())

    @property
    def producers(self) -> set[PeerId]:
        """The workers that are loaded from."""
        return {load.producer for load in self._loads.values()}

    def add(self, load: Load) -> None:
        """Add a load of a request that has none."""
        assert load not in self, f"{load.request.request_id} is loading already"
        self._loads[load.request.request_id] = load

    def get(self, request_id: str) -> Load | None:
        """Return the load of a request, None if it has none or is reported."""
        return self._loads.get(request_id)

    def remove(self, load: Load) -> None:
        """Remove a load."""
        del self._loads[load.request.request_id]

    def at(self, address: str) -> list[Load]:
        """Return the loads from any incarnation at this control address."""
        return [load for load in self._loads.values() if load.producer.address == address]

    def of(self, peer_id: PeerId) -> list[Load]:
        """Return the loads from this process."""
        return [load for load in self._loads.values() if load.producer == peer_id]

    def connecting_to(self, address: str) -> list[Load]:
        """Return the loads at this control address that wait for a handshake, or for the end of a retiring peer."""
        return [load for load in self.at(address) if load.phase is LoadPhase.CONNECTING]

    def overdue(self, now: float) -> list[Load]:
        """Return the loads whose deadline has come."""
        return [load for load in self._loads.values() if load.deadline <= now]

    def looking_again(self, now: float) -> list[Load]:
        """Return the loads that go on now, after they had found blocks without a seal."""
        return [load for load in self._loads.values() if load.looks_again_at <= now]

    def next_timer(self) -> float:
        """Return the earliest deadline or next look, infinity if there is none."""
        return min((min(load.deadline, load.looks_again_at) for load in self._loads.values()), default=math.inf)
