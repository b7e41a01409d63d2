"""Which chunks hold which item: nothing is lost, nothing has two owners, and what is wanted stays."""

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connectors.ec.chunk_cache import ChunkCache

NUM_CHUNKS = 8
names = st.sampled_from([bytes([number]) for number in range(6)])


def put(shelf, name, num_chunks=1, owner=None):
    item = shelf.reserve(name, 64 * num_chunks, num_chunks)
    assert item is not None
    shelf.settle(item)
    if owner is not None:
        shelf.want(item, owner)
    return item


def test_least_recently_used_item_makes_room_first():
    shelf = ChunkCache(3)
    items = {name: put(shelf, name, owner="r") for name in (b"a", b"b", b"c")}
    for name in (b"b", b"a", b"c"):
        shelf.unwant(items[name], "r")
    put(shelf, b"d")
    assert [shelf.get(name) is not None for name in (b"a", b"b", b"c")] == [True, False, True]


def test_wanted_items_make_no_room():
    shelf = ChunkCache(2)
    put(shelf, b"a", owner="r")
    assert shelf.reserve(b"b", 128, 2) is None
    assert shelf.get(b"a") is not None


def test_nothing_is_evicted_for_what_finds_no_room_anyway():
    shelf = ChunkCache(3)
    put(shelf, b"a", owner="r")
    put(shelf, b"b")
    assert shelf.reserve(b"c", 64 * 3, 3) is None
    assert shelf.get(b"b") is not None


def test_item_of_two_owners_stays_until_both_have_let_go():
    shelf = ChunkCache(1)
    item = put(shelf, b"a", owner="r")
    shelf.want(item, "s")
    shelf.unwant(item, "r")
    assert shelf.reserve(b"b", 64, 1) is None
    shelf.unwant(item, "s")
    assert shelf.reserve(b"b", 64, 1) is not None


def test_chunks_in_quarantine_are_given_to_nobody():
    shelf = ChunkCache(2)
    item = shelf.reserve(b"a", 128, 2)
    shelf.drop(item, quarantined=[1])
    assert shelf.reserve(b"b", 128, 2) is None
    shelf.unquarantine([1, 0])
    assert shelf.num_quarantined_chunks == 0
    assert shelf.reserve(b"b", 128, 2) is not None


class Shelves(RuleBasedStateMachine):
    """Random orders against what each chunk is for."""

    def __init__(self):
        super().__init__()
        self.shelf = ChunkCache(NUM_CHUNKS)
        self.owners = {}
        self.quarantined = set()

    @rule(name=names, num_chunks=st.integers(1, NUM_CHUNKS), owner=st.sampled_from(["r", "s"]))
    def reserve(self, name, num_chunks, owner):
        if self.shelf.get(name) is None:
            item = self.shelf.reserve(name, 64 * num_chunks, num_chunks)
            if item is not None:
                assert not self.quarantined.intersection(item.chunks)
                self.shelf.want(item, owner)
        self.owners = {other: held for other, held in self.owners.items() if self.shelf.get(other) is held or held.wanted_by}

    @rule(name=names, owner=st.sampled_from(["r", "s"]), is_wanted=st.booleans())
    def want(self, name, owner, is_wanted):
        item = self.shelf.get(name)
        if item is not None:
            (self.shelf.want if is_wanted else self.shelf.unwant)(item, owner)

    @rule(name=names)
    def settle(self, name):
        item = self.shelf.get(name)
        if item is not None:
            self.shelf.settle(item)

    @rule(name=names, keep=st.booleans())
    def drop(self, name, keep):
        item = self.shelf.get(name)
        if item is not None and not item.is_here:
            kept = set(item.chunks[:1]) if keep else set()
            self.shelf.drop(item, kept)
            self.quarantined |= kept

    @precondition(lambda self: self.quarantined)
    @rule()
    def unquarantine(self):
        self.shelf.unquarantine([self.quarantined.pop()])

    @invariant()
    def every_chunk_has_one_use(self):
        items = [item for name in range(6) if (item := self.shelf.get(bytes([name]))) is not None]
        chunks = [chunk for item in items for chunk in item.chunks]
        assert len(chunks) == len(set(chunks))
        assert not self.quarantined.intersection(chunks)
        assert all(0 <= chunk < NUM_CHUNKS for chunk in chunks)
        assert self.shelf.num_free_chunks == NUM_CHUNKS - len(chunks) - len(self.quarantined)
        assert self.shelf.num_quarantined_chunks == len(self.quarantined)
        wanted = [item for item in items if item.wanted_by or not item.is_here]
        assert self.shelf.num_wanted_chunks == sum(item.num_chunks for item in wanted)


TestShelves = Shelves.TestCase
TestShelves.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)
