"""Which chunks hold which item: nothing is lost, nothing has two owners, and what is wanted stays."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.ec.chunk_cache import _FREE, ChunkCache

NUM_CHUNKS = 8
names = st.sampled_from([bytes([number]) for number in range(6)])


def put(chunk_cache, name, num_chunks=1, owner=None):
    item = chunk_cache.reserve(name, 64 * num_chunks, num_chunks)
    assert item is not None
    chunk_cache.settle(item)
    if owner is not None:
        chunk_cache.want(item, owner)
    return item


def test_least_recently_used_item_makes_room_first():
    chunk_cache = ChunkCache(3)
    items = {name: put(chunk_cache, name, owner="r") for name in (b"a", b"b", b"c")}
    for name in (b"b", b"a", b"c"):
        chunk_cache.unwant(items[name], "r")
    put(chunk_cache, b"d")
    assert [chunk_cache.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_wanted_items_make_no_room():
    chunk_cache = ChunkCache(2)
    put(chunk_cache, b"a", owner="r")
    assert chunk_cache.reserve(b"b", 128, 2) is None
    assert chunk_cache.get(b"a") is not None


def test_nothing_is_evicted_for_what_finds_no_room_anyway():
    chunk_cache = ChunkCache(3)
    put(chunk_cache, b"a", owner="r")
    put(chunk_cache, b"b")
    assert chunk_cache.reserve(b"c", 64 * 3, 3) is None
    assert chunk_cache.get(b"b") is not None


def test_room_in_pieces_is_no_room_and_evicts_nothing():
    chunk_cache = ChunkCache(3)
    for name, owner in ((b"a", None), (b"b", "r"), (b"c", None)):
        put(chunk_cache, name, owner=owner)
    assert chunk_cache.has_room(1)
    assert not chunk_cache.has_room(2)
    assert chunk_cache.reserve(b"d", 128, 2) is None
    assert chunk_cache.num_evicted == 0


def test_item_of_two_owners_stays_until_both_have_released_it():
    chunk_cache = ChunkCache(1)
    item = put(chunk_cache, b"a", owner="r")
    chunk_cache.want(item, "s")
    chunk_cache.unwant(item, "r")
    assert chunk_cache.reserve(b"b", 64, 1) is None
    chunk_cache.unwant(item, "s")
    assert chunk_cache.reserve(b"b", 64, 1) is not None


def test_chunks_in_quarantine_are_not_reused():
    chunk_cache = ChunkCache(2)
    item = chunk_cache.reserve(b"a", 128, 2)
    chunk_cache.drop(item, quarantined=[1])
    assert chunk_cache.reserve(b"b", 128, 2) is None
    chunk_cache.unquarantine([1, 0])
    assert chunk_cache.num_quarantined_chunks == 0
    assert chunk_cache.reserve(b"b", 128, 2) is not None


class Shelves(RuleBasedStateMachine):
    """Random orders against what each chunk is for."""

    def __init__(self):
        super().__init__()
        self.chunk_cache = ChunkCache(NUM_CHUNKS)
        self.owners = {}
        self.quarantined = set()

    @rule(name=names, num_chunks=st.integers(1, NUM_CHUNKS), owner=st.sampled_from(["r", "s"]))
    def reserve(self, name, num_chunks, owner):
        if self.chunk_cache.get(name) is None:
            item = self.chunk_cache.reserve(name, 64 * num_chunks, num_chunks)
            if item is not None:
                assert not self.quarantined.intersection(item.chunks)
                self.chunk_cache.want(item, owner)
        self.owners = {
            other: held for other, held in self.owners.items() if self.chunk_cache.get(other) is held or held.wanted_by
        }

    @rule(name=names, owner=st.sampled_from(["r", "s"]), is_wanted=st.booleans())
    def want(self, name, owner, is_wanted):
        item = self.chunk_cache.get(name)
        if item is not None:
            (self.chunk_cache.want if is_wanted else self.chunk_cache.unwant)(item, owner)

    @rule(name=names)
    def settle(self, name):
        item = self.chunk_cache.get(name)
        if item is not None:
            self.chunk_cache.settle(item)

    @rule(name=names, keep=st.booleans())
    def drop(self, name, keep):
        item = self.chunk_cache.get(name)
        if item is not None and not item.is_here:
            kept = set(item.chunks[:1]) if keep else set()
            self.chunk_cache.drop(item, kept)
            self.quarantined |= kept

    @precondition(lambda self: self.quarantined)
    @rule()
    def unquarantine(self):
        self.chunk_cache.unquarantine([self.quarantined.pop()])

    @invariant()
    def every_chunk_has_one_use(self):
        items = [item for name in range(6) if (item := self.chunk_cache.get(bytes([name]))) is not None]
        chunks = [chunk for item in items for chunk in item.chunks]
        assert len(chunks) == len(set(chunks))
        assert not self.quarantined.intersection(chunks)
        assert all(0 <= chunk < NUM_CHUNKS for chunk in chunks)
        assert self.chunk_cache._taken.count(_FREE) == NUM_CHUNKS - len(chunks) - len(self.quarantined)
        assert self.chunk_cache.num_quarantined_chunks == len(self.quarantined)
        wanted = [item for item in items if item.wanted_by or not item.is_here]
        assert self.chunk_cache.num_wanted_chunks == sum(item.num_chunks for item in wanted)


TestShelves = Shelves.TestCase
TestShelves.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
