"""An independent check of one reader's seals: a block is accepted only by the seal of its handoff.

Compares each read seal again, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping

from connectors.p2p.actions import ReadEnded, ReadUnit
from connectors.p2p.consumer.inflight_reads import InflightReads
from core.kv.seals import SEAL_BYTES, Seal, decode_seal


class WrongSeals:
    """The units of one load whose seals, as they were just read, are not those of its handoff."""

    def __init__(self, reads: InflightReads, read: ReadEnded) -> None:
        self._load = load = reads._loads.get(read.read_id)
        self._indices: list[int] = []
        if load is None or not read.seals:
            return
        rows = [decode_seal(read.seals[start : start + SEAL_BYTES]) for start in range(0, len(read.seals), SEAL_BYTES)]
        seals = dict(zip(load.sealing.remote_rows, rows, strict=True))
        units, incarnation = load.request.units, load.producer.incarnation
        self._indices = [index for index in load.sealing.indices if not _is_sealed(units[index], incarnation, seals)]

    def are_accepted(self) -> bool:
        """True if the load uses such a unit nevertheless."""
        return self._load is not None and not self._load._verified.isdisjoint(self._indices)


def _is_sealed(unit: ReadUnit, incarnation: int, seals: Mapping[int, Seal | None]) -> bool:
    for remote_row, expected in zip(unit.remote_rows, unit.expected, strict=True):
        seal = seals[remote_row]
        if seal is None or (seal.incarnation, seal.generation) != (incarnation, expected.generation):
            return False
        if (seal.block_hash, seal.group_id, seal.num_tokens) != (expected.block_hash, expected.group_id, expected.num_tokens):
            return False
    return True
