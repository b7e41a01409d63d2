"""The connector against a server that is played by hand: silent, late, forgetful, or not the one it should be."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import msgspec
import pytest

import connectors.lmcache.connector
from connectors.lmcache.client import Calls
from connectors.lmcache.connector import LMCacheConnector
from connectors.lmcache.messages import (
    LMCacheMPConnectorMetadata,
    LoadPages,
    LookupPages,
    PageTransfer,
    SavePages,
    ServerFacts,
    ServerSession,
    moves_of,
)
from connectors.lmcache.tracker import LMCacheMPRequestMetadata
from connectors.lmcache.wire import Operation, TokenSpan
from connectors.testing.contexts import connector_context
from core.config_workers import ConnectorSection, LMCacheSection
from core.errors import CorruptBlock, KVFerryError, PeerUnreachable
from core.testing.clock import FakeClock
from core.testing.hash_model import FULL, HashAttention, hash_model_kv_config, hash_model_layout
from tests.support.virtual_loop import VirtualLoop

FACTS = ServerFacts("0.5.6", 64, True)
TOKENS = list(range(256))
HASHES = [bytes([n]) * 16 for n in range(16)]
STORED = [b"", True]
NUM_BLOCKS, BLOCK_SIZE = 16, 32
SETTINGS = LMCacheSection(
    staging_bytes=1 << 16, lookup_timeout_s=1.0, request_timeout_s=5.0, heartbeat_interval_s=2.0, retry_interval_s=1.0
)


class Played:
    """A connector in virtual time, and the requests to the server, by operation, that have no answer yet.

    ``answers`` are those to lookups, ``ended`` the loads that were reported: error, invalid blocks, usage.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attentions: tuple[HashAttention, ...] = FULL) -> None:
        self.clock = FakeClock()
        self.loop = VirtualLoop(self.clock)
        self.facts: ServerFacts = FACTS
        self.asked: list[tuple[Calls, int, Operation, list[object]]] = []
        self.answers: list[tuple[str, int]] = []
        self.ended: dict[str, SimpleNamespace] = {}
        self.is_closed = False  # the latest connection
        self._numbers = itertools.count(1)
        monkeypatch.setattr(connectors.lmcache.connector, "fetch_facts", lambda *_: self.facts)
        monkeypatch.setattr(connectors.lmcache.connector, "LMCacheClient", self._new_client)
        layout = hash_model_layout(BLOCK_SIZE, len(attentions))
        context = connector_context(
            "decode",
            layout=layout,
            connector=ConnectorSection(name="lmcache", lmcache=SETTINGS, transfer_deadline_s=30.0),
        )
        self.connector = LMCacheConnector(dataclasses.replace(context, clock=self.clock))
        self.worker, self.scheduler = self.connector.worker, self.connector.scheduler
        size = layout.block_bytes
        buffer = bytearray(NUM_BLOCKS * size)
        self.worker.register_kv_caches(
            SimpleNamespace(buffer=buffer, num_blocks=NUM_BLOCKS, block_bytes=size, seals=object(), device="cpu")
        )
        config = hash_model_kv_config(NUM_BLOCKS, BLOCK_SIZE, attentions)
        self.scheduler.bind_kv_cache_manager(SimpleNamespace(kv_cache_config=config))
        self.scheduler.on_lookup_answer = lambda *answer: self.answers.append(answer)

    # ---- the server ----------------------------------------------------------------------------------------------------

    def start(self, facts: ServerFacts = FACTS) -> None:
        self.facts = facts
        self.loop.create_task(self.connector.start())
        self.loop.settle()

    def connect(self) -> None:
        """Go through an attempt with a server that answers."""
        if self.loop.jobs or not self.asked:
            self.tick(SETTINGS.retry_interval_s)
        self.answer(Operation.REGISTER_KV_CACHE)
        assert self.connector.is_connected

    def lose(self) -> None:
        """Break the connection."""
        self.calls.lose()
        self.tick()
        assert not self.connector.is_connected

    def stop(self) -> None:
        stopping = self.loop.create_task(self.connector.stop())
        while not stopping.done():
            self.tick(0.1)
        self.loop.close()

    def _new_client(self, _zmq, _address, counts, _on_death) -> SimpleNamespace:
        def record(frames: list[bytes]) -> None:
            uid, operation, *arguments = map(msgspec.msgpack.decode, frames)
            self.asked.append((calls, uid, Operation(operation), arguments))

        async def close() -> None:
            self.is_closed = True

        self.calls = calls = Calls(record, counts)
        return SimpleNamespace(calls=calls, close=close)

    def asks(self, operation: Operation) -> list[object] | None:
        """Return the arguments of the oldest open request of a kind, None if there is none."""
        return next((arguments for *_, kind, arguments in self.asked if kind is operation), None)

    def answer(self, operation: Operation, result: object = None) -> None:
        """Answer the oldest open request of a kind."""
        found = next(request for request in self.asked if request[2] is operation)
        self.asked.remove(found)
        found[0].on_reply(found[1], result)
        self.loop.settle()
        self._collect()

    # ---- the engine ----------------------------------------------------------------------------------------------------

    @property
    def server(self) -> ServerSession:
        found = self.scheduler.server
        assert found is not None
        return found

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.advance(seconds)
        self.loop.settle()
        self._collect()

    def tell(self, **news: object) -> None:
        self.worker.start_load_kv(LMCacheMPConnectorMetadata(**news))
        self.worker.wait_for_save()
        self.tick()

    def look_up(self, name: str = "s", server: ServerSession | None = None) -> None:
        self.tell(lookups=[LookupPages(TokenSpan(name, TOKENS), 256, server or self.server)])

    def find(self, num_chunks: int, name: str = "s") -> None:
        """Look up and be answered."""
        self.look_up(name)
        self.answer(Operation.LOOKUP)
        self.answer(Operation.QUERY_PREFETCH_STATUS, num_chunks)
        assert self.answers.pop() == (name, 64 * num_chunks)

    def load(self, start: int = 0, end: int = 256, request_id: str = "r", name: str = "s", num_skipped: int = 0) -> None:
        chunks = self.chunks("RETRIEVE", start, end, request_id, name, num_skipped)
        self.tell(loads=[LoadPages(self.transfer(chunks), end - start - num_skipped)], unclaimed=[name])

    def save(self, name: str = "s") -> SavePages:
        """Copy two chunks."""
        transfer = self.transfer(self.chunks("STORE", 0, 128, "r", name))
        save = SavePages(next(self._numbers), transfer, tuple(self.server.staging.take_to_save(4)))
        self.tell(saves=[save])
        return save

    def chunks(self, direction, start, end, request_id, name, num_skipped=0):
        block_ids = (tuple(range(1 + start // 32, 1 + end // 32)),)
        return LMCacheMPRequestMetadata(request_id, direction, TokenSpan(name, TOKENS), start, end, block_ids, num_skipped)

    def transfer(self, chunks: LMCacheMPRequestMetadata) -> PageTransfer:
        return PageTransfer(chunks, self.server, tuple(moves_of(chunks, 32, HASHES, 2)))

    # ---- the copying thread --------------------------------------------------------------------------------------------

    def job(self, kind: type[LoadPages] | type[SavePages]) -> object | None:
        """Return what the copying thread has to do first of a kind."""
        return next((args[0] for args, future in self.loop.jobs if isinstance(args[0], kind) and not future.done()), None)

    def finish(self, kind: type[LoadPages] | type[SavePages], result: dict[int, KVFerryError] | None = None) -> None:
        """Let the copying thread end its first job of a kind."""
        found = next(job for job in self.loop.jobs if isinstance(job[0][0], kind))
        self.loop.jobs.remove(found)
        if not found[1].done():
            found[1].set_result(result)
        self.tick()

    def _collect(self) -> None:
        output = self.worker.get_transfer_results(set())
        for request_id in output.finished_recving:
            assert request_id not in self.ended, "reported twice"
            self.ended[request_id] = SimpleNamespace(
                error=output.load_errors.get(request_id) or output.failed_recving.get(request_id),
                is_lost=request_id in output.failed_recving,
                invalid_block_ids=output.invalid_block_ids,
                usage=output.transfer_usage.get(request_id),
            )


@pytest.fixture
def start_played(monkeypatch):
    started: list[Played] = []

    def start(facts: ServerFacts = FACTS, attentions: tuple[HashAttention, ...] = FULL) -> Played:
        started.append(Played(monkeypatch, attentions))
        started[-1].start(facts)
        return started[-1]

    yield start
    for played in started:
        played.stop()


@pytest.fixture
def played(start_played) -> Played:
    found = start_played()
    found.connect()
    return found


# ---- the connection ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "attentions", "said"),
    [
        (ServerFacts("0.5.7", 64, True), FULL, "0.5.7"),
        (ServerFacts("0.5.6", 48, True), FULL, "--chunk-size 48"),
        (ServerFacts("0.5.6", 64, False), (HashAttention(), HashAttention(window=512)), "--separate-object-groups"),
    ],
)
def test_a_server_that_could_give_wrong_blocks_is_left_alone(start_played, caplog, facts, attentions, said):
    played = start_played(facts, attentions)
    assert said in caplog.text
    assert not played.asked
    assert not played.connector.is_connected
    played.facts = FACTS
    played.tick(0.9)
    assert not played.asked
    played.tick(0.1)
    assert played.asks(Operation.REGISTER_KV_CACHE) is not None


def test_staging_memory_without_room_for_a_chunk_names_its_setting(start_played, caplog):
    played = start_played(ServerFacts("0.5.6", 32 * 128, True))
    assert "connector.lmcache.staging_bytes" in caplog.text
    assert "set at least 98688" in caplog.text
    assert not played.asked
    played.facts = FACTS
    played.connect()


def test_a_server_without_windows_may_keep_all_groups_together(start_played):
    played = start_played(ServerFacts("0.5.6", 64, False))
    played.connect()


def test_every_group_is_registered_with_its_window(start_played):
    played = start_played(attentions=tuple(HashAttention(window=window) for window in (512, 40, 0, 500)))
    groups = played.asks(Operation.REGISTER_KV_CACHE)[6]
    assert [group["sw_size_tokens"] for group in groups] == [-1, 64, 512, 500], "those of one object side by side"
    assert [group["layer_indices"] for group in groups] == [[0], [1], [2], [3]]


def test_a_registration_without_an_answer_is_given_up(start_played):
    played = start_played()
    played.tick(5.0)
    played.answer(Operation.REGISTER_KV_CACHE)
    assert not played.connector.is_connected, "an answer that comes too late opens nothing"
    played.connect()


def test_a_probe_that_comes_too_late_is_given_up(start_played):
    played = start_played(ServerFacts("0.5.7", 64, True))
    played.loop.holds_threads = True
    played.tick(1.0)
    played.loop.holds_threads = False
    played.tick(10.0)
    played.facts = FACTS
    played.connect()


def test_a_connection_that_is_lost_during_the_registration_ends_the_attempt(start_played):
    played = start_played()
    played.asked.clear()
    played.lose()
    played.connect()


def test_silence_is_a_reason_to_leave(played):
    played.tick(2.0)
    played.answer(Operation.PING, True)
    played.tick(2.0)
    assert played.asks(Operation.PING) is not None
    assert played.connector.is_connected
    played.tick(5.0)
    assert not played.connector.is_connected


def test_each_attempt_has_a_connection_memory_and_an_identity_of_its_own(start_played):
    played = start_played()
    first_id = played.asks(Operation.REGISTER_KV_CACHE)[0]
    played.connect()
    first, calls = played.server, played.calls
    played.lose()
    played.tick(1.0)
    assert played.asks(Operation.REGISTER_KV_CACHE)[0] != first_id
    played.answer(Operation.REGISTER_KV_CACHE)
    assert played.server.staging is not first.staging
    calls.lose()
    played.tick()
    assert played.connector.is_connected, "the loss of an old connection says nothing"


# ---- lookups -----------------------------------------------------------------------------------------------------------


def test_a_lookup_is_asked_for_until_it_is_done(played):
    played.look_up()
    played.answer(Operation.LOOKUP)
    played.answer(Operation.QUERY_PREFETCH_STATUS, None)
    assert played.asks(Operation.QUERY_PREFETCH_STATUS) is None
    played.tick(0.005)
    played.answer(Operation.QUERY_PREFETCH_STATUS, 3)
    assert played.answers == [("s", 192)]


def test_a_lookup_without_an_answer_is_a_miss_in_time(played):
    played.look_up()
    played.tick(0.9)
    assert not played.answers
    played.tick(0.1)
    assert played.answers == [("s", 0)]
    assert played.connector.is_connected, "one lookup is no reason to leave"


def test_a_reply_that_comes_in_the_moment_of_its_deadline_counts(played):
    played.look_up()
    calls, uid, *_ = played.asked.pop()
    played.loop.call_soon(calls.on_reply, uid, None)
    played.tick(5.0)  # both are due in the same turn of the loop, the reply first
    assert played.asks(Operation.QUERY_PREFETCH_STATUS) is not None
    assert not played.connector.counts["unanswered_requests"]


def test_what_a_late_lookup_finds_is_let_go(played):
    played.look_up()
    played.tick(1.0)
    played.answer(Operation.LOOKUP)
    played.answer(Operation.QUERY_PREFETCH_STATUS, 4)
    assert played.answers == [("s", 0)], "nobody is told twice"
    key = played.asks(Operation.FREE_LOOKUP_LOCKS)[0]
    assert (key["start"], key["end"], key["request_id"]) == (0, 256, "s")


def test_a_lookup_that_never_ends_is_asked_for_ever_more_rarely_and_given_up(played):
    played.look_up()
    played.answer(Operation.LOOKUP)
    begin, asked_at = played.clock.now(), []
    while (elapsed := played.clock.now() - begin) < 40.0:
        if played.asks(Operation.QUERY_PREFETCH_STATUS) is not None:
            asked_at.append(elapsed)
            played.answer(Operation.QUERY_PREFETCH_STATUS, None)
        if played.asks(Operation.PING) is not None:
            played.answer(Operation.PING, True)
        played.tick(0.05)
    assert len([elapsed for elapsed in asked_at if elapsed < 0.99]) == 20, "as often as the test looks"
    assert 20 < len([elapsed for elapsed in asked_at if elapsed >= 5.0]) < 30, "once a second"
    assert max(asked_at) < 32.0
    assert played.answers == [("s", 0)]
    played.tell(ended=["s"])
    assert played.asks(Operation.END_SESSION) == ["s"]


def test_a_lookup_that_fails_on_the_server_leaves_nothing_open(played):
    played.look_up()
    played.tick(1.0)
    played.tell(ended=["s"])
    played.tick(4.0)
    assert played.asks(Operation.END_SESSION) == ["s"]


def test_without_a_server_every_lookup_is_a_miss_at_once(played):
    stale = played.server
    played.lose()
    played.look_up("s", stale)
    assert played.answers == [("s", 0)]
    played.connect()
    played.look_up("t", stale)
    assert played.answers == [("s", 0), ("t", 0)], "the new server has nothing to do with it"


def test_lookups_without_an_answer_are_misses_once_the_server_is_left(played):
    played.look_up()
    played.lose()
    assert played.answers == [("s", 0)]


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
    assert not [request for request in played.asked if request[2] is Operation.FREE_LOOKUP_LOCKS]


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
    keys = [arguments[0] for *_, kind, arguments in played.asked if kind is Operation.FREE_LOOKUP_LOCKS]
    assert [(key["request_id"], key["start"], key["end"]) for key in keys] == [("t", 0, 256)]
    played.server.staging.give_back(taken)


def test_leaving_ends_every_session(played):
    played.find(4)
    played.find(0, "t")
    stopping = played.loop.create_task(played.connector.stop())
    played.tick()
    kinds = [kind for _, _, kind, _ in played.asked]
    assert kinds.count(Operation.END_SESSION) == 2
    assert kinds.count(Operation.FREE_LOOKUP_LOCKS) == 1
    assert kinds[-1] is Operation.UNREGISTER_KV_CACHE
    assert not stopping.done()
    assert not played.is_closed, "the reply has to be received"
    played.answer(Operation.UNREGISTER_KV_CACHE)
    assert stopping.done()


# ---- loads -------------------------------------------------------------------------------------------------------------


def test_a_load_is_over_when_its_pages_have_been_taken(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    assert not played.ended
    played.finish(LoadPages, {})
    assert played.ended["r"].error is None
    assert played.ended["r"].usage.transferred_tokens == 256
    assert played.server.staging.num_used_pages == 0


def test_bad_pages_are_invalid_blocks_and_the_rest_is_used(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    played.finish(LoadPages, {5: CorruptBlock("bad"), 6: CorruptBlock("bad")})
    ended = played.ended["r"]
    assert (ended.is_lost, ended.invalid_block_ids) == (False, {6, 7})
    assert ended.error.code == "digest"
    assert ended.usage.transferred_tokens == 160


def test_a_load_without_a_good_block_has_failed(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    played.finish(LoadPages, dict.fromkeys(range(8), CorruptBlock("bad")))
    ended = played.ended["r"]
    assert ended.is_lost
    assert ended.usage.transferred_tokens == ended.usage.verified_blocks == 0


@pytest.mark.parametrize("result", [[b"", False], None, [], "yes", [b"", 1]])
def test_anything_but_a_clear_yes_is_a_failure(played, result):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, result)
    assert played.ended["r"].error.code == "store_miss"
    assert played.server.staging.num_used_pages == 0


def test_the_pages_of_an_aborted_load_stay_taken_until_the_server_is_done(played):
    played.find(4)
    played.load()
    played.tell(aborts=["r"])
    assert played.ended["r"].error is None
    assert played.ended["r"].usage is None
    assert played.server.staging.num_used_pages == 8, "the server may still write them"
    played.answer(Operation.RETRIEVE, STORED)
    assert played.job(LoadPages) is None, "and nobody looks at them"
    assert played.server.staging.num_used_pages == 0


def test_a_load_that_is_being_taken_ends_when_that_ends(played):
    played.find(4)
    played.load()
    played.answer(Operation.RETRIEVE, STORED)
    played.tell(aborts=["r"])
    played.lose()
    assert not played.ended, "its blocks are being written"
    played.finish(LoadPages, {})
    assert played.ended["r"].error is None


def test_a_lost_server_ends_its_loads_at_once(played):
    played.find(4)
    played.load()
    played.lose()
    assert played.ended["r"].error.code == PeerUnreachable.code
    played.answer(Operation.RETRIEVE, STORED)
    assert played.job(LoadPages) is None


def test_loads_and_lookups_end_if_the_server_is_lost_as_they_begin(played):
    played.find(4)
    played.worker.start_load_kv(
        LMCacheMPConnectorMetadata(
            lookups=[LookupPages(TokenSpan("t", TOKENS), 256, played.server)],
            loads=[LoadPages(played.transfer(played.chunks("RETRIEVE", 0, 256, "r", "s")), 256)],
        )
    )
    played.loop.call_soon(played.calls.lose)  # before a coroutine of them has begun
    played.tick()
    assert played.answers == [("t", 0)]
    assert played.ended["r"].error.code == PeerUnreachable.code


def test_a_load_that_is_aborted_as_it_begins_gives_its_locks_back(played):
    played.find(4)
    order = LoadPages(played.transfer(played.chunks("RETRIEVE", 64, 256, "r", "s")), 192)
    played.tell(loads=[order], unclaimed=["s"], aborts=["r"], ended=["s"])
    assert (played.ended["r"].error, played.ended["r"].usage) == (None, None)
    freed = [(arguments[0]["start"], arguments[0]["end"]) for *_, kind, arguments in played.asked]
    assert sorted(freed) == [(0, 64), (64, 256)]
    for _ in freed:
        assert played.asks(Operation.END_SESSION) is None
        played.answer(Operation.FREE_LOOKUP_LOCKS)
    assert played.asks(Operation.END_SESSION) == ["s"]
    assert played.server.staging.num_used_pages == 0


def test_a_load_for_a_server_that_was_left_has_failed(played):
    played.find(4)
    chunks = played.chunks("RETRIEVE", 0, 256, "r", "s")
    order = LoadPages(played.transfer(chunks), 256)
    played.lose()
    played.tell(loads=[order])
    assert played.ended["r"].error.code == PeerUnreachable.code


def test_a_load_that_takes_too_long_ends_and_so_does_the_trust(played):
    played.find(4)
    played.load()
    for _ in range(15):
        played.tick(2.0)
        if played.asks(Operation.PING) is not None:
            played.answer(Operation.PING, True)
    assert played.ended["r"].error is not None
    assert not played.connector.is_connected, "the server may write into pages that nobody can take back otherwise"


def test_a_load_whose_request_has_no_time_left_ends_before_the_server_does(played):
    played.find(4)
    chunks = played.chunks("RETRIEVE", 0, 256, "r", "s")
    played.tell(loads=[LoadPages(played.transfer(chunks), 256, deadline=played.clock.now() + 1.5)], unclaimed=["s"])
    played.tick(1.4)
    assert not played.ended
    played.tick(0.1)
    assert played.ended["r"].error.code == "deadline"
    assert played.server.staging.num_used_pages == 8, "the server may still write them"
    played.answer(Operation.RETRIEVE, STORED)
    assert played.server.staging.num_used_pages == 0


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
        played.finish(LoadPages, {})
    played.server.staging.give_back(taken)
    assert played.server.staging.num_used_pages == 0


# ---- saves -------------------------------------------------------------------------------------------------------------


def test_a_save_is_sent_when_its_blocks_have_proved_good(played):
    save = played.save()
    assert played.asks(Operation.STORE) is None
    played.tell(verdicts={save.number: True})
    assert played.asks(Operation.STORE) is None
    played.finish(SavePages)
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
    played.tell(verdicts={save.number: False})
    assert played.job(SavePages) is None
    assert not played.asked
    assert played.server.staging.num_used_pages == 0


def test_a_refused_save_is_a_reason_to_register_again(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.finish(SavePages)
    played.answer(Operation.STORE, [b"", False])
    assert not played.connector.is_connected
    played.connect()


def test_pages_of_a_save_or_load_without_a_reply_stay_taken_when_the_server_is_lost(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.finish(SavePages)
    played.find(4, "t")
    played.load(name="t")
    old = played.server
    played.lose()
    assert old.staging.num_used_pages == 4 + 8, "the server may still read and write them"


def test_what_was_copied_for_a_lost_server_is_forgotten(played):
    early, late = played.save(), played.save()
    played.tell(verdicts={early.number: True})
    old = played.server
    played.lose()
    played.connect()
    played.finish(SavePages)
    played.tell(verdicts={late.number: True})
    assert not played.asked
    assert old.staging.num_used_pages == 0
