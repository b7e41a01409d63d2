"""The owner's half of the handshake."""

import math

import msgspec
import pytest

from connectors.p2p.producer.handshake import HandshakeResponder, WorkerIdentity, peer_error
from core.errors import LayoutMismatch
from core.wire.kv import Handshake, HandshakeRefused, HandshakeReply
from core.wire.messages import ErrorInfo
from core.wire.pairing import check_compatible

OFFERS = {"shm": b"a file", "nixl": b"an agent", "tcp": b"an address"}


@pytest.fixture
def owner(make_identity) -> WorkerIdentity:
    return make_identity("prefill-0", 42)


@pytest.fixture
def responder(owner) -> HandshakeResponder:
    return HandshakeResponder(owner, 512, OFFERS, has_digests=True)


@pytest.fixture
def question(make_identity):
    reader = make_identity()

    def ask(**changed) -> Handshake:
        values = {
            "engine_id": reader.engine_id,
            "incarnation": reader.incarnation,
            "model_fingerprint": reader.model_fingerprint,
            "layout": reader.layout,
            "transports": ("shm", "tcp"),
            "host_id": reader.host_id,
        }
        return Handshake(**(values | changed))

    return ask


def test_compatible_reader_gets_all_it_needs_to_read(responder, owner, question):
    assert responder.answer(question()) == HandshakeReply(
        engine_id="prefill-0",
        incarnation=42,
        model_fingerprint=owner.model_fingerprint,
        layout=owner.layout,
        transport="shm",
        transport_metadata=b"a file",
        num_blocks=512,
        has_digests=True,
    )


def test_other_model_is_refused_with_both_fingerprints(responder, question):
    answer = responder.answer(question(model_fingerprint=b"\xab\xcd"))
    assert isinstance(answer, HandshakeRefused)
    assert (answer.code, answer.engine_id, answer.incarnation) == ("layout", "prefill-0", 42)
    assert b"\xab\xcd".hex() in answer.message
    assert b"model".hex() in answer.message


def test_a_refused_reader_does_not_learn_the_fingerprint_that_it_lacks(make_identity, question):
    fingerprint = bytes(range(100, 116))
    responder = HandshakeResponder(make_identity(model_fingerprint=fingerprint), 8, {}, False)
    answer = responder.answer(question(model_fingerprint=b"\xab\xcd"))
    assert isinstance(answer, HandshakeRefused)
    assert fingerprint.hex()[:12] in answer.message
    assert fingerprint.hex()[:16] not in answer.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "bfloat16"),
        ("order", "NHD"),
        ("block_size", 64),
        ("num_layers", 9),
        ("num_kv_heads", 3),
        ("head_dim", 5),
        ("block_bytes", 7),
        ("num_groups", 2),
    ],
)
def test_each_difference_of_the_layouts_is_refused_with_both_values(responder, question, layout, field, value):
    other = msgspec.structs.replace(layout, **{field: value})
    answer = responder.answer(question(layout=other))
    assert isinstance(answer, HandshakeRefused)
    assert answer.code == "layout"
    assert f"{field} {value} at the peer, {getattr(layout, field)} at prefill-0" in answer.message


@pytest.mark.parametrize(("block_size", "is_paired"), [(32, True), (64, True), (48, False), (128, False)])
def test_blocks_that_meet_too_seldom_to_be_converted_are_refused(make_identity, question, layout, block_size, is_paired):
    """A token of 1 MiB; 64 MiB can be converted at once."""
    ours = msgspec.structs.replace(layout, block_size=32, block_bytes=32 << 20)
    other = msgspec.structs.replace(layout, block_size=block_size, block_bytes=block_size << 20)
    answer = HandshakeResponder(make_identity("prefill-0", layout=ours), 512, OFFERS, True).answer(question(layout=other))
    assert isinstance(answer, HandshakeReply) == is_paired
    if not is_paired:
        assert answer.code == "layout"
        assert f"block_size {block_size} at the peer and 32 at prefill-0" in answer.message
        assert f"are {math.lcm(32, block_size) << 20} bytes; at most {64 << 20} can be" in answer.message


def shaped(layout, order="HNC", **shape):
    """Return a layout of 4 layers whose token of a head takes 64 bytes."""
    found = msgspec.structs.replace(layout, order=order, num_layers=4, **shape)
    return msgspec.structs.replace(found, block_bytes=4 * 64 * found.num_kv_heads * found.block_size)


@pytest.mark.parametrize(
    ("order", "ours", "theirs", "refusal"),
    [
        ("HNC", {"num_kv_heads": 2}, {"num_kv_heads": 4}, ""),
        ("HNC-amx", {"num_kv_heads": 2}, {"num_kv_heads": 4}, ""),
        ("opaque", {"num_kv_heads": 2}, {"num_kv_heads": 4}, "num_kv_heads 4 at the peer, 2 at"),
        ("NHD", {"num_kv_heads": 2}, {"num_kv_heads": 4}, "num_kv_heads 4 at the peer, 2 at"),
        ("HND", {"num_kv_heads": 2}, {"num_kv_heads": 4}, "num_kv_heads 4 at the peer, 2 at"),
        ("HND", {}, {"block_size": 64, "num_kv_heads": 1, "num_planes": 4}, "num_kv_heads 1 at the peer, 2 at"),
        ("HNC", {"num_planes": 4}, {"num_planes": 1}, ""),
        ("opaque", {"num_planes": 4}, {"num_planes": 1}, ""),
        ("HNC-amx", {"block_size": 32}, {"block_size": 64}, "block_size 64 at the peer, 32 at"),
        ("HNC-vec", {"block_size": 32}, {"block_size": 64, "num_kv_heads": 1, "num_planes": 4}, ""),
        ("HNC", {"block_size": 32, "num_kv_heads": 2}, {"block_size": 64, "num_kv_heads": 1}, "rows of the same 16384 bytes"),
    ],
)
def test_blocks_are_paired_if_what_differs_can_be_told_apart(make_identity, layout, order, ours, theirs, refusal):
    both = {"block_size": 32, "num_kv_heads": 2}
    owner = make_identity("prefill-0", layout=shaped(layout, order, **(both | ours)))
    theirs = shaped(layout, order, **(both | theirs))
    if not refusal:
        check_compatible(owner, owner.model_fingerprint, theirs)
        with pytest.raises(LayoutMismatch):
            check_compatible(owner, owner.model_fingerprint, theirs, converts_blocks=False)
        return
    with pytest.raises(LayoutMismatch, match=refusal):
        check_compatible(owner, owner.model_fingerprint, theirs)


def test_all_differences_are_told_at_once(make_identity, layout):
    other = msgspec.structs.replace(layout, dtype="float16", head_dim=9)
    with pytest.raises(LayoutMismatch, match=r"dtype float16 .*; head_dim 9 "):
        check_compatible(make_identity(), b"model", other)


@pytest.mark.parametrize(
    ("preferences", "host_id", "chosen"),
    [
        (("shm", "tcp"), "host", "shm"),
        (("tcp", "shm"), "host", "tcp"),
        (("shm", "tcp"), "another host", "tcp"),
        (("shm", "nixl", "tcp"), "another host", "nixl"),
        (("rdma", "tcp"), "host", "tcp"),
    ],
)
def test_first_preference_of_the_reader_that_works_between_the_two_is_chosen(responder, question, preferences, host_id, chosen):
    answer = responder.answer(question(transports=preferences, host_id=host_id))
    assert (answer.transport, answer.transport_metadata) == (chosen, OFFERS[chosen])


@pytest.mark.parametrize(
    ("preferences", "host_id", "hosts"),
    [(("shm",), "another host", "different hosts"), (("rdma",), "host", "the same host"), ((), "host", "the same host")],
)
def test_readers_without_a_common_transport_are_refused_with_both_lists(responder, question, preferences, host_id, hosts):
    answer = responder.answer(question(transports=preferences, host_id=host_id))
    assert isinstance(answer, HandshakeRefused)
    assert answer.code == "connector_unavailable"
    assert str(list(preferences)) in answer.message
    assert "['shm', 'nixl', 'tcp']" in answer.message
    assert hosts in answer.message


@pytest.mark.parametrize(
    ("kv_verify", "transports", "is_refused"),
    [
        ("auto", ("tcp",), True),
        ("auto", ("shm",), False),
        ("auto", ("nixl",), False),
        ("digest", ("shm",), True),
        ("digest", ("nixl",), True),
        ("identity", ("tcp",), False),
    ],
)
@pytest.mark.parametrize("has_digests", [False, True])
def test_reader_that_verifies_digests_needs_an_owner_that_makes_them(
    owner, question, kv_verify, transports, is_refused, has_digests
):
    responder = HandshakeResponder(owner, 512, OFFERS, has_digests)
    answer = responder.answer(question(kv_verify=kv_verify, transports=transports))
    if is_refused and not has_digests:
        assert isinstance(answer, HandshakeRefused)
        assert answer.code == "connector_unavailable"
        assert f"kv_verify = {kv_verify} over {transports[0]}" in answer.message
        assert "the owner's seals have none" in answer.message
    else:
        assert (answer.transport, answer.has_digests) == (transports[0], has_digests)


def test_transport_that_cannot_be_verified_is_skipped_where_another_can(owner, question):
    responder = HandshakeResponder(owner, 512, OFFERS, has_digests=False)
    answer = responder.answer(question(kv_verify="auto", transports=("tcp", "nixl")))
    assert (answer.transport, answer.transport_metadata) == ("nixl", OFFERS["nixl"])


def test_what_a_peer_reports_is_bounded():
    assert peer_error("layout", "short") == ErrorInfo(code="layout", message="short", http_status=502)
    strange = peer_error("made-up-17", "x" * 5000)
    assert (strange.code, len(strange.message)) == ("other", 500)
