import dataclasses
import gc
import os
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from connectors.p2p.transport import page_mapping
from connectors.p2p.transport.base import RowShape
from connectors.p2p.transport.interface import POOL_REGION, SEAL_REGION, RowRegion
from connectors.p2p.transport.shm import ShmTransport
from connectors.p2p.transport.shm_metadata import MemoryFileRef, ShmMetadata
from connectors.testing.torn_read_suite import RewrittenRowsSuite
from connectors.testing.transport_owner import HostRegions, ProcessOwner
from connectors.testing.transport_suite import NUM_ROWS, PEER, ROW_BYTES, Reader, TransportSuite
from core.errors import ConnectorUnavailable, KVFerryError, PeerUnreachable, ProtocolError
from core.ids import RandomIds
from core.kv.seals import SEAL_BYTES

FACTORIES = Path(__file__).with_name("transport_factories.py")
MEMORY_NAME = "memfd:kvferry-test-rows"


class TestShmTransport(TransportSuite):
    factory = f"{FACTORIES}:make_shm"


class TestShmOverRewrittenRows(RewrittenRowsSuite):
    factory = f"{FACTORIES}:make_shm"


@pytest.fixture
def reader(no_garbage):
    reader = Reader(ShmTransport(RandomIds()))
    yield reader
    reader.close()


@pytest.fixture
def owner():
    owner = ProcessOwner(f"{FACTORIES}:make_shm", NUM_ROWS, ROW_BYTES, 1)
    yield owner
    owner.close()


@pytest.fixture
def memory():
    memory = HostRegions(NUM_ROWS, ROW_BYTES)
    yield memory
    memory.close()


def described(owner):
    return msgspec.msgpack.decode(owner.metadata, type=ShmMetadata)


def changed(owner, **fields):
    return msgspec.msgpack.encode(msgspec.structs.replace(described(owner), **fields))


def changed_file(owner, **fields):
    pool, seals = described(owner).files
    return changed(owner, files=(msgspec.structs.replace(pool, **fields), seals))


def num_maps():
    return Path("/proc/self/maps").read_text().count(MEMORY_NAME)


def test_reads_are_copied_one_after_the_other_and_told_one_by_one(reader, owner):
    """Seals that are requested after their blocks are read when the blocks are here."""
    reader.transport.add_peer(PEER, owner.metadata)
    blocks = reader.transport.post_read(PEER, POOL_REGION, [3, 7], [5, 6])
    seals = reader.transport.post_read(PEER, SEAL_REGION, [3, 7], [5, 6])
    reader.until(lambda: reader.results)
    assert list(reader.results) == [blocks]
    reader.assert_rows(1, [3, 7], [5, 6])
    reader.assert_untouched([5, 6], SEAL_REGION)
    assert reader.wait(seals) == [None]
    reader.assert_rows(1, [3, 7], [5, 6], SEAL_REGION)


def test_owner_that_dies_while_nothing_is_read_is_told_of_once(reader, owner):
    reader.transport.add_peer(PEER, owner.metadata)
    assert not reader.transport.take_lost_peers()
    owner.kill()
    lost = []
    reader.until(lambda: lost.extend(reader.transport.take_lost_peers()) or lost)
    assert [*lost, *reader.transport.take_lost_peers()] == [PEER]


def num_open_files():
    gc.collect()  # files of earlier tests that nobody has closed
    return len(os.listdir("/proc/self/fd"))


def assert_refused(reader, metadata, kind=PeerUnreachable):
    """The metadata must be refused, and neither maps nor descriptors may leak."""
    before = num_maps(), num_open_files()
    with pytest.raises(kind):
        reader.transport.add_peer(PEER, metadata)
    assert (num_maps(), num_open_files()) == before
    with pytest.raises(PeerUnreachable):
        reader.transport.post_read(PEER, 0, [1], [1])


# ---- the identity of the owner ---------------------------------------------------------------------------------------------


def test_process_that_took_over_the_number_is_not_read(reader, owner):
    """Same process number and descriptors, another incarnation: what a reader meets after a number was used again."""
    assert_refused(reader, changed(owner, token=bytes(32)))


@pytest.mark.slow
@pytest.mark.parametrize("token", [b"", b"short"])
def test_token_of_another_length_is_no_token(reader, owner, token):
    assert_refused(reader, changed(owner, token=token))


def test_describing_again_makes_older_descriptions_worthless(reader, memory):
    transport = ShmTransport(RandomIds())
    transport.register(memory.regions)
    older = transport.describe()
    newer = transport.describe()
    with pytest.raises(PeerUnreachable, match="not the one"):
        reader.transport.add_peer(PEER, older)
    reader.transport.add_peer(PEER, newer)
    transport.close()
    with pytest.raises(PeerUnreachable):
        reader.transport.add_peer(PEER._replace(incarnation=2), newer)


def test_a_pool_in_host_memory_is_described_as_in_earlier_releases(owner):
    assert set(msgspec.msgpack.decode(owner.metadata)) == {"pid", "token_fd", "token", "files"}


@pytest.mark.slow
def test_other_file_at_the_descriptor_is_not_read(reader, owner):
    assert_refused(reader, changed_file(owner, inode=described(owner).files[0].inode + 1))


def test_descriptor_that_is_not_open_is_refused(reader, owner):
    assert_refused(reader, changed_file(owner, fd=9999))
    assert_refused(reader, changed(owner, token_fd=9999))


def test_file_that_is_too_small_for_its_description_is_refused(reader, owner):
    assert_refused(reader, changed_file(owner, shape=RowShape(NUM_ROWS + 1, ROW_BYTES)), ProtocolError)


def test_file_that_its_owner_could_shrink_is_refused(reader, memory):
    unsealed = os.memfd_create("kvferry-test-unsealed")
    os.ftruncate(unsealed, NUM_ROWS * ROW_BYTES)
    transport = ShmTransport(RandomIds())
    transport.register([dataclasses.replace(region, memory_fd=unsealed) for region in memory.regions])
    with pytest.raises(ProtocolError, match="not sealed against shrinking"):
        reader.transport.add_peer(PEER, transport.describe())
    transport.close()
    os.close(unsealed)


def test_descriptor_of_something_that_is_no_memory_is_refused(reader, owner):
    pipe = os.pipe()
    transport = ShmTransport(RandomIds())
    transport.register([])
    token = msgspec.msgpack.decode(transport.describe(), type=ShmMetadata)
    file = MemoryFileRef(fd=pipe[0], inode=os.fstat(pipe[0]).st_ino, shape=RowShape(NUM_ROWS, ROW_BYTES))
    seals = msgspec.structs.replace(file, shape=RowShape(2 * NUM_ROWS, SEAL_BYTES))
    metadata = msgspec.msgpack.encode(msgspec.structs.replace(token, files=(file, seals)))
    with pytest.raises(KVFerryError):
        reader.transport.add_peer(PEER, metadata)
    transport.close()
    for end in pipe:
        os.close(end)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"pid": 0}, {"pid": -1}, {"token_fd": -1}])
def test_numbers_that_make_no_sense_are_malformed(reader, owner, fields):
    assert_refused(reader, changed(owner, **fields), ProtocolError)


def test_process_that_never_was_is_unreachable(reader, owner):
    largest = int(Path("/proc/sys/kernel/pid_max").read_text())
    assert_refused(reader, changed(owner, pid=largest + 1))


# ---- whose memory it is ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_of_a_dead_owner_is_given_back_as_soon_as_its_death_is_known(reader, owner):
    before = num_maps(), num_open_files()
    reader.transport.add_peer(PEER, owner.metadata)
    assert num_maps() == before[0] + 2
    owner.kill()
    reader.until(lambda: not reader.transport.pollables())
    assert (num_maps(), num_open_files()) == before


@pytest.mark.slow
def test_removed_peer_leaves_neither_maps_nor_descriptors(reader, owner):
    before = num_maps(), num_open_files()
    reader.transport.add_peer(PEER, owner.metadata)
    assert reader.read([1], [1]) is None
    reader.transport.remove_peer(PEER)
    assert (num_maps(), num_open_files()) == before


@pytest.mark.parametrize("region", [POOL_REGION, SEAL_REGION])
@pytest.mark.parametrize("is_dead", [False, True], ids=["removed", "dead"])
def test_memory_is_given_back_while_reads_of_it_wait_for_their_turn(reader, owner, region, is_dead):
    before = num_maps(), num_open_files()
    reader.transport.add_peer(PEER, owner.metadata)
    handles = [reader.transport.post_read(PEER, each, [3, 7], [5, 6]) for each in (POOL_REGION, region)]
    if is_dead:
        owner.kill()
        reader.until(lambda: not reader.transport.pollables())
    else:
        reader.transport.remove_peer(PEER)
    assert (num_maps(), num_open_files()) == before
    assert all(isinstance(reader.wait(handle)[-1], PeerUnreachable) for handle in handles)


@pytest.mark.slow
def test_owner_sees_nothing_of_its_readers_and_readers_cannot_write(reader, owner):
    reader.transport.add_peer(PEER, owner.metadata)
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if MEMORY_NAME in line]
    assert len([line for line in lines if " r--s " in line]) == 2


def test_reads_what_the_owner_wrote_last(reader, memory):
    transport = ShmTransport(RandomIds())
    transport.register(memory.regions)
    reader.transport.add_peer(PEER, transport.describe())
    for value in (1, 2):
        memory.pool.rows[4] = value
        assert reader.read([4], [9]) is None
        assert (reader.memory.rows[9] == value).all()
    transport.close()


def num_mapped_kb(shared_as):
    """Return the resident kB of the mapped rows whose flags are these."""
    found, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[:1].isdigit() or line[:1] in "abcdef":
            is_ours = MEMORY_NAME in line and shared_as in line
        elif is_ours and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


def test_pages_of_a_new_owner_are_mapped_without_a_read(reader, owner):
    reader.transport.add_peer(PEER, owner.metadata)
    assert reader.transport.max_wait_s() is None
    reader.until(lambda: num_mapped_kb("r--s") * 1024 >= NUM_ROWS * ROW_BYTES)
    assert reader.read([3], [5]) is None
    reader.assert_rows(1, [3], [5])


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [False, True])
def test_reads_do_not_wait_for_mapped_pages(reader, owner, monkeypatch, is_known):
    if not is_known:
        monkeypatch.setattr(page_mapping, "MADV_POPULATE_READ", 9999)  # as on an older kernel
    reader.transport.add_peer(PEER, owner.metadata)
    assert reader.read([3, 7], [5, 6]) is None
    reader.assert_rows(1, [3, 7], [5, 6])


@pytest.mark.slow
def test_reads_go_on_where_no_thread_can_be_started(reader, owner, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(page_mapping.PageMapping, "start", refuse)
    reader.transport.add_peer(PEER, owner.metadata)
    assert reader.read([3], [5]) is None
    reader.assert_rows(1, [3], [5])
    reader.transport.remove_peer(PEER)


@pytest.mark.slow
def test_owner_may_leave_while_its_pages_are_mapped(reader, owner, monkeypatch):
    calls, has_begun, may_end = [], threading.Event(), threading.Event()

    def populate(address, num_bytes):
        calls.append(address)
        has_begun.set()
        may_end.wait(20)
        return True

    monkeypatch.setattr(page_mapping, "_populate", populate)
    before = num_maps()
    reader.transport.add_peer(PEER, owner.metadata)
    assert has_begun.wait(20), "its pages are not mapped"  # else it may leave before the thread has looked
    removing = threading.Thread(target=reader.transport.remove_peer, args=(PEER,))
    removing.start()
    reader.until(lambda: not reader.transport.pollables())  # it is removed, but for its memory
    assert num_maps() == before + 2
    may_end.set()
    removing.join()
    assert num_maps() == before
    assert len(calls) == 1, "the rest was given up"


def test_nothing_has_a_name_in_the_file_system(owner):
    of_lmcache = "kvferry_lmcache_"  # its tests may run at the same time
    assert not [name for name in os.listdir("/dev/shm") if "kvferry" in name and not name.startswith(of_lmcache)]


# ---- what it needs ---------------------------------------------------------------------------------------------------------


def test_pool_without_a_memory_file_cannot_be_offered(memory):
    transport = ShmTransport(RandomIds())
    transport.register([dataclasses.replace(memory.pool.region, memory_fd=None)])
    with pytest.raises(ConnectorUnavailable, match="memory file"):
        transport.describe()
    transport.close()


def test_reader_needs_no_memory_file(owner):
    plain, seals = np.zeros(NUM_ROWS * ROW_BYTES, np.uint8), np.zeros(2 * NUM_ROWS * SEAL_BYTES, np.uint8)
    transport = ShmTransport(RandomIds())
    regions = [
        RowRegion(plain.ctypes.data, NUM_ROWS, ROW_BYTES, memoryview(plain)),
        RowRegion(seals.ctypes.data, 2 * NUM_ROWS, SEAL_BYTES, memoryview(seals)),
    ]
    transport.register(regions)
    transport.add_peer(PEER, owner.metadata)
    handle = transport.post_read(PEER, 0, [1], [2])
    assert [result.error for result in transport.poll() if result.handle == handle] == [None]
    assert plain.reshape(NUM_ROWS, ROW_BYTES)[2].any()
    transport.close()


def test_device_memory_that_the_engine_cannot_share_makes_it_unavailable():
    with pytest.raises(ConnectorUnavailable, match=r"cuda:0.*no way to share"):
        ShmTransport(RandomIds()).register([RowRegion(0, NUM_ROWS, ROW_BYTES, device="cuda:0")])


def test_is_available_here():
    assert ShmTransport(RandomIds()).unavailable_reason() is None


def test_gives_the_reason_why_it_is_not_available(monkeypatch):
    def refuse(_):
        raise PermissionError("seccomp says no")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert "seccomp says no" in ShmTransport(RandomIds()).unavailable_reason()
