"""The state machine against a server that is played by hand: silent, late, forgetful, or not the one it should be."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from connectors.lmcache.actions import (
    Action,
    ConnectToServer,
    LMCacheMPConnectorMetadata,
    LoadPages,
    LookupAnswered,
    LookupPages,
    PageTransfer,
    ProbeServer,
    SavePages,
    SealPages,
    SendToServer,
    ServerFacts,
    SessionClosed,
    SessionOpened,
    TakePages,
    moves_of,
)
from connectors.lmcache.node import LMCacheNode, NodePhase
from connectors.lmcache.pending_requests import LMCacheSettings
from connectors.lmcache.staging import SHM_PREFIX, Staging
from connectors.lmcache.tracker import LMCacheMPRequestMetadata
from connectors.lmcache.wire import Namespace, Operation, TokenSpan
from connectors.reports import ALL_BLOCKS, LoadEnded
from core.errors import ConnectorUnavailable, CorruptBlock, PeerUnreachable
from core.ids import RandomIds, SeededIds
from core.testing.clock import FakeClock

FACTS = ServerFacts("0.5.6", 64, True)
TOKENS = list(range(256))
HASHES = [bytes([n]) * 16 for n in range(16)]
STORED = [b"", True]


class Played:
    """A node, its clock, and what it has wanted since the last look. ``asked`` are requests to the server, by operation."""

    def __init__(self, windows: tuple[int, ...] = (-1,)) -> None:
        self.clock = FakeClock()
        settings = LMCacheSettings(
            namespace=Namespace("model"),
            block_size=32,
            windows=windows,
            lookup_timeout_s=1.0,
            request_timeout_s=5.0,
            transfer_deadline_s=30.0,
            heartbeat_interval_s=2.0,
            retry_interval_s=1.0,
        )
        self.node = LMCacheNode(settings, SeededIds(1), self.clock)
        self.actions: list[Action] = []
        self.asked: list[tuple[int, Operation, list[object]]] = []
        self.server = None
        self._numbers = itertools.count(1)

    def do(self, actions: list[Action]) -> list[Action]:
        """Keep what is wanted; return it without the requests to the server."""
        for action in actions:
            if isinstance(action, SendToServer):
                uid, operation, *arguments = map(msgspec.msgpack.decode, action.frames)
                self.asked.append((uid, Operation(operation), arguments))
            if isinstance(action, SessionOpened):
                self.server = action.server
        others = [action for action in actions if not isinstance(action, SendToServer)]
        self.actions += others
        return others

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.clock.advance(seconds)
        return self.do(self.node.on_timer())

    def asks(self, operation: Operation) -> list[object] | None:
        """Return the arguments of the oldest open request of a kind, None if there is none."""
        return next((arguments for _, kind, arguments in self.asked if kind is operation), None)

    def answer(self, operation: Operation, result: object = None, attempt: int | None = None) -> list[Action]:
        """Answer the oldest open request of a kind."""
        found = next(request for request in self.asked if request[1] is operation)
        self.asked.remove(found)
        return self.do(self.node.on_reply(self.node._calls.attempt if attempt is None else attempt, found[0], result))

    def connect(self, facts: ServerFacts = FACTS) -> None:
        """Go through an attempt with a server that answers."""
        (probe,) = self.tick(self.node.next_timer() - self.clock.now())
        staging = Staging(f"{SHM_PREFIX}test_{RandomIds().bits(64):x}", 1 << 16, 256, 32)
        staging.unlink()
        self.do(self.node.on_probed(probe.attempt, facts, staging))
        if self.node.phase is NodePhase.REGISTERING:
            self.answer(Operation.REGISTER_KV_CACHE)

    def tell(self, **news: object) -> list[Action]:
        return self.do(self.node.on_metadata(LMCacheMPConnectorMetadata(**news)))

    def look_up(self, name: str = "s") -> list[Action]:
        return self.tell(lookups=[LookupPages(TokenSpan(name, TOKENS), 256, self.server)])

    def find(self, num_chunks: int, name: str = "s") -> None:
        """Look up and be answered."""
        self.look_up(name)
        self.answer(Operation.LOOKUP)
        assert self.answer(Operation.QUERY_PREFETCH_STATUS, num_chunks) == [LookupAnswered(name, 64 * num_chunks)]

    def load(
        self, start: int = 0, end: int = 256, request_id: str = "r", name: str = "s", num_skipped: int = 0
    ) -> list[Action]:
        chunks = self.chunks("RETRIEVE", start, end, request_id, name, num_skipped)
        order = LoadPages(self.transfer(chunks), end - start - num_skipped)
        return self.tell(loads=[order], unclaimed=[name])

    def save(self, name: str = "s") -> SavePages:
        """Copy two chunks."""
        transfer = self.transfer(self.chunks("STORE", 0, 128, "r", name))
        save = SavePages(next(self._numbers), transfer, tuple(self.server.staging.take_to_save(4)))
        self.node.on_copied([save])
        return save

    def chunks(self, direction, start, end, request_id, name, num_skipped=0):
        block_ids = (tuple(range(1 + start // 32, 1 + end // 32)),)
        return LMCacheMPRequestMetadata(request_id, direction, TokenSpan(name, TOKENS), start, end, block_ids, num_skipped)

    def transfer(self, chunks: LMCacheMPRequestMetadata) -> PageTransfer:
        return PageTransfer(chunks, self.server, tuple(moves_of(chunks, 32, HASHES, 2)))

    def ended(self) -> list[LoadEnded]:
        return [action for action in self.actions if isinstance(action, LoadEnded)]


@pytest.fixture
def played() -> Played:
    found = Played()
    found.connect()
    assert found.node.phase is NodePhase.UP
    found.actions.clear()
    return found


# ---- the connection ----------------------------------------------------------------------------------------------------


def test_a_server_is_asked_who_it_is_before_anything_is_sent():
    played = Played()
    assert played.tick() == [ProbeServer(1)]
    assert not played.asked
    played.connect() if played.node.phase is NodePhase.DOWN else None
    assert not any(isinstance(action, ConnectToServer) for action in played.actions)


@pytest.mark.parametrize(
    ("facts", "windows", "said"),
    [
        (ServerFacts("0.5.7", 64, True), (-1,), "0.5.7"),
        (ServerFacts("0.5.6", 48, True), (-1,), "--chunk-size 48"),
        (ServerFacts("0.5.6", 64, False), (-1, 512), "--separate-object-groups"),
    ],
)
def test_a_server_that_could_give_wrong_blocks_is_left_alone(facts, windows, said):
    played = Played(windows)
    played.connect(facts)
    closed = played.actions[-1]
    assert isinstance(closed, SessionClosed)
    assert isinstance(closed.error, ConnectorUnavailable)
    assert said in closed.error.message
    assert closed.staging is not None
    assert not played.asked
    assert played.node.next_timer() == played.clock.now() + 1.0


def test_a_server_without_windows_may_keep_all_groups_together():
    played = Played()
    played.connect(ServerFacts("0.5.6", 64, False))
    assert played.node.phase is NodePhase.UP


def test_every_group_is_registered_with_its_window():
    played = Played((512, 40, -1, 500))
    (probe,) = played.tick()
    staging = Staging(f"{SHM_PREFIX}test_{RandomIds().bits(64):x}", 1 << 16, 256, 32)
    staging.unlink()
    played.do(played.node.on_probed(probe.attempt, FACTS, staging))
    groups = played.asks(Operation.REGISTER_KV_CACHE)[6]
    assert [group["sw_size_tokens"] for group in groups] == [-1, 64, 512, 500], "those of one object side by side"
    assert [group["layer_indices"] for group in groups] == [[0], [1], [2], [3]]


def test_a_registration_without_an_answer_is_given_up():
    played = Played()
    (probe,) = played.tick()
    staging = Staging(f"{SHM_PREFIX}test_{RandomIds().bits(64):x}", 1 << 16, 256, 32)
    staging.unlink()
    played.do(played.node.on_probed(probe.attempt, FACTS, staging))
    played.tick(5.0)
    assert played.node.phase is NodePhase.DOWN
    assert played.answer(Operation.REGISTER_KV_CACHE) == []
    assert played.node.phase is NodePhase.DOWN, "an answer that comes too late opens nothing"


def test_a_probe_that_comes_too_late_is_dropped_with_its_memory():
    played = Played()
    (probe,) = played.tick()
    played.tick(10.0)
    staging = Staging(f"{SHM_PREFIX}test_{RandomIds().bits(64):x}", 1 << 16, 256, 32)
    (dropped,) = played.do(played.node.on_probed(probe.attempt, FACTS, staging))
    assert dropped.staging is staging
    staging.unlink()
    assert played.node.phase is NodePhase.DOWN


def test_silence_is_a_reason_to_leave(played):
    played.tick(2.0)
    assert played.asks(Operation.PING) is not None
    played.answer(Operation.PING, True)
    played.tick(2.0)
    played.tick(5.0)
    assert played.node.phase is NodePhase.DOWN
    assert any(isinstance(action, SessionClosed) for action in played.actions)


def test_each_attempt_has_a_connection_memory_and_an_identity_of_its_own(played):
    first, first_id = played.server, played.node._calls.instance_id
    played.do(played.node.on_disconnected(1))
    assert played.node.phase is NodePhase.DOWN
    played.connect()
    assert played.server.staging is not first.staging
    assert played.node._calls.instance_id != first_id
    assert played.do(played.node.on_disconnected(1)) == [], "the loss of an old connection says nothing"
    assert played.node.phase is NodePhase.UP


# ---- lookups -----------------------------------------------------------------------------------------------------------


def test_a_lookup_is_asked_for_until_it_is_done(played):
    played.look_up()
    played.answer(Operation.LOOKUP)
    assert played.answer(Operation.QUERY_PREFETCH_STATUS, None) == []
    assert played.asks(Operation.QUERY_PREFETCH_STATUS) is None
    played.tick(0.005)
    assert played.answer(Operation.QUERY_PREFETCH_STATUS, 3) == [LookupAnswered("s", 192)]


def test_a_lookup_without_an_answer_is_a_miss_in_time(played):
    played.look_up()
    assert played.tick(0.9) == []
    assert played.tick(0.1) == [LookupAnswered("s", 0)]
    assert played.node.phase is NodePhase.UP, "one lookup is no reason to leave"


def test_what_a_late_lookup_finds_is_let_go(played):
    played.look_up()
    played.tick(1.0)
    played.answer(Operation.LOOKUP)
    assert played.answer(Operation.QUERY_PREFETCH_STATUS, 4) == [], "nobody is told twice"
    key = played.asks(Operation.FREE_LOOKUP_LOCKS)[0]
    assert (key["start"], key["end"], key["request_id"]) == (0, 256, "s")


def test_a_lookup_that_fails_on_the_server_leaves_nothing_open(played):
    played.look_up()
    played.tick(1.0)
    played.tell(ended=["s"])
    played.tick(4.0)
    assert played.asks(Operation.END_SESSION) == ["s"]


def test_without_a_server_every_lookup_is_a_miss_at_once(played):
    stale = played.server
    played.do(played.node.on_disconnected(1))
    assert played.tell(lookups=[LookupPages(TokenSpan("s", TOKENS), 256, stale)]) == [LookupAnswered("s", 0)]
    played.connect()
    news = played.tell(lookups=[LookupPages(TokenSpan("t", TOKENS), 256, stale)])
    assert news == [LookupAnswered("t", 0)], "the new server has nothing to do with it"


# ---- locks and sessions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["asked", "looked up", "answered", "not wanted"])
def test_locks_are_let_go_and_the_session_ends_whenever_the_request_does(played, moment):
    if moment == "asked":
        played.look_up()
        played.tell(ended=["s"])
        played.answer(Operation.LOOKUP)
        played.answer(Operation.QUERY_PREFETCH_STATUS, 4)
    elif moment == "looked up":
        played.look_up()
        played.answer(Operation.LOOKUP)
        played.tell(ended=["s"])
        played.answer(Operation.QUERY_PREFETCH_STATUS, 4)
    else:
        played.find(4)
        if moment == "not wanted":
            played.tell(unclaimed=["s"])
            assert played.asks(Operation.FREE_LOOKUP_LOCKS) is not None
        played.tell(ended=["s"])
    assert played.asks(Operation.END_SESSION) is None, "not while something is open in it"
    assert (played.asks(Operation.FREE_LOOKUP_LOCKS)[0]["end"]) == 256
    played.answer(Operation.FREE_LOOKUP_LOCKS)
    assert played.asks(Operation.END_SESSION) == ["s"]
    assert not [request for request in played.asked if request[1] is Operation.FREE_LOOKUP_LOCKS]


def test_a_load_takes_over_the_locks_that_it_needs(played):
    played.find(4)
    played.load(start=128, num_skipped=32)
    key = played.asks(Operation.FREE_LOOKUP_LOCKS)[0]
    assert (key["start"], key["end"]) == (0, 128)
    retrieved = played.asks(Operation.RETRIEVE)
    assert (retrieved[0]["start"], retrieved[0]["end"], retrieved[4]) == (128, 256, 32)
    assert retrieved[2][0][0] == 0, "a block that is here already has no page"
    assert len(set(retrieved[2][0])) == 4


def test_a_load_that_never_began_gives_its_locks_back(played):
    played.find(4)
    played.find(4, "t")
    capacity = played.server.staging.load_capacity
    taken = played.server.staging.take_to_load(capacity - 3)
    played.load(request_id="waiting", name="t")
    assert played.asks(Operation.RETRIEVE) is None
    played.tell(aborts=["waiting"], ended=["t"])
    keys = [arguments[0] for _, kind, arguments in played.asked if kind is Operation.FREE_LOOKUP_LOCKS]
    assert [(key["request_id"], key["start"], key["end"]) for key in keys] == [("t", 0, 256)]
    played.server.staging.give_back(taken)


def test_leaving_ends_every_session(played):
    played.find(4)
    played.find(0, "t")
    parted = []
    played.do(played.node.on_stop(lambda: parted.append(True)))
    kinds = [kind for _, kind, _ in played.asked]
    assert kinds.count(Operation.END_SESSION) == 2
    assert kinds[-1] is Operation.UNREGISTER_KV_CACHE
    played.answer(Operation.UNREGISTER_KV_CACHE)
    assert parted


# ---- loads -------------------------------------------------------------------------------------------------------------


def test_a_load_is_over_when_its_pages_have_been_taken(played):
    played.find(4)
    played.load()
    (take,) = played.answer(Operation.RETRIEVE, STORED)
    assert isinstance(take, TakePages)
    assert not played.ended()
    (ended,) = played.do(played.node.on_taken("r", {}))
    assert ended.error is None
    assert ended.usage.transferred_tokens == 256
    assert played.server.staging.num_used_pages == 0


def test_bad_pages_are_invalid_blocks_and_the_rest_is_used(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    (ended,) = played.do(played.node.on_taken("r", {5: CorruptBlock("bad"), 6: CorruptBlock("bad")}))
    assert ended.invalid_block_ids == (6, 7)
    assert ended.error.code == "digest"
    assert ended.usage.transferred_tokens == 160


def test_a_load_without_a_good_block_has_failed(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    (ended,) = played.do(played.node.on_taken("r", dict.fromkeys(range(8), CorruptBlock("bad"))))
    assert ended.invalid_block_ids is ALL_BLOCKS
    assert ended.error is not None
    assert ended.usage.transferred_tokens == ended.usage.verified_blocks == 0


@pytest.mark.parametrize("result", [[b"", False], None, [], "yes", [b"", 1]])
def test_anything_but_a_clear_yes_is_a_failure(played, result):
    played.find(4)
    played.load()
    (ended,) = played.answer(Operation.RETRIEVE, result)
    assert ended.error.code == "store_miss"
    assert played.server.staging.num_used_pages == 0


def test_the_pages_of_an_aborted_load_stay_taken_until_the_server_is_done(played):
    played.find(4)
    played.load()
    (ended,) = played.tell(aborts=["r"])
    assert ended.error is None
    assert ended.usage is None
    assert played.server.staging.num_used_pages == 8, "the server may still write them"
    assert played.answer(Operation.RETRIEVE, STORED) == [], "and nobody looks at them"
    assert played.server.staging.num_used_pages == 0


def test_a_load_that_is_being_taken_ends_when_that_ends(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    assert played.tell(aborts=["r"]) == []
    played.do(played.node.on_disconnected(1))
    assert not played.ended(), "its blocks are being written"
    (ended,) = played.do(played.node.on_taken("r", {}))
    assert ended.error is None


def test_a_lost_server_ends_its_loads_at_once(played):
    played.find(4)
    played.load()
    played.do(played.node.on_disconnected(1))
    (ended,) = played.ended()
    assert ended.error.code == PeerUnreachable.code
    assert played.answer(Operation.RETRIEVE, STORED, attempt=1) == []


def test_a_load_that_takes_too_long_ends_and_so_does_the_trust(played):
    played.find(4)
    played.load()
    for _ in range(15):
        played.tick(2.0)
        if played.asks(Operation.PING) is not None:
            played.answer(Operation.PING, True)
    assert len(played.ended()) == 1
    assert played.node.phase is NodePhase.DOWN, "the server may write into pages that nobody can take back otherwise"


def test_loads_wait_for_pages_in_their_order(played):
    capacity = played.server.staging.load_capacity
    for name in "abc":
        played.find(4, name)
    taken = played.server.staging.take_to_load(capacity - 8)
    for name in "abc":
        played.load(request_id=name, name=name)
    for name in "abc":
        assert played.asks(Operation.RETRIEVE)[0]["request_id"] == name
        played.answer(Operation.RETRIEVE, STORED)
        assert played.asks(Operation.RETRIEVE) is None
        played.do(played.node.on_taken(name, {}))
    played.server.staging.give_back(taken)
    assert played.server.staging.num_used_pages == 0


# ---- saves -------------------------------------------------------------------------------------------------------------


def test_a_save_is_sent_when_its_blocks_have_proved_good(played):
    save = played.save()
    assert played.asks(Operation.STORE) is None
    assert played.tell(verdicts={save.number: True}) == [SealPages(save)]
    played.do(played.node.on_sealed(save))
    key, _, pages, _ = played.asks(Operation.STORE)
    assert (key["start"], key["end"]) == (0, 128)
    assert pages == [list(save.pages)]
    assert played.server.staging.num_used_pages == 4
    played.tell(ended=["s"])
    assert played.asks(Operation.END_SESSION) is None
    played.answer(Operation.STORE, STORED)
    assert played.server.staging.num_used_pages == 0
    assert played.asks(Operation.END_SESSION) == ["s"]


def test_bad_blocks_are_never_sent(played):
    save = played.save()
    assert played.tell(verdicts={save.number: False}) == []
    assert not played.asked
    assert played.server.staging.num_used_pages == 0


def test_a_refused_save_is_a_reason_to_register_again(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.do(played.node.on_sealed(save))
    played.answer(Operation.STORE, [b"", False])
    assert played.node.phase is NodePhase.DOWN
    played.connect()
    assert played.node.phase is NodePhase.UP


def test_what_was_copied_for_a_lost_server_is_forgotten(played):
    early, late = played.save(), played.save()
    played.tell(verdicts={early.number: True})
    old = played.server
    played.do(played.node.on_disconnected(1))
    played.connect()
    assert played.do(played.node.on_sealed(early)) == []
    assert played.tell(verdicts={late.number: True}) == []
    assert not played.asked
    assert old.staging.num_used_pages == 0
