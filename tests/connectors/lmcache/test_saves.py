"""Saves by way of a server that is played by hand: what is sent, and what becomes of their pages."""

from __future__ import annotations

from connectors.lmcache.messages import SavePages
from connectors.lmcache.staging import Staging
from connectors.lmcache.wire import RequestType
from tests.connectors.lmcache.played_server import STORED


def test_a_save_is_sent_when_its_blocks_have_proved_good(played):
    save = played.save()
    assert played.asks(RequestType.STORE) is None
    played.tell(verdicts={save.number: True})
    assert played.asks(RequestType.STORE) is None
    played.finish(SavePages)
    key, _, pages, _ = played.asks(RequestType.STORE)
    assert (key["start"], key["end"]) == (0, 128)
    assert pages == [list(save.pages)]
    assert played.server.staging.num_used_pages == 4
    played.tell(ended=["s"])
    assert played.asks(RequestType.END_SESSION) is None
    played.answer(RequestType.STORE, STORED)
    assert played.server.staging.num_used_pages == 0
    assert played.asks(RequestType.END_SESSION) == ["s"]


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
    played.answer(RequestType.STORE, [b"", False])
    assert not played.connector.is_connected
    played.tick(0.2)  # the reply to the end of the session may not come
    assert played.asks(RequestType.UNREGISTER_KV_CACHE)
    played.tick(0.8)
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


def test_memory_of_a_lost_server_goes_back_behind_what_is_still_sealed_in_it(played):
    save, old = played.save(), played.server
    played.tell(verdicts={save.number: True})
    played.lose()
    assert [type(arguments[0]) for arguments, _ in played.loop.jobs] == [SavePages, Staging]
    assert played.loop.jobs[1][0] == (old.staging,)
