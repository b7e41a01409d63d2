"""A client's side of the protocol: deadlines, silence, restarts, and answers that do not fit."""

import math

import pytest

from core.errors import ProtocolError
from core.ids import SeededIds
from core.wire.version import FIRST_RETRY_S, MAX_RETRY_S
from kvstore import messages as m
from kvstore.arena import NONCE_BYTES, ArenaView, arena_bytes, write_header
from kvstore.client_actions import ClientOptions, CopyIn, MapArena, SendToStore
from kvstore.client_state import ClientState, ConnectionState
from kvstore.key import pack_keys
from kvstore.testing.blocks import BLOCK_BYTES, make_block

ARENA = m.ArenaFile(pid=1, fd=3, inode=9, num_bytes=4096)
NONCE = bytes(range(NONCE_BYTES))
INCARNATION = 77
TIMEOUT_S, BEAT_S = 1.0, 0.25


class Client:
    """A machine whose store is played by the test."""

    def __init__(self, *, is_local=False):
        options = ClientOptions("client", BLOCK_BYTES, TIMEOUT_S, BEAT_S, (5, 6) if is_local else None)
        self.machine = ClientState(options, SeededIds(1))
        self.now = 100.0

    def said(self):
        """The client's messages since the last call; other actions as they are."""
        actions = self.machine.take_actions()
        return [action.parcel.message if isinstance(action, SendToStore) else action for action in actions]

    def hear(self, message, blocks=()):
        self.machine.on_parcel(message, blocks, self.now)

    def after(self, seconds):
        self.now += seconds
        self.machine.on_timer(self.now)

    def greet(self, incarnation=INCARNATION, arena=None):
        (hello,) = [message for message in self.said() if isinstance(message, m.Hello)]
        self.hear(m.Welcome(session=hello.session, incarnation=incarnation, slot_bytes=BLOCK_BYTES, arena=arena))


def own_arena():
    memory = memoryview(bytearray(arena_bytes(4, BLOCK_BYTES)))
    write_header(memory, 4, BLOCK_BYTES, INCARNATION, NONCE)
    return ArenaView(memory)


@pytest.fixture
def client():
    client = Client()
    client.after(0)
    client.greet()
    return client


@pytest.fixture
def local():
    client = Client(is_local=True)
    client.after(0)
    client.greet(arena=ARENA)
    assert client.said() == [MapArena(ARENA, INCARNATION)]
    client.machine.on_mapped(own_arena())
    assert client.said() == [m.Attach(nonce=NONCE, pid=5, start_ticks=6)]
    client.hear(m.Attached())
    return client


BLOCKS = [make_block(number) for number in range(3)]
KEYS = [block.key for block in BLOCKS]


def put(client):
    return client.machine.calls.put(KEYS, [block.content for block in BLOCKS], [block.seal for block in BLOCKS], client.now)


def test_before_it_is_connected_every_call_is_a_miss_at_once():
    client = Client()
    ticket = client.machine.calls.lookup(KEYS, client.now)
    assert (ticket.is_done, list(ticket.hits), ticket.failure) == (True, [False] * 3, "store_unavailable")
    assert client.said() == []


def test_a_client_that_is_refused_asks_again_by_its_timer_only():
    client = Client()
    client.after(0)
    client.said()
    client.hear(m.AttachRefused(code="layout", message="too large"))
    assert not client.machine.waits_for_link  # the link is there: that would be an endless loop
    client.after(BEAT_S - 0.01)
    assert client.said() == []
    client.after(0.02)
    client.greet()
    assert client.machine.state is ConnectionState.UP


@pytest.mark.parametrize("answers", [lambda number: True, lambda number: number % 3 == 0], ids=["always", "at times"])
def test_a_store_of_another_version_is_greeted_less_and_less_often(answers):
    client, num_hellos, news = Client(), 0, []
    for _ in range(6000):
        client.after(0.1)
        for message in client.said():
            assert isinstance(message, m.Hello)
            num_hellos += 1
            if answers(num_hellos):
                news.append(client.machine.on_other_version(client.now))
    assert news == [True] + [False] * (len(news) - 1)
    assert 20 < num_hellos < 7 + 600 / MAX_RETRY_S + 2
    assert client.machine.is_other_version


def test_a_store_that_is_understood_again_is_greeted_as_usual():
    client = Client()
    client.after(0)
    client.said()
    client.machine.on_other_version(client.now)
    client.after(FIRST_RETRY_S)
    client.greet()
    assert (client.machine.state, client.machine.is_other_version) == (ConnectionState.UP, False)
    client.hear(m.UnknownClient(incarnation=3))
    assert [type(message) for message in client.said()] == [m.Hello]
    client.after(BEAT_S + TIMEOUT_S + 0.01)
    client.after(BEAT_S)
    assert m.Hello in {type(message) for message in client.said()}


def test_calls_to_a_store_that_turns_out_to_be_of_another_version_end(client):
    ticket = client.machine.calls.lookup(KEYS, client.now)
    client.machine.on_other_version(client.now)
    assert (ticket.is_done, ticket.failure) == (True, "other_version")


def test_an_arena_that_cannot_be_mapped_means_frames():
    client = Client(is_local=True)
    client.after(0)
    client.greet(arena=ARENA)
    client.said()
    client.machine.on_mapped(None)
    assert (client.machine.state, client.machine.calls.is_local) == (ConnectionState.UP, False)


def test_a_nonce_that_is_refused_means_frames():
    client = Client(is_local=True)
    client.after(0)
    client.greet(arena=ARENA)
    client.machine.on_mapped(own_arena())
    client.hear(m.AttachRefused(code="protocol_error", message="no"))
    assert (client.machine.state, client.machine.calls.is_local) == (ConnectionState.UP, False)


@pytest.mark.parametrize("state", list(ConnectionState))
def test_the_next_timer_is_never_over_when_timers_have_run(state):
    client = Client()
    client.after(0)
    if state is ConnectionState.UP:
        client.greet()
        client.machine.calls.lookup(KEYS, client.now)
    client.machine.state = state
    for _ in range(12):
        client.after(BEAT_S)
        assert client.machine.next_timer() > client.now  # or its thread would never sleep


def test_a_welcome_to_an_earlier_hello_is_ignored():
    client = Client()
    client.after(0)
    client.hear(m.Welcome(session=1, incarnation=1, slot_bytes=BLOCK_BYTES))
    assert client.machine.state is ConnectionState.GREETING


def test_a_large_get_may_take_as_long_as_its_bytes_take_if_the_store_is_alive(client, monkeypatch):
    monkeypatch.setattr("kvstore.client_calls.SLOW_BYTES_PER_S", BLOCK_BYTES)  # a second for each block
    keys = [make_block(number).key for number in range(3)]
    large, lookup = client.machine.calls.get(keys, client.now), client.machine.calls.lookup(keys, client.now)
    for _ in range(3):
        client.after(TIMEOUT_S - 0.01)
        client.hear(m.Alive(incarnation=INCARNATION))
    assert (large.is_done, lookup.failure) == (False, "deadline")
    client.after(TIMEOUT_S + 0.1)
    assert large.failure == "deadline"


def test_each_part_of_a_large_put_may_take_as_long_as_its_bytes_take(client, monkeypatch):
    monkeypatch.setattr("kvstore.client_calls.SLOW_BYTES_PER_S", BLOCK_BYTES)  # a second for each block
    monkeypatch.setattr("kvstore.client_calls.MAX_BLOCKS_BYTES", 2 * BLOCK_BYTES)
    ticket = put(client)
    assert client.machine.calls.next_deadline() == client.now + TIMEOUT_S + 2
    client.now += 2.5
    client.hear(m.PutReply(number=ticket.number, stored=b"\1\1"))
    assert client.machine.calls.next_deadline() == client.now + TIMEOUT_S + 1


def test_a_call_without_an_answer_is_a_miss_at_its_deadline(client):
    ticket = client.machine.calls.get(KEYS, client.now)
    client.said()
    client.after(TIMEOUT_S - 0.01)
    assert not ticket.is_done
    client.after(0.02)
    assert (ticket.is_done, ticket.failure, ticket.blocks) == (True, "deadline", [None] * 3)
    assert m.ReleaseBlocks(numbers=(ticket.number,)) in client.said()
    client.hear(m.GetReply(number=ticket.number, present=b"\0\0\0", seals=b""))  # too late
    assert client.machine.calls.num_open == 0


def test_the_next_deadline_is_that_of_a_call_that_may_end(local):
    assert local.machine.calls.end_late(local.now) == math.inf
    asked, stored = local.machine.calls.lookup(KEYS, local.now), put(local)
    assert local.machine.calls.end_late(local.now) == local.now + TIMEOUT_S
    local.now += TIMEOUT_S
    assert local.machine.calls.end_late(local.now, but_puts=True) == math.inf
    assert (asked.failure, stored.is_done) == ("deadline", False)
    local.machine.calls.end_late(local.now)
    assert stored.failure == "deadline"


def test_a_silent_store_is_abandoned_and_greeted_again(client):
    for _ in range(20):
        client.after(BEAT_S)
    assert client.machine.state in (ConnectionState.DOWN, ConnectionState.GREETING)
    assert any(isinstance(message, m.StoreHeartbeat) for message in client.said())
    client.after(TIMEOUT_S + BEAT_S)
    client.after(BEAT_S)
    assert any(isinstance(message, m.Hello) for message in client.said())


def test_a_store_that_answers_heartbeats_is_kept(client):
    for _ in range(40):
        client.after(BEAT_S)
        client.hear(m.Alive(incarnation=INCARNATION))
    assert client.machine.state is ConnectionState.UP


def test_a_restarted_store_ends_all_calls_and_is_noticed(client):
    tickets = [client.machine.calls.lookup(KEYS, client.now), client.machine.calls.get(KEYS, client.now), put(client)]
    client.said()
    client.hear(m.UnknownClient(incarnation=78))
    assert [(ticket.is_done, ticket.failure) for ticket in tickets] == [(True, "restarted")] * 3
    client.greet(incarnation=78)
    assert client.machine.state is ConnectionState.UP
    assert client.machine.statistics().restarts_noticed == 1


def test_a_session_that_was_only_forgotten_is_no_restart(client):
    client.hear(m.UnknownClient(incarnation=INCARNATION))
    client.greet()
    assert client.machine.statistics().restarts_noticed == 0


def test_a_lost_link_ends_calls_at_once_and_greets_when_it_is_back(client):
    ticket = client.machine.calls.lookup(KEYS, client.now)
    client.machine.on_link_lost(client.now)
    assert (ticket.is_done, ticket.failure) == (True, "unreachable")
    client.said()
    assert client.machine.waits_for_link
    client.machine.on_link_up(client.now)
    client.greet()
    assert client.machine.state is ConnectionState.UP


def test_a_put_into_the_arena_is_reserved_copied_and_committed(local):
    ticket = put(local)
    assert local.said() == [m.Reserve(number=ticket.number, keys=pack_keys(KEYS), sizes=(BLOCK_BYTES,) * 3)]
    local.hear(m.Reserved(number=ticket.number, slots=((2, 1, 1), m.NO_SLOT, (0, 1, 1)), stored=b"\0\1\0"))
    (copy,) = local.said()
    assert isinstance(copy, CopyIn)
    assert [source.nbytes for source, _ in copy.copies] == [BLOCK_BYTES] * 2
    assert local.machine.calls.is_open(ticket.number)
    local.machine.calls.on_copied(ticket.number, local.now)
    assert local.said() == [m.Commit(number=ticket.number, seals=b"".join(block.seal for block in BLOCKS))]
    assert not ticket.is_done
    local.hear(m.PutReply(number=ticket.number, stored=b"\1\1\0"))
    assert (ticket.is_done, list(ticket.stored)) == (True, [True, True, False])
    assert local.machine.statistics().refused_puts == 1


def test_a_put_of_what_is_there_copies_nothing(local):
    ticket = put(local)
    local.said()
    local.hear(m.Reserved(number=ticket.number, slots=(m.NO_SLOT,) * 3, stored=b"\1\1\1"))
    assert ticket.is_done
    assert local.said() == [m.ReleaseBlocks(numbers=(ticket.number,))]


def test_a_put_that_is_over_is_not_copied(local):
    ticket = put(local)
    local.said()
    local.hear(m.Reserved(number=ticket.number, slots=((0, 1, 1), m.NO_SLOT, m.NO_SLOT), stored=b"\0\0\0"))
    local.hear(m.UnknownClient(incarnation=78))
    assert ticket.is_done
    assert not local.machine.calls.is_open(ticket.number)


def test_a_large_put_goes_in_parts(client, monkeypatch):
    monkeypatch.setattr("kvstore.client_calls.MAX_BLOCKS_BYTES", 2 * BLOCK_BYTES)
    ticket = put(client)
    (first,) = client.said()
    assert first.keys == pack_keys(KEYS[:2])
    client.hear(m.PutReply(number=ticket.number, stored=b"\1\0"))
    (second,) = client.said()
    assert second.keys == pack_keys(KEYS[2:])
    client.hear(m.PutReply(number=ticket.number, stored=b"\1"))
    assert (ticket.is_done, list(ticket.stored)) == (True, [True, False, True])


@pytest.mark.parametrize(
    "reply",
    [
        m.GetReply(number=1, present=b"\1", seals=b"", slots=()),
        m.GetReply(number=1, present=b"\1", seals=bytes(64), slots=((99, 1, 8),)),
        m.GetReply(number=1, present=b"\1", seals=bytes(64), slots=((0, 1, BLOCK_BYTES + 1),)),
        m.GetReply(number=1, present=b"\0\0\0\1", seals=bytes(64), slots=((0, 1, 8),)),
        m.GetReply(number=1, present=b"\1", seals=bytes(63), slots=((0, 1, 8),)),
    ],
    ids=["no seal", "no such slot", "too long", "no such key", "half a seal"],
)
def test_an_answer_that_does_not_fit_is_a_miss(local, reply):
    ticket = local.machine.calls.get(KEYS, local.now)
    assert ticket.number == 1
    local.said()
    local.hear(reply)
    assert (ticket.is_done, ticket.failure, ticket.blocks) == (True, "protocol_error", [None] * 3)
    assert m.ReleaseBlocks(numbers=(1,)) in local.said()


def test_a_refused_call_is_a_miss(client):
    ticket = client.machine.calls.lookup(KEYS, client.now)
    client.hear(m.AttachRefused(code="store_full", message="full", number=ticket.number))
    assert (ticket.is_done, ticket.failure) == (True, "store_full")


def test_heartbeats_name_what_is_held(local):
    ticket = local.machine.calls.get(KEYS[:1], local.now)
    local.hear(m.GetReply(number=ticket.number, present=b"\1", seals=BLOCKS[0].seal, slots=((0, 1, 8),)))
    waiting = local.machine.calls.lookup(KEYS, local.now)
    local.said()
    local.after(BEAT_S)
    assert local.said() == [m.StoreHeartbeat(last=waiting.number, held=(waiting.number, ticket.number))]
    local.machine.calls.release(ticket)
    local.machine.calls.release(ticket)
    assert local.said() == [m.ReleaseBlocks(numbers=(ticket.number,))]


def test_too_many_keys_are_our_own_mistake(client):
    with pytest.raises(ProtocolError, match="at most"):
        client.machine.calls.lookup(KEYS[:1] * (m.MAX_KEYS + 1), client.now)


def test_keys_without_blocks_are_our_own_mistake(client):
    with pytest.raises(ProtocolError):
        client.machine.calls.put(KEYS, [], [], client.now)
    with pytest.raises(ProtocolError, match="seal"):
        client.machine.calls.put(KEYS[:1], [BLOCKS[0].content], [b"short"], client.now)


def test_what_the_store_withholds_is_reported_by_its_index_over_all_parts(client):
    ticket = client.machine.calls.get(KEYS, client.now)
    first = m.GetReply(number=ticket.number, present=b"\1", seals=BLOCKS[0].seal, is_last=False)
    client.hear(first, [BLOCKS[0].content])
    client.hear(m.GetReply(number=ticket.number, present=b"\0\0", seals=b"", first=1, withheld=b"\0\1"))
    assert ticket.is_done
    assert [block is not None for block in ticket.blocks] == [True, False, False]
    assert set(ticket.withheld) == {2}
