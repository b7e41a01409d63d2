"""Parts shared by the concrete transports: bounds of rows, runs of adjacent rows, and the state of their open reads.

Knows no sockets, memory or threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from connectors.p2p.transport.interface import RowRegion, landing_regions
from core.errors import ProtocolError
from core.struct_types import prepared

T = TypeVar("T")

DEVICE_BACKOFF_S = (0.00002, 0.0002)  # a copy between devices is over soon: between looks, the first and the longest wait
MAX_ROWS = 1 << 24  # of a region; bounds what a consumer keeps per row of a peer
SystemNumber = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]  # what fits a C int: processes, descriptors, devices


@prepared
class RowShape(msgspec.Struct, frozen=True, array_like=True):
    """Number and length of a region's rows, as a peer's metadata gives them for every region."""

    num_rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]
    row_bytes: Annotated[int, msgspec.Meta(ge=1, lt=2**40)]


class Backoff:
    """The wait between looks at reads whose end nothing announces: ``first_s``, then twice as long, up to ``longest_s``."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s, self._longest_s = first_s, longest_s
        self.wait_s = first_s

    def restart(self) -> None:
        """A read was posted."""
        self.wait_s = self._first_s

    def after_look(self, *, has_ended: bool) -> None:
        """A look has found reads that have ended, or none."""
        self.wait_s = self._first_s if has_ended else min(self._longest_s, 2 * self.wait_s)


class Run(NamedTuple):
    """``num_rows`` rows that are adjacent on both sides: one copy."""

    remote: int
    local: int
    num_rows: int


def shapes_of(regions: Sequence[RowRegion]) -> tuple[RowShape, ...]:
    """Return the shapes of the regions, in order."""
    return tuple(RowShape(region.num_rows, region.row_bytes) for region in regions)


def landing_of(ours: Sequence[RowRegion], staging: RowRegion | None, theirs: Sequence[RowShape]) -> tuple[RowRegion, ...]:
    """Return the local regions in which the rows of a peer's regions land, see ``landing_regions``.

    Raises:
        LayoutMismatch: no local region has rows of this size; the message holds both values.
    """
    return landing_regions(ours, staging, [shape.row_bytes for shape in theirs])


def check_rows(rows: Sequence[int], num_rows: int, side: str) -> None:
    """Check that every row lies in a region of ``num_rows`` rows.

    Raises:
        ProtocolError: one does not; ``side`` names the end it belongs to.
    """
    if rows and (min(rows) < 0 or max(rows) >= num_rows):
        bad = next(row for row in rows if not 0 <= row < num_rows)
        raise ProtocolError(f"{side} row {bad} is outside the region of {num_rows} rows")


def check_read(remote: RowShape, local: RowRegion, remote_rows: Sequence[int], local_rows: Sequence[int]) -> None:
    """Check the rows of one read against both regions.

    Raises:
        ProtocolError: lists of different length, an empty read, a row out of range, a local row that is named twice.
    """
    if len(remote_rows) != len(local_rows):
        raise ProtocolError(f"{len(remote_rows)} remote rows cannot go to {len(local_rows)} local rows")
    if not remote_rows:
        raise ProtocolError("a read names no row")
    check_rows(remote_rows, remote.num_rows, "remote")
    check_rows(local_rows, local.num_rows, "local")
    if len(set(local_rows)) != len(local_rows):
        raise ProtocolError("a read writes one local row twice")


def region_at(regions: Sequence[T], index: int) -> T:
    """Return the region of this index.

    Raises:
        ProtocolError: there is no such region.
    """
    if not 0 <= index < len(regions):
        raise ProtocolError(f"region {index} is not one of {len(regions)}")
    return regions[index]


def adjacent_runs(remote_rows: Iterable[int], local_rows: Iterable[int], max_rows: int) -> Iterator[Run]:
    """Merge pairs of rows that are adjacent on both sides into runs of at most ``max_rows``.

    remote | 4 5 6 | 9 |
    local  | 7 8 9 | 2 |   ->  (4, 7, 3), (9, 2, 1)
    """
    run: Run | None = None
    for remote, local in zip(remote_rows, local_rows, strict=True):
        if run and run.num_rows < max_rows and (remote, local) == (run.remote + run.num_rows, run.local + run.num_rows):
            run = Run(run.remote, run.local, run.num_rows + 1)
            continue
        if run:
            yield run
        run = Run(remote, local, 1)
    if run:
        yield run


def decode_metadata(metadata: bytes, kind: type[T], transport: str) -> T:
    """Decode a peer's own description.

    Raises:
        ProtocolError: it is malformed.
    """
    try:
        return msgspec.msgpack.decode(metadata, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, OverflowError) as error:
        raise ProtocolError(f"malformed {transport} metadata: {error}") from None
