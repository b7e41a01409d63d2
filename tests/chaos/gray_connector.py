"""The p2p connector with two gray failures; the workers of a chaos run load it as ``gray_connector:make_connector``.

``connector.extra.gray`` names a folder. While the file ``<engine_id>.hang`` exists there, the worker's engine thread stands
still inside its step while the event loop lives on; while ``<engine_id>.blackhole`` does, its reads of other workers' blocks
do not end. Nothing here runs in the process of the chaos command.
"""

from __future__ import annotations

import time
from pathlib import Path

from connectors.p2p.connector import P2PConnector
from connectors.p2p.transport.factory import TransportSettings, create_transport
from connectors.p2p.transport.interface import PeerId, ReadResult, Transport
from connectors.testing.fault_transport import FaultPlan, FaultTransport
from core.connector import Connector, ConnectorContext
from core.request import KVConnectorOutput

_LOOK_AGAIN_S = 0.02


def make_connector(context: ConnectorContext) -> Connector:
    """Build the connector of a worker."""
    stem = Path(context.config.connector.extra["gray"]) / context.engine_id
    hang, blackhole = stem.with_suffix(".hang"), stem.with_suffix(".blackhole")

    def create(name: str, settings: TransportSettings) -> Transport:
        return BlackholeTransport(create_transport(name, settings), blackhole)

    made = P2PConnector(context, create)
    inner = made.worker.get_transfer_results

    def get_transfer_results(finished_req_ids: set[str]) -> KVConnectorOutput:
        while hang.exists():
            time.sleep(_LOOK_AGAIN_S)
        return inner(finished_req_ids)

    made.worker.get_transfer_results = get_transfer_results  # type: ignore[method-assign]
    return made


class BlackholeTransport(FaultTransport):
    """Reports no end of a read while ``switch`` exists, except of reads that were cancelled or whose peer was fenced.

    As with the real transport, cancelling does nothing over nixl.
    """

    def __init__(self, inner: Transport, switch: Path) -> None:
        self._switch = switch
        self._looked_at = 0.0
        self._excused: set[int] = set()
        super().__init__(inner, FaultPlan(ignore_cancel=inner.name == "nixl"))

    def poll(self) -> list[ReadResult]:
        """Stall every open read while the switch is on."""
        now = time.monotonic()
        if now >= self._looked_at + _LOOK_AGAIN_S:
            self._looked_at = now
            self._excused &= set(self._numbers.values())
            self.plan.stall = set(self._numbers.values()) - self._excused if self._switch.exists() else set()
        return super().poll()

    def cancel(self, handle: int) -> None:
        """Let the read end, where cancelling can do that."""
        if not self.plan.ignore_cancel and handle in self._numbers:
            self._excused.add(self._numbers[handle])
        super().cancel(handle)

    def remove_peer(self, peer: PeerId) -> None:
        """Let the peer's reads end."""
        self._excused |= {number for handle, number in self._numbers.items() if self._targets[handle][0] == peer}
        super().remove_peer(peer)
