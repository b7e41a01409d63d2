"""Frames between store and client: fixed bytes, and nothing but ProtocolError for anything else."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ProtocolError
from kvstore import messages as m
from kvstore.key import PACKED_KEY_BYTES

KEY = bytes(range(PACKED_KEY_BYTES))
SEAL = bytes(64)
NONCE = bytes(32)
ARENA = m.ArenaFile(pid=7, fd=3, inode=99, num_bytes=4096)

TO_STORE = {
    "hello": m.Hello(client_id="a", session=5, block_bytes=64),
    "attach": m.Attach(nonce=NONCE, pid=7, start_ticks=1),
    "lookup": m.Lookup(number=1, keys=KEY),
    "get": m.Get(number=2, keys=KEY + KEY),
    "release": m.ReleaseBlocks(numbers=(2,)),
    "reserve": m.Reserve(number=3, keys=KEY, sizes=(64,)),
    "commit": m.Commit(number=3, seals=SEAL),
    "put": m.Put(number=4, keys=KEY, seals=SEAL),
    "corrupt": m.Corrupt(keys=KEY, code="digest"),
    "heartbeat": m.StoreHeartbeat(last=4, held=(2,)),
    "goodbye": m.StoreGoodbye(),
}
TO_CLIENT = {
    "welcome": m.Welcome(session=5, incarnation=2**64 - 1, slot_bytes=4096, arena=ARENA),
    "attached": m.Attached(),
    "refused": m.AttachRefused(code="layout", message="no", number=1),
    "unknown": m.UnknownClient(incarnation=1),
    "lookup_reply": m.LookupReply(number=1, hits=b"\x01\x00"),
    "get_reply": m.GetReply(number=2, present=b"\x01", seals=SEAL, slots=((1, 2, 64),)),
    "reserved": m.Reserved(number=3, slots=(m.NO_SLOT,), stored=b"\x01"),
    "put_reply": m.PutReply(number=3, stored=b"\x01"),
    "alive": m.Alive(incarnation=1),
}

# The bytes of every message between a store and a client of this version; a change here is a new version of the protocol.
GOLDEN = {
    "release": "011082a474797065a772656c65617365a76e756d626572739102",
    "heartbeat": "011083a474797065a26862a46c61737404a468656c649102",
    "goodbye": "011081a474797065a3627965",
    "attached": "011181a474797065a86174746163686564",
    "unknown": "011182a474797065a7756e6b6e6f776eab696e6361726e6174696f6e01",
    "lookup_reply": "011183a474797065a96c6f6f6b65645f7570a66e756d62657201a468697473c4020100",
    "put_reply": "011183a474797065a673746f726564a66e756d62657203a673746f726564c40101",
}


def encode(name):
    return m.encode_to_store(TO_STORE[name]) if name in TO_STORE else m.encode_to_client(TO_CLIENT[name])


@pytest.mark.parametrize("name", GOLDEN)
def test_the_bytes_of_a_message_do_not_change(name):
    assert encode(name).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", TO_STORE)
def test_what_a_client_says_is_what_the_store_hears(name):
    assert m.decode_to_store(encode(name)) == TO_STORE[name]


@pytest.mark.parametrize("name", TO_CLIENT)
def test_what_the_store_says_is_what_a_client_hears(name):
    assert m.decode_to_client(encode(name)) == TO_CLIENT[name]


def test_every_message_has_a_sample():
    assert {type(message) for message in TO_STORE.values()} == set(m.ToStore.__args__)
    assert {type(message) for message in TO_CLIENT.values()} == set(m.ToClient.__args__)


@pytest.mark.parametrize("name", [*TO_STORE, *TO_CLIENT])
def test_a_frame_on_the_wrong_side_is_refused(name):
    decode = m.decode_to_client if name in TO_STORE else m.decode_to_store
    with pytest.raises(ProtocolError):
        decode(encode(name))


def test_another_version_is_refused():
    frame = bytearray(encode("goodbye"))
    frame[0] = 9
    with pytest.raises(ProtocolError, match="version 9"):
        m.decode_to_store(frame)


@pytest.mark.parametrize(
    "message",
    [
        m.Lookup(number=1, keys=bytes((m.MAX_KEYS + 1) * PACKED_KEY_BYTES)),
        m.Reserve(number=1, keys=KEY, sizes=(0,)),
        m.Attach(nonce=b"short", pid=1, start_ticks=0),
        m.Hello(client_id="", session=1, block_bytes=64),
        m.Hello(client_id="a", session=1, block_bytes=0),
        m.Lookup(number=-1, keys=KEY),
    ],
)
def test_values_out_of_range_are_refused(message):
    with pytest.raises(ProtocolError, match="malformed"):
        m.decode_to_store(m.encode_to_store(message))


def test_an_oversized_frame_is_not_looked_at():
    with pytest.raises(ProtocolError, match="allowed are"):
        m.decode_to_store(bytes(m.MAX_CONTROL_BYTES + 1))


@given(st.sampled_from(sorted(TO_STORE)), st.data())
def test_a_damaged_frame_decodes_or_is_refused(name, choice):
    frame = bytearray(encode(name))
    for _ in range(choice.draw(st.integers(1, 4))):
        frame[choice.draw(st.integers(0, len(frame) - 1))] = choice.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        m.decode_to_store(frame[: choice.draw(st.integers(0, len(frame)))])


def test_half_a_seal_is_refused():
    with pytest.raises(ProtocolError):
        m.split_seals(bytes(65))
