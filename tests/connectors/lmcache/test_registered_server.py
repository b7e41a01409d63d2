"""The life with a server that is played by hand: registration, silence, lookups, locks and sessions."""

from __future__ import annotations

import errno

import pytest
import zmq

from connectors.lmcache.messages import SavePages, ServerFacts
from connectors.lmcache.wire import RequestType
from core.errors import EngineDead, PeerUnreachable
from core.testing.hash_model import FULL, HashAttention
from tests.connectors.lmcache.played_server import FACTS, STORED

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
    assert played.asks(RequestType.REGISTER_KV_CACHE) is not None


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
    groups = played.asks(RequestType.REGISTER_KV_CACHE)[6]
    assert [group["sw_size_tokens"] for group in groups] == [-1, 64, 512, 500], "those of one object side by side"
    assert [group["layer_indices"] for group in groups] == [[0], [1], [2], [3]]


def test_a_registration_without_an_answer_is_given_up(start_played):
    played = start_played()
    played.tick(5.0)
    played.answer(RequestType.REGISTER_KV_CACHE)
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


def test_a_start_ends_although_shared_memory_cannot_be_opened(start_played, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("connectors.lmcache.staging.SHM_FOLDER", tmp_path / "missing")
    played = start_played()
    assert played.starting.done()
    played.tick(3.0)
    assert caplog.text.count("lmcache_unavailable") == 1
    assert not played.connector.is_connected
    monkeypatch.setattr("connectors.lmcache.staging.SHM_FOLDER", tmp_path)
    played.connect()


@pytest.mark.parametrize("place", ["connectors.lmcache.staging.os.open", "connectors.lmcache.connector.LMCacheClient"])
def test_too_few_descriptors_for_a_new_connection_cost_hits_only(played, monkeypatch, place):
    def refuse(*_):
        raise OSError(errno.EMFILE, "too many open files") if "os.open" in place else zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(place, refuse)
        played.lose()
        played.tick(1.0)
        assert not played.connector.is_connected
    played.connect()


def test_a_start_ends_although_our_own_code_fails(start_played, monkeypatch, caplog):
    monkeypatch.setattr("connectors.lmcache.connector.check_server", lambda *_: 1 // 0)
    played = start_played()
    assert played.starting.done()
    with pytest.raises(EngineDead):
        played.tick()
    assert caplog.text.count("lmcache_died") == 1
    played.worker._death = None


def test_silence_is_a_reason_to_leave(played):
    played.tick(2.0)
    played.answer(RequestType.PING, True)
    played.tick(2.0)
    assert played.asks(RequestType.PING) is not None
    assert played.connector.is_connected
    rows = played.server.staging.rows
    rows[:] = 7
    played.tick(5.0)
    assert not played.connector.is_connected
    (((staging,), _),) = played.loop.jobs  # of the copying thread
    staging.discard()
    assert not rows[1:-1].all(), "the server never unmaps it, so that the memory would be lost"


def test_each_attempt_has_a_connection_memory_and_an_identity_of_its_own(start_played):
    played = start_played()
    first_id = played.asks(RequestType.REGISTER_KV_CACHE)[0]
    played.connect()
    first, calls = played.server, played.calls
    played.lose()
    played.tick(1.0)
    assert played.asks(RequestType.REGISTER_KV_CACHE)[0] != first_id
    played.answer(RequestType.REGISTER_KV_CACHE)
    assert played.server.staging is not first.staging
    calls.lose()
    played.tick()
    assert played.connector.is_connected, "the loss of an old connection says nothing"


# ---- lookups -----------------------------------------------------------------------------------------------------------


def test_a_lookup_is_asked_for_until_it_is_done(played):
    played.look_up()
    played.answer(RequestType.LOOKUP)
    played.answer(RequestType.QUERY_PREFETCH_STATUS, None)
    assert played.asks(RequestType.QUERY_PREFETCH_STATUS) is None
    played.tick(0.005)
    played.answer(RequestType.QUERY_PREFETCH_STATUS, 3)
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
    assert played.asks(RequestType.QUERY_PREFETCH_STATUS) is not None
    assert not played.connector.counts["unanswered_requests"]


def test_what_a_late_lookup_finds_is_let_go(played):
    played.look_up()
    played.tick(1.0)
    played.answer(RequestType.LOOKUP)
    played.answer(RequestType.QUERY_PREFETCH_STATUS, 4)
    assert played.answers == [("s", 0)], "nobody is told twice"
    key = played.asks(RequestType.FREE_LOOKUP_LOCKS)[0]
    assert (key["start"], key["end"], key["request_id"]) == (0, 256, "s")


def test_a_lookup_that_never_ends_is_asked_for_ever_more_rarely_and_given_up(played):
    played.look_up()
    played.answer(RequestType.LOOKUP)
    begin, asked_at = played.clock.now(), []
    while (elapsed := played.clock.now() - begin) < 40.0:
        if played.asks(RequestType.QUERY_PREFETCH_STATUS) is not None:
            asked_at.append(elapsed)
            played.answer(RequestType.QUERY_PREFETCH_STATUS, None)
        if played.asks(RequestType.PING) is not None:
            played.answer(RequestType.PING, True)
        played.tick(0.05)
    assert len([elapsed for elapsed in asked_at if elapsed < 0.99]) == 20, "as often as the test looks"
    assert 20 < len([elapsed for elapsed in asked_at if elapsed >= 5.0]) < 30, "once a second"
    assert max(asked_at) < 32.0
    assert played.answers == [("s", 0)]
    played.tell(ended=["s"])
    assert played.asks(RequestType.END_SESSION) == ["s"]


def test_a_lookup_that_fails_on_the_server_leaves_nothing_open(played):
    played.look_up()
    played.tick(1.0)
    played.tell(ended=["s"])
    played.tick(4.0)
    played.answer(RequestType.FREE_LOOKUP_LOCKS)  # it may have locked something
    assert played.asks(RequestType.END_SESSION) == ["s"]


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
        played.answer(RequestType.LOOKUP)
        played.answer(RequestType.QUERY_PREFETCH_STATUS, 4)
    elif moment == "looked up":
        played.look_up()
        played.answer(RequestType.LOOKUP)
        played.tell(ended=["s"])
        played.answer(RequestType.QUERY_PREFETCH_STATUS, 4)
    else:
        played.find(4)
        if moment == "not wanted":
            played.tell(unclaimed=["s"])
            assert played.asks(RequestType.FREE_LOOKUP_LOCKS) is not None
        played.tell(ended=["s"])
    assert played.asks(RequestType.END_SESSION) is None, "not while something is open in it"
    assert (played.asks(RequestType.FREE_LOOKUP_LOCKS)[0]["end"]) == 256
    played.answer(RequestType.FREE_LOOKUP_LOCKS)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    assert not [request for request in played.asked if request[2] is RequestType.FREE_LOOKUP_LOCKS]


def test_a_load_takes_over_the_locks_that_it_needs(played):
    played.find(4)
    played.load(start=128, num_skipped=32)
    key = played.asks(RequestType.FREE_LOOKUP_LOCKS)[0]
    assert (key["start"], key["end"]) == (0, 128)
    retrieved = played.asks(RequestType.RETRIEVE)
    assert (retrieved[0]["start"], retrieved[0]["end"], retrieved[4]) == (128, 256, 32)
    assert retrieved[2][0][0] == 0, "a block that is here already has no page"
    assert len(set(retrieved[2][0])) == 4


def test_a_load_that_never_began_gives_its_locks_back(played):
    played.find(4)
    played.find(4, "t")
    capacity = played.server.staging.load_capacity
    taken = played.server.staging.take_to_load(capacity - 3)
    played.load(request_id="waiting", name="t")
    assert played.asks(RequestType.RETRIEVE) is None
    played.tell(aborts=["waiting"], ended=["t"])
    keys = [arguments[0] for *_, kind, arguments in played.asked if kind is RequestType.FREE_LOOKUP_LOCKS]
    assert [(key["request_id"], key["start"], key["end"]) for key in keys] == [("t", 0, 256)]
    played.server.staging.give_back(taken)


# ---- farewells ---------------------------------------------------------------------------------------------------------


def freed(played) -> list[tuple[str, int, int]]:
    """Return the locks that the server is asked to free: session, and tokens [start, end)."""
    keys = [arguments[0] for *_, kind, arguments in played.asked if kind is RequestType.FREE_LOOKUP_LOCKS]
    return [(key["request_id"], key["start"], key["end"]) for key in keys]


def test_leaving_ends_every_session(played, caplog):
    played.find(4)
    played.find(0, "t")
    stopping = played.begin_stop()
    assert freed(played) == [("s", 0, 256)]
    assert played.asks(RequestType.END_SESSION) is None, "the server may handle requests out of order"
    played.answer(RequestType.FREE_LOOKUP_LOCKS)
    assert [kind for *_, kind, _ in played.asked] == [RequestType.END_SESSION] * 2
    played.answer(RequestType.END_SESSION)
    played.answer(RequestType.END_SESSION)
    assert [kind for *_, kind, _ in played.asked] == [RequestType.UNREGISTER_KV_CACHE]
    assert not stopping.done()
    assert not played.is_closed, "the reply has to be received"
    played.answer(RequestType.UNREGISTER_KV_CACHE)
    assert stopping.done()
    assert "lmcache_unavailable" not in caplog.text


def test_a_worker_that_stops_ends_no_session_in_which_the_server_is_busy(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.finish(SavePages)
    played.begin_stop()
    played.tick(0.9)
    assert played.asks(RequestType.END_SESSION) is None, "a save that is handled after it would begin the session again"
    played.answer(RequestType.STORE, STORED)
    assert played.asks(RequestType.END_SESSION) == ["s"]


def test_a_worker_that_stops_waits_for_a_silent_server_only_briefly(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.finish(SavePages)
    stopping = played.begin_stop()
    played.tick(1.0)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    for _ in range(2):
        played.tick(0.2)
    assert stopping.done()


@pytest.mark.parametrize("last", [RequestType.LOOKUP, RequestType.QUERY_PREFETCH_STATUS])
def test_a_lookup_that_is_under_way_when_a_worker_stops_keeps_no_locks(played, last):
    played.look_up()
    if last is RequestType.QUERY_PREFETCH_STATUS:
        played.answer(RequestType.LOOKUP)
    played.begin_stop()
    assert not freed(played)
    played.answer(last)
    assert freed(played) == [("s", 0, 256)], "what it has found is not known here"


def test_the_locks_of_a_load_that_never_asked_are_freed_when_a_worker_stops(played):
    played.find(4)
    played.find(4, "t")
    played.server.staging.take_to_load(played.server.staging.load_capacity - 3)
    played.load(start=64, request_id="waiting", name="t")
    assert freed(played) == [("t", 0, 64)]
    played.begin_stop()
    played.answer(RequestType.FREE_LOOKUP_LOCKS)
    assert freed(played) == [("s", 0, 256), ("t", 64, 256)]


def test_a_slow_server_hears_of_the_end_of_its_sessions_when_it_goes_on(played):
    save = played.save()
    played.tell(verdicts={save.number: True})
    played.finish(SavePages)
    played.tick(2.0)
    played.tick(5.0)  # no heartbeat
    assert not played.connector.is_connected
    played.tick(1.0)
    played.answer(RequestType.REGISTER_KV_CACHE)
    assert played.connector.is_connected, "nothing waits for the old connection"
    assert played.asks(RequestType.END_SESSION) is None
    played.answer(RequestType.PING, True)
    assert played.asks(RequestType.END_SESSION) is None
    played.answer(RequestType.STORE, STORED)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    played.answer(RequestType.END_SESSION)
    played.answer(RequestType.UNREGISTER_KV_CACHE)
    assert played.is_closed


def test_a_server_that_stays_silent_is_waited_for_in_vain_once(played):
    played.find(0)
    calls = played.calls
    played.tick(2.0)
    played.tick(5.0)
    played.tick(29.0)
    assert played.asks(RequestType.END_SESSION) is None
    played.tick(1.0)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    calls.lose()
    played.tick(0.2)
    assert played.asks(RequestType.UNREGISTER_KV_CACHE) is None, "there is nobody to tell"
    assert played.is_closed


def test_a_worker_that_stops_tells_also_the_servers_that_it_has_left(played):
    played.find(4)
    played.tick(2.0)
    played.tick(5.0)
    assert not played.connector.is_connected
    assert not freed(played)
    stopping = played.begin_stop()
    played.tick(1.0)
    assert freed(played) == [("s", 0, 256)], "the heartbeat has no answer yet, and there is no time for it"
    played.answer(RequestType.FREE_LOOKUP_LOCKS)
    played.answer(RequestType.END_SESSION)
    played.answer(RequestType.UNREGISTER_KV_CACHE)
    assert stopping.done()


def test_a_server_that_may_still_have_locks_stays_registered(played):
    played.find(4)
    stopping = played.begin_stop()
    assert freed(played) == [("s", 0, 256)]
    played.tick(0.2)
    assert played.asks(RequestType.END_SESSION) == ["s"]
    played.answer(RequestType.END_SESSION)
    assert stopping.done()
    assert played.asks(RequestType.UNREGISTER_KV_CACHE) is None, "it unregisters out of turn, and would free nothing"


def test_a_farewell_goes_on_if_the_server_is_left_meanwhile(played):
    played.find(4)
    server = played.connector.server
    stopping = played.begin_stop()
    server.leave(PeerUnreachable("lost"))
    played.tick()
    assert not played.is_closed
    played.answer(RequestType.FREE_LOOKUP_LOCKS)
    played.answer(RequestType.END_SESSION)
    played.answer(RequestType.UNREGISTER_KV_CACHE)
    assert stopping.done()
    assert played.is_closed


@pytest.mark.parametrize("how", ["stops", "leaves"])
def test_locks_that_a_load_has_consumed_are_not_freed_again(played, how):
    played.find(4)
    played.load()
    assert played.asks(RequestType.RETRIEVE) is not None
    if how == "stops":
        played.begin_stop()
    else:
        played.connector.server.leave(PeerUnreachable("doubt"))
        played.tick()
    played.answer(RequestType.RETRIEVE, STORED)
    assert not freed(played), "locks have no owner: those of other readers would be freed"
    assert played.asks(RequestType.END_SESSION) == ["s"]
