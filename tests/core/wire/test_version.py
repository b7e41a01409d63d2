"""The refusal of another wire version: its bytes never change, and every version reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ProtocolError, VersionMismatch
from core.wire import codec
from core.wire.messages import Goodbye, Release
from core.wire.version import FIRST_RETRY_S, MAX_RETRY_S, RetryBackoff, VersionRefuser, encode_refusal

VERSIONS = st.integers(1, 255)
DECODERS = [codec.decode_worker_frame, codec.decode_router_frame, codec.decode_control_frame]
ROUTER_MESSAGE = Release(transfer_ids=("t",))


def test_the_bytes_of_a_refusal_are_frozen():
    assert encode_refusal(1, 2) == bytes.fromhex("00 4b 46 56 52 01 02")


@pytest.mark.parametrize("decode", DECODERS)
@given(VERSIONS, VERSIONS, VERSIONS, st.binary(max_size=20))
def test_every_version_reads_a_refusal_on_every_plane(decode, ours, theirs, refused, appended):
    with pytest.raises(VersionMismatch) as found:
        decode(encode_refusal(theirs, refused) + appended, ours)
    assert (found.value.ours, found.value.theirs, found.value.is_refusal) == (ours, theirs, True)


@given(VERSIONS, VERSIONS)
def test_a_frame_is_read_by_its_own_version_only(sender, receiver):
    frame = codec.encode_router_message(ROUTER_MESSAGE, sender)
    if sender == receiver:
        assert codec.decode_router_frame(frame, receiver) == ROUTER_MESSAGE
        return
    with pytest.raises(VersionMismatch) as found:
        codec.decode_router_frame(frame, receiver)
    assert (found.value.ours, found.value.theirs, found.value.is_refusal) == (receiver, sender, False)
    assert f"version {sender}" in found.value.message
    assert f"speaks {receiver}" in found.value.message


def mismatch_of(frame, version):
    try:
        codec.decode_worker_frame(frame, version)
    except VersionMismatch as error:
        return error
    except ProtocolError:
        pass
    return None


@given(st.binary(min_size=3, max_size=300), VERSIONS)
def test_a_refusal_of_any_bytes_is_not_answered(frame, version):
    error = mismatch_of(frame, version)
    answer = error and VersionRefuser().answer(b"peer", error, 0.0)
    if answer:
        back = mismatch_of(answer, version % 255 + 1)
        assert back.is_refusal
        assert VersionRefuser().answer(b"peer", back, 0.0) is None
    else:
        assert frame[0] == version or error.is_refusal


def test_a_peer_is_refused_once_per_interval():
    refuser, error = VersionRefuser(interval_s=5.0), VersionMismatch(ours=1, theirs=2)
    answers = [refuser.answer(b"a", error, now) for now in (0.0, 0.1, 4.9, 5.0, 5.1)]
    assert answers == [encode_refusal(1, 2), None, None, encode_refusal(1, 2), None]
    assert refuser.answer(b"b", error, 5.1) is not None


def test_tries_double_up_to_the_longest_pause_and_start_over_once_accepted():
    backoff = RetryBackoff()
    assert [backoff.start(), backoff.start()] == [True, False]
    pauses = [backoff.next_delay_s() for _ in range(9)]
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert pauses[-1] == MAX_RETRY_S
    assert [backoff.end(), backoff.end()] == [True, False]
    assert backoff.next_delay_s() == FIRST_RETRY_S


def test_messages_begin_with_the_wire_version():
    assert codec.encode_worker_message(Goodbye(engine_id="w", incarnation=1))[0] == codec.WIRE_VERSION == 2
