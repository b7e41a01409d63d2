"""What every transport of KV blocks must do: a test class to derive from.

    class TestTcp(TransportSuite):
        factory = f"{__file__}:make_tcp"          # a function without arguments that returns a transport

Owners run in processes of their own, which the tests really kill and freeze. A transport that lives in one process overrides
``start_owner``. Imports pytest; only tests import this module.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, PeerId, ReadResult, Transport
from connectors.testing.absurd_metadata import with_each_replaced
from connectors.testing.transport_owner import HostRegions, HostRows, ProcessOwner, load_factory, row_content
from core.errors import KVFerryError, LayoutMismatch, PeerUnreachable, ProtocolError
from core.kv.seals import SEAL_BYTES

NUM_ROWS = 40
ROW_BYTES = 64 << 10
UNTOUCHED = 0xA5
DEADLINE_S = 30.0
PEER = PeerId("tcp://127.0.0.1:1", 1)


class Owner(Protocol):
    """The owner of the rows that the transport under test reads."""

    metadata: bytes

    def kill(self) -> None:
        """Die without warning."""

    def freeze(self) -> None:
        """Stop answering, with all memory still mapped."""

    def thaw(self) -> None:
        """Continue."""

    def close(self) -> None:
        """Clean up everything."""


class Reader:
    """A transport under test with rows of its own, and the results of its polls. Methods use region 0 by default."""

    def __init__(self, transport: Transport, num_rows: int = NUM_ROWS, row_bytes: int = ROW_BYTES) -> None:
        self.transport = transport
        self._regions = HostRegions(num_rows, row_bytes)
        self.memory, self.seals = self._regions.pool, self._regions.seals
        for rows in (self.memory, self.seals):
            rows.rows[:] = UNTOUCHED
        transport.register(self._regions.regions)
        self.results: dict[int, ReadResult] = {}

    def poll(self, timeout_s: float = 0.0) -> None:
        """Poll once, after waiting as the transfer thread does; every handle must end once."""
        wait_s = self.transport.max_wait_s()
        timeout_ms = 1000 * timeout_s if wait_s is None else min(1000 * timeout_s, 1000 * wait_s)
        zmq.zmq_poll([(pollable, zmq.POLLIN) for pollable in self.transport.pollables()], int(timeout_ms))
        for result in self.transport.poll():
            assert result.handle not in self.results, f"read {result.handle} ended twice"
            self.results[result.handle] = result

    def until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the transport made no progress"
            self.poll(0.05)

    def wait(self, *handles: int) -> list[KVFerryError | None]:
        """Poll until these reads have ended; return their errors."""
        self.until(lambda: self.results.keys() >= set(handles))
        return [self.results[handle].error for handle in handles]

    def read(
        self, remote_rows: Sequence[int], local_rows: Sequence[int], peer: PeerId = PEER, region: int = POOL_REGION
    ) -> KVFerryError | None:
        """Read and wait; return the error, also one that posting raised."""
        try:
            handle = self.transport.post_read(peer, region, remote_rows, local_rows)
        except KVFerryError as error:
            return error
        return self.wait(handle)[0]

    def assert_rows(self, salt: int, remote_rows: Sequence[int], local_rows: Sequence[int], region: int = POOL_REGION) -> None:
        """Check that the local rows have the owner's content."""
        rows = self._rows_of(region)
        for remote, local in zip(remote_rows, local_rows, strict=True):
            content = row_content(salt, remote, rows.shape[1], region)
            assert np.array_equal(rows[local], content), f"row {local} is not the owner's row {remote}"

    def assert_untouched(self, rows: Sequence[int], region: int = POOL_REGION) -> None:
        """Check that these rows were never written."""
        for row in rows:
            assert (self._rows_of(region)[row] == UNTOUCHED).all(), f"row {row} was written"

    def _rows_of(self, region: int) -> npt.NDArray[np.uint8]:
        rows: HostRows = (self.memory, self.seals)[region]
        return rows.rows

    def close(self) -> None:
        """Close the transport, then the memory."""
        self.transport.close()
        self._regions.close()


class TransportSuite:
    """The tests. ``factory`` names the function that makes a transport, for this process and for the owners'."""

    factory: ClassVar[str]

    @classmethod
    def make_transport(cls) -> Transport:
        """Return a new transport."""
        return load_factory(cls.factory)()

    @classmethod
    def start_owner(cls, salt: int, num_rows: int = NUM_ROWS, row_bytes: int = ROW_BYTES) -> Owner:
        """Start an owner with both regions, whose rows hold ``row_content(salt, row, row_bytes, region)``."""
        return ProcessOwner(cls.factory, num_rows, row_bytes, salt)

    @pytest.fixture
    def reader(self) -> Iterator[Reader]:
        """Return a reader without peers."""
        reader = Reader(self.make_transport())
        yield reader
        reader.close()

    @pytest.fixture(scope="class")
    @classmethod
    def owner(cls) -> Iterator[Owner]:
        """Return an owner with salt 1, shared by the tests that leave it unharmed."""
        owner = cls.start_owner(1)
        yield owner
        owner.close()

    @pytest.fixture
    def connected(self, reader: Reader, owner: Owner) -> Reader:
        """Return a reader that is connected to the shared owner."""
        reader.transport.add_peer(PEER, owner.metadata)
        return reader

    @pytest.fixture
    def mortal(self) -> Iterator[Owner]:
        """Return an owner with salt 1 for this test alone."""
        owner = self.start_owner(1)
        yield owner
        owner.close()

    @pytest.fixture
    def facing(self, reader: Reader, mortal: Owner) -> Reader:
        """Return a reader that is connected to the mortal owner."""
        reader.transport.add_peer(PEER, mortal.metadata)
        return reader

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def test_reads_scattered_rows_exactly_and_touches_no_other(self, connected: Reader) -> None:
        remote, local = [7, 3, 21, 39, 0], [30, 2, 11, 4, 39]
        assert connected.read(remote, local) is None
        connected.assert_rows(1, remote, local)
        connected.assert_untouched([row for row in range(NUM_ROWS) if row not in local])

    def test_reads_adjacent_rows(self, connected: Reader) -> None:
        remote, local = list(range(4, 36)), list(range(2, 34))
        assert connected.read(remote, local) is None
        connected.assert_rows(1, remote, local)
        connected.assert_untouched([0, 1, 34, 39])
        assert connected.transport.pool_shape(PEER) in (None, (NUM_ROWS, ROW_BYTES))

    def test_reads_one_remote_row_into_several_local_rows(self, connected: Reader) -> None:
        assert connected.read([5, 5, 5], [1, 2, 3]) is None
        connected.assert_rows(1, [5, 5, 5], [1, 2, 3])

    def test_runs_many_reads_at_once(self, connected: Reader) -> None:
        order = np.random.default_rng(3).permutation(NUM_ROWS).tolist()
        handles = [connected.transport.post_read(PEER, 0, [remote], [local]) for local, remote in enumerate(order)]
        assert connected.wait(*handles) == [None] * NUM_ROWS
        connected.assert_rows(1, order, range(NUM_ROWS))

    def test_reads_more_than_any_window_at_once(self) -> None:
        num_rows, row_bytes = 24, 2 << 20
        owner = self.start_owner(5, num_rows, row_bytes)
        reader = Reader(self.make_transport(), num_rows, row_bytes)
        try:
            reader.transport.add_peer(PEER, owner.metadata)
            order = list(reversed(range(num_rows)))
            assert reader.read(order, range(num_rows)) is None
            reader.assert_rows(5, order, range(num_rows))
        finally:
            reader.close()
            owner.close()

    def test_reads_from_several_owners(self, connected: Reader) -> None:
        second = self.start_owner(2)
        try:
            connected.transport.add_peer(PeerId("second", 1), second.metadata)
            first_read = connected.transport.post_read(PEER, 0, [1, 2], [10, 11])
            second_read = connected.transport.post_read(PeerId("second", 1), 0, [1, 2], [20, 21])
            assert connected.wait(first_read, second_read) == [None, None]
            connected.assert_rows(1, [1, 2], [10, 11])
            connected.assert_rows(2, [1, 2], [20, 21])
        finally:
            second.close()

    def test_is_quiet_when_idle(self, connected: Reader) -> None:
        assert connected.read([1], [1]) is None
        connected.until(lambda: connected.transport.max_wait_s() is None)
        assert connected.transport.poll() == []
        ready = zmq.zmq_poll([(pollable, zmq.POLLIN) for pollable in connected.transport.pollables()], 0)
        assert connected.transport.poll() == []
        assert not ready or connected.transport.max_wait_s() is None

    # ---- the second region ---------------------------------------------------------------------------------------------

    def test_reads_scattered_short_rows_exactly_and_touches_nothing_else(self, connected: Reader) -> None:
        remote, local = [7, 3, 79, 0], [30, 2, 11, 79]
        assert connected.read(remote, local, region=SEAL_REGION) is None
        connected.assert_rows(1, remote, local, SEAL_REGION)
        connected.assert_untouched([row for row in range(2 * NUM_ROWS) if row not in local], SEAL_REGION)
        connected.assert_untouched(range(NUM_ROWS))

    def test_reads_adjacent_short_rows(self, connected: Reader) -> None:
        remote, local = list(range(4, 36)), list(range(NUM_ROWS + 2, NUM_ROWS + 34))
        assert connected.read(remote, local, region=SEAL_REGION) is None
        connected.assert_rows(1, remote, local, SEAL_REGION)
        connected.assert_untouched([NUM_ROWS, NUM_ROWS + 1, NUM_ROWS + 34], SEAL_REGION)

    def test_reads_more_short_rows_than_fit_one_request(self) -> None:
        num_rows = 1500
        owner = self.start_owner(5, num_rows, SEAL_BYTES)
        reader = Reader(self.make_transport(), num_rows, SEAL_BYTES)
        try:
            reader.transport.add_peer(PEER, owner.metadata)
            order = np.random.default_rng(3).permutation(2 * num_rows).tolist()
            assert reader.read(order, range(2 * num_rows), region=SEAL_REGION) is None
            reader.assert_rows(5, order, range(2 * num_rows), SEAL_REGION)
        finally:
            reader.close()
            owner.close()

    def test_reads_both_regions_at_once(self, connected: Reader) -> None:
        long = connected.transport.post_read(PEER, POOL_REGION, [1, 2], [3, 4])
        short = connected.transport.post_read(PEER, SEAL_REGION, [1, 2], [43, 44])
        assert connected.wait(long, short) == [None, None]
        connected.assert_rows(1, [1, 2], [3, 4])
        connected.assert_rows(1, [1, 2], [43, 44], SEAL_REGION)

    def test_refuses_rows_outside_the_region_that_is_read(self, connected: Reader) -> None:
        """The second region has more rows than the first."""
        for remote, local in (([NUM_ROWS], [0]), ([0], [NUM_ROWS])):
            with pytest.raises(ProtocolError):
                connected.transport.post_read(PEER, POOL_REGION, remote, local)
            assert connected.read(remote, local, region=SEAL_REGION) is None
        for remote, local in (([2 * NUM_ROWS], [0]), ([0], [2 * NUM_ROWS])):
            with pytest.raises(ProtocolError):
                connected.transport.post_read(PEER, SEAL_REGION, remote, local)
        connected.assert_untouched(range(NUM_ROWS))

    def test_refuses_a_second_region_of_another_shape_with_both_values(self, owner: Owner) -> None:
        transport, memory = self.make_transport(), HostRegions(NUM_ROWS, ROW_BYTES)
        wider = HostRows(NUM_ROWS, 2 * SEAL_BYTES)
        try:
            transport.register([memory.pool.region, wider.region])
            with pytest.raises(LayoutMismatch, match=rf"{2 * SEAL_BYTES}.*{SEAL_BYTES}"):
                transport.add_peer(PEER, owner.metadata)
            with pytest.raises(PeerUnreachable):
                transport.post_read(PEER, SEAL_REGION, [0], [0])
        finally:
            transport.close()
            memory.close()
            wider.close()

    def test_refuses_an_owner_with_other_regions(self, owner: Owner) -> None:
        transport, memory = self.make_transport(), HostRows(NUM_ROWS, ROW_BYTES)
        try:
            transport.register([memory.region])
            with pytest.raises(LayoutMismatch):
                transport.add_peer(PEER, owner.metadata)
        finally:
            transport.close()
            memory.close()

    # ---- refusals --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("remote_rows", "local_rows"),
        [
            ([NUM_ROWS], [0]),
            ([-1], [0]),
            ([0], [NUM_ROWS]),
            ([0], [-1]),
            ([0, 1], [0]),
            ([0, 1], [4, 4]),
            ([], []),
        ],
    )
    def test_refuses_rows_that_make_no_sense(self, connected: Reader, remote_rows: list[int], local_rows: list[int]) -> None:
        with pytest.raises(ProtocolError):
            connected.transport.post_read(PEER, 0, remote_rows, local_rows)
        assert connected.read([1], [1]) is None
        connected.assert_untouched([row for row in range(NUM_ROWS) if row != 1])

    @pytest.mark.parametrize("region", [-1, 2])
    def test_refuses_a_region_that_does_not_exist(self, connected: Reader, region: int) -> None:
        with pytest.raises(ProtocolError):
            connected.transport.post_read(PEER, region, [1], [1])

    def test_refuses_an_unknown_peer(self, reader: Reader) -> None:
        with pytest.raises(PeerUnreachable):
            reader.transport.post_read(PEER, 0, [1], [1])

    @pytest.mark.parametrize("damage", ["empty", "cut", "noise"])
    def test_refuses_malformed_metadata(self, reader: Reader, owner: Owner, damage: str) -> None:
        metadata = {"empty": b"", "cut": owner.metadata[:-3], "noise": b"\xc1" + owner.metadata}[damage]
        with pytest.raises(ProtocolError):
            reader.transport.add_peer(PEER, metadata)
        with pytest.raises(PeerUnreachable):
            reader.transport.post_read(PEER, 0, [1], [1])

    @pytest.mark.parametrize("absurd", [-1, 2**31, 2**64 - 1, "", "\0", b"", bytes(100)], ids=repr)
    def test_survives_metadata_that_is_well_typed_and_absurd(self, connected: Reader, owner: Owner, absurd: object) -> None:
        """Each value of that type is replaced in turn. It may break that peer only, with a ``KVFerryError``."""
        for number, metadata in enumerate(with_each_replaced(owner.metadata, absurd)):
            with contextlib.suppress(KVFerryError):
                connected.transport.add_peer(PeerId("absurd", number), metadata)
            connected.transport.remove_peer(PeerId("absurd", number))
        assert connected.read([1], [1]) is None
        connected.assert_rows(1, [1], [1])

    def test_refuses_rows_of_another_size_with_both_values(self, owner: Owner) -> None:
        reader = Reader(self.make_transport(), row_bytes=2 * ROW_BYTES)
        try:
            with pytest.raises(LayoutMismatch, match=rf"{2 * ROW_BYTES}.*{ROW_BYTES}"):
                reader.transport.add_peer(PEER, owner.metadata)
        finally:
            reader.close()

    def test_ignores_a_peer_that_is_added_twice(self, connected: Reader, owner: Owner) -> None:
        connected.transport.add_peer(PEER, owner.metadata)
        assert connected.read([1], [1]) is None

    def test_ignores_unknown_peers_and_handles(self, connected: Reader) -> None:
        connected.transport.remove_peer(PeerId("nobody", 1))
        connected.transport.cancel(12345)
        assert connected.read([1], [1]) is None

    # ---- ends ------------------------------------------------------------------------------------------------------

    def test_a_cancelled_read_ends_once(self, connected: Reader) -> None:
        handle = connected.transport.post_read(PEER, 0, list(range(NUM_ROWS)), list(range(NUM_ROWS)))
        connected.transport.cancel(handle)
        connected.transport.cancel(handle)
        connected.wait(handle)
        connected.poll(0.05)
        assert connected.read([3], [3]) is None
        connected.assert_rows(1, [3], [3])

    def test_removing_a_peer_ends_its_reads(self, connected: Reader) -> None:
        rows = list(range(NUM_ROWS))
        handles = [connected.transport.post_read(PEER, region, rows, rows) for region in (POOL_REGION, SEAL_REGION)]
        connected.transport.remove_peer(PEER)
        before = connected.memory.rows.copy()
        assert all(error is None or isinstance(error, PeerUnreachable) for error in connected.wait(*handles))
        assert np.array_equal(connected.memory.rows, before), "bytes arrived after the fence"
        with pytest.raises(PeerUnreachable):
            connected.transport.post_read(PEER, 0, [1], [1])

    def test_a_removed_peer_can_come_back(self, connected: Reader, owner: Owner) -> None:
        connected.transport.remove_peer(PEER)
        connected.transport.add_peer(PEER, owner.metadata)
        assert connected.read([2], [2]) is None
        connected.assert_rows(1, [2], [2])

    # ---- death, freeze, restart --------------------------------------------------------------------------------------

    def test_an_owner_that_died_before_contact_is_unreachable(self, reader: Reader, mortal: Owner) -> None:
        mortal.kill()
        try:
            reader.transport.add_peer(PEER, mortal.metadata)
            error = reader.read([1], [1])
        except KVFerryError as raised:
            error = raised
        assert isinstance(error, PeerUnreachable)
        reader.assert_untouched(range(NUM_ROWS))

    def test_an_owner_that_died_after_contact_is_unreachable(self, facing: Reader, mortal: Owner) -> None:
        assert facing.read([1], [1]) is None
        mortal.kill()
        deadline = time.monotonic() + DEADLINE_S
        while (error := facing.read([2], [2])) is None:  # the memory of a device may stay mapped here for a while
            facing.assert_rows(1, [2], [2])
            facing.memory.rows[2] = UNTOUCHED
            assert time.monotonic() < deadline
        facing.assert_untouched([2])
        assert isinstance(error, PeerUnreachable)
        assert isinstance(facing.read([2], [2]), PeerUnreachable)
        facing.transport.remove_peer(PEER)
        assert not facing.transport.take_lost_peers(), "it is removed"

    def test_reads_end_when_their_owner_dies_meanwhile(self, facing: Reader, mortal: Owner) -> None:
        rows = list(range(NUM_ROWS))
        handles = [facing.transport.post_read(PEER, 0, rows, rows) for _ in range(8)]
        mortal.kill()
        errors = facing.wait(*handles)
        assert all(error is None or isinstance(error, PeerUnreachable) for error in errors)
        facing.transport.remove_peer(PEER)

    def test_another_owner_takes_over_from_one_that_died(self, facing: Reader, mortal: Owner) -> None:
        mortal.kill()
        assert facing.read([1], [1]) is not None
        facing.transport.remove_peer(PEER)
        successor = self.start_owner(2)
        try:
            facing.transport.add_peer(PeerId(PEER.address, 2), successor.metadata)
            assert facing.read([1], [1], PeerId(PEER.address, 2)) is None
            facing.assert_rows(2, [1], [1])
        finally:
            successor.close()

    def test_metadata_of_a_dead_owner_never_reads_from_its_successor(self, reader: Reader, mortal: Owner) -> None:
        mortal.kill()
        successor = self.start_owner(2)
        try:
            try:
                reader.transport.add_peer(PEER, mortal.metadata)
                error = reader.read([1], [1])
            except KVFerryError as raised:
                error = raised
            assert error is not None
            reader.assert_untouched(range(NUM_ROWS))
        finally:
            successor.close()

    def test_no_byte_of_a_frozen_owner_arrives_after_the_fence(self, facing: Reader, mortal: Owner) -> None:
        assert facing.read([0], [0]) is None  # connected for good
        mortal.freeze()
        rows = list(range(1, NUM_ROWS))
        handle = facing.transport.post_read(PEER, 0, rows, rows)
        for _ in range(20):
            facing.poll(0.01)
        facing.transport.remove_peer(PEER)
        before = facing.memory.rows.copy()
        mortal.thaw()
        facing.wait(handle)
        # The owner has answered a later request, so the answer to the earlier one would have arrived.
        facing.transport.add_peer(PeerId("again", 1), mortal.metadata)
        assert facing.read([0], [0], PeerId("again", 1)) is None
        facing.poll(0.05)
        assert np.array_equal(facing.memory.rows, before), "bytes arrived after the fence"

    @pytest.mark.parametrize("end", ["cancel", "death"])
    def test_no_byte_arrives_for_a_read_that_has_ended(self, facing: Reader, mortal: Owner, end: str) -> None:
        """After any kind of end its rows may belong to others."""
        assert facing.read([0], [0]) is None
        mortal.freeze()
        handles = {facing.transport.post_read(PEER, 0, [row], [row]): row for row in range(1, NUM_ROWS)}
        if end == "death":
            mortal.kill()
            facing.wait(*handles)
        for handle in list(handles)[::2]:
            facing.transport.cancel(handle)
        for _ in range(10):
            facing.poll(0.01)
        ended = [row for handle, row in handles.items() if handle in facing.results]
        facing.memory.rows[ended] = UNTOUCHED
        if end == "cancel":
            mortal.thaw()
        facing.wait(*handles)
        facing.poll(0.05)
        facing.assert_untouched(ended)

    def test_a_frozen_owner_stops_no_other(self, facing: Reader, mortal: Owner) -> None:
        assert facing.read([0], [0]) is None
        second = self.start_owner(2)
        try:
            facing.transport.add_peer(PeerId("second", 1), second.metadata)
            mortal.freeze()
            facing.transport.post_read(PEER, 0, [1], [1])
            assert facing.read([4], [4], PeerId("second", 1)) is None
            facing.assert_rows(2, [4], [4])
        finally:
            mortal.thaw()
            second.close()
