from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import ProtocolError
from core.wire import codec
from core.wire.kv import ControlMessage
from core.wire.messages import RouterMessage, Tokens, WorkerMessage

GOLDEN = Path(__file__).with_name("golden_frames.json")

ENCODERS = {
    "worker": codec.encode_worker_message,
    "tokens": codec.encode_tokens,
    "router": codec.encode_router_message,
    "control": codec.encode_control_message,
}
DECODERS = {
    "worker": codec.decode_worker_frame,
    "tokens": codec.decode_worker_frame,
    "router": codec.decode_router_frame,
    "control": codec.decode_control_frame,
}
CAPS = {
    "worker": codec.MAX_WORKER_FRAME_BYTES,
    "router": codec.MAX_ROUTER_FRAME_BYTES,
    "control": codec.MAX_CONTROL_FRAME_BYTES,
}


def golden_frames() -> dict[str, dict[str, str]]:
    return json.loads(GOLDEN.read_text())


GOLDEN_CASES = [(plane, name) for plane, frames in golden_frames().items() for name in frames]
GOLDEN_BYTES = [(plane, bytes.fromhex(text)) for plane, frames in golden_frames().items() for text in frames.values()]


def tampered(plane: str, name: str, **changes: object) -> bytes:
    """Return a golden frame with fields of its outermost message replaced."""
    frame = bytes.fromhex(golden_frames()[plane][name])
    message = msgspec.msgpack.decode(frame[2:])
    message.update(changes)
    return frame[:2] + msgspec.msgpack.encode(message)


@pytest.mark.parametrize(("plane", "name"), GOLDEN_CASES)
def test_every_message_has_the_bytes_it_always_had(wire_samples, plane, name):
    message = wire_samples[plane][name]
    assert ENCODERS[plane](message).hex() == golden_frames()[plane][name]


@pytest.mark.parametrize(("plane", "name"), GOLDEN_CASES)
def test_every_frame_decodes_to_its_message(wire_samples, plane, name):
    assert DECODERS[plane](bytes.fromhex(golden_frames()[plane][name])) == wire_samples[plane][name]


def test_no_message_type_lacks_golden_bytes(wire_samples):
    for plane, union in (("worker", WorkerMessage), ("router", RouterMessage), ("control", ControlMessage)):
        assert {type(message) for message in wire_samples[plane].values()} == set(get_args(union))
        assert wire_samples[plane].keys() == golden_frames()[plane].keys()


def test_defaults_take_no_bytes():
    assert codec.encode_tokens([Tokens("r", 0, 1, (5,))])[2:] == b"\x91\x98\xa1r\x00\x01\x91\x05" + b"\xc0" * 4


@pytest.mark.parametrize("decode", list(DECODERS.values()))
@pytest.mark.parametrize("frame", [b"", b"\x02", b"\x02\x01", b"\x02\x02", b"\x02\x03", b"\x02\x04"])
def test_refuses_frames_without_a_message(decode, frame):
    with pytest.raises(ProtocolError):
        decode(frame)


@pytest.mark.parametrize(("plane", "name"), GOLDEN_CASES)
def test_refuses_another_wire_version(plane, name):
    frame = bytes.fromhex(golden_frames()[plane][name])
    with pytest.raises(ProtocolError, match="version 3"):
        DECODERS[plane](b"\x03" + frame[1:])


@pytest.mark.parametrize("plane", ["worker", "router", "control"])
def test_refuses_frames_of_other_planes(plane):
    decoder = DECODERS[plane]
    foreign = [frame for other, frame in GOLDEN_BYTES if DECODERS[other] is not decoder]
    assert foreign
    for frame in foreign:
        with pytest.raises(ProtocolError, match="does not belong"):
            decoder(frame)


@pytest.mark.parametrize("plane", ["worker", "router", "control"])
def test_refuses_an_unknown_kind(plane):
    with pytest.raises(ProtocolError, match="kind 200"):
        DECODERS[plane](b"\x02\xc8\x80")


@pytest.mark.parametrize("plane", ["worker", "router", "control"])
def test_refuses_oversized_frames_before_decoding_them(plane):
    with pytest.raises(ProtocolError, match="exceeds the cap"):
        DECODERS[plane](bytes(CAPS[plane] + 1))


def test_refuses_to_encode_what_no_peer_would_accept(wire_samples):
    reply = msgspec.structs.replace(wire_samples["control"]["handshake_reply"], transport_metadata=bytes(4 << 20))
    with pytest.raises(ProtocolError, match="more than the cap"):
        codec.encode_control_message(reply)


@pytest.mark.parametrize(("plane", "name"), GOLDEN_CASES)
def test_refuses_every_truncation(plane, name):
    frame = bytes.fromhex(golden_frames()[plane][name])
    for length in range(len(frame)):
        with pytest.raises(ProtocolError):
            DECODERS[plane](frame[:length])


@pytest.mark.parametrize(("plane", "name"), GOLDEN_CASES)
def test_refuses_trailing_bytes(plane, name):
    with pytest.raises(ProtocolError):
        DECODERS[plane](bytes.fromhex(golden_frames()[plane][name]) + b"\x00")


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"deadline_ms": 10**13}, "r1"), ({"prompt_token_ids": "x"}, "r1"), ({"request_id": ""}, ""), ({"request_id": 1}, "")],
)
def test_a_frame_that_is_no_message_may_still_name_its_request(changes, named):
    frame = tampered("router", "generate", **({"request_id": "r1"} | changes))
    with pytest.raises(ProtocolError):
        codec.decode_router_frame(frame)
    assert codec.request_of_frame(frame) == named


@pytest.mark.parametrize("frame", [b"", b"\x02\x03", b"\x02\x03garbage", bytes(codec.MAX_ROUTER_FRAME_BYTES + 1)])
def test_a_frame_that_cannot_be_read_at_all_names_no_request(frame):
    assert codec.request_of_frame(frame) == ""


def test_ignores_fields_of_a_newer_peer():
    message = codec.decode_worker_frame(tampered("worker", "goodbye", colour="blue"))
    assert message == codec.decode_worker_frame(tampered("worker", "goodbye"))


@pytest.mark.parametrize(
    ("plane", "name", "changes"),
    [
        ("worker", "register", {"max_model_len": 0}),
        ("worker", "register", {"role": "spectator"}),
        ("worker", "register", {"incarnation": -1}),
        ("worker", "register", {"engine_id": ""}),
        ("worker", "register", {"engine_id": "x" * 600}),
        ("worker", "register", {"layout": {"dtype": "float32"}}),
        ("worker", "heartbeat", {"num_running": "many"}),
        ("worker", "heartbeat", {"kv_cache_usage": 1.5}),
        ("worker", "heartbeat", {"kv_cache_usage": float("nan")}),
        ("worker", "prefill_done", {"choices": [{"index": -1, "token_id": 1}]}),
        ("worker", "prefill_done", {"choices": [{"index": 0, "token_id": 2**31}]}),
        ("worker", "prefill_done", {"prompt_logprobs": [[[1, 2], [-0.5], 1]]}),
        ("worker", "prefill_done", {"prompt_logprobs": [[[], [], 1]]}),
        ("worker", "request_failed", {"error": {"code": "x", "message": "y", "http_status": 200}}),
        ("worker", "goodbye", {"type": "unheard-of"}),
        ("router", "generate", {"n": 0}),
        ("router", "generate", {"prompt_token_ids": [-1]}),
        ("router", "generate", {"sampling": {"temperature": -0.5}}),
        ("router", "generate", {"sampling": {"top_p": 2.0}}),
        ("router", "generate", {"sampling": {"seed": 2**63}}),
        ("router", "abort", {"request_ids": [7]}),
        ("control", "lease_state", {"left_ms": {"t1": -5}}),
        ("control", "handshake_reply", {"num_blocks": 0}),
        ("control", "handshake", {"transports": "tcp"}),
    ],
)
def test_refuses_wrong_types_and_absurd_values(plane, name, changes):
    with pytest.raises(ProtocolError, match="malformed"):
        DECODERS[plane](tampered(plane, name, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ids": [-1, 4]},
        {"block_ids": [3]},
        {"block_ids": [3, 3]},
        {"generations": [7]},
        {"generations": [7, -1]},
        {"block_hashes": [b"a" * 16]},
        {"block_hashes": [b"a" * 16, b"short"]},
    ],
)
def test_refuses_block_lists_that_do_not_fit_together(changes):
    handoff = msgspec.msgpack.decode(bytes.fromhex(golden_frames()["worker"]["prefill_done"])[2:])["kv_handoff"]
    handoff["groups"][0].update(changes)
    with pytest.raises(ProtocolError, match="malformed"):
        codec.decode_worker_frame(tampered("worker", "prefill_done", kv_handoff=handoff))


def test_refuses_nesting_without_end():
    with pytest.raises(ProtocolError):
        codec.decode_worker_frame(b"\x02\x01\x81\xa1x" + b"\x91" * 100_000 + b"\x01")


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_refuses_lengths_that_the_frame_cannot_hold(header):
    with pytest.raises(ProtocolError):
        codec.decode_worker_frame(b"\x02\x02" + header)


def _only_protocol_errors(frame: bytes) -> None:
    for decode in (codec.decode_worker_frame, codec.decode_router_frame, codec.decode_control_frame):
        try:
            decode(frame)
        except ProtocolError:
            continue


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_only_protocol_errors(noise):
    _only_protocol_errors(noise)


@pytest.mark.slow
@given(st.sampled_from([1, 2, 3, 4]), st.binary(max_size=200))
@settings(max_examples=500, deadline=None)
def test_random_payloads_raise_only_protocol_errors(kind, noise):
    _only_protocol_errors(bytes([1, kind]) + noise)


@pytest.mark.slow
@given(st.sampled_from(GOLDEN_BYTES), st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_frames_raise_only_protocol_errors(case, data):
    frame = bytearray(case[1])
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame) - 1))
        match data.draw(st.sampled_from(["flip", "insert", "delete"])):
            case "flip":
                frame[position] ^= data.draw(st.integers(1, 255))
            case "insert":
                frame[position:position] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                del frame[position : position + data.draw(st.integers(1, 8))]
        frame = frame or bytearray(b"\x00")
    _only_protocol_errors(bytes(frame))


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


@pytest.mark.slow
@given(
    st.lists(
        st.builds(
            Tokens,
            request_id=st.text(min_size=1, max_size=20),
            index=st.integers(0, 1023),
            position=st.integers(0, 2**53),
            token_ids=token_ids,
            finish_reason=st.sampled_from([None, "stop", "length", "abort", "error"]),
            stop_reason=st.none() | st.integers(0, 2**31 - 1),
        ),
        max_size=4,
    )
)
def test_tokens_survive_a_round_trip(tokens):
    assert codec.decode_worker_frame(codec.encode_tokens(tokens)) == tokens


@pytest.mark.parametrize(
    ("plane", "name", "news"),
    [
        ("worker", "heartbeat", {"stalled_ms": 1500.0, "slowest_step_ms": 80.5, "predicted_step_ms": 40.0}),
        ("worker", "heartbeat", {"is_warming_up": True}),
        ("worker", "register", {"start_ms": 12_000, "is_supervised": True}),
        ("worker", "prefill_done", {"num_cached_tokens": 0, "tells_hits": False}),
        ("control", "control_error", {"kind": "renew", "number": 7}),
    ],
)
def test_what_a_message_may_say_beyond_its_old_fields_travels(wire_samples, plane, name, news):
    message = msgspec.structs.replace(wire_samples[plane][name], **news)
    assert DECODERS[plane](ENCODERS[plane](message)) == message


@pytest.mark.parametrize("field", ["stored", "removed"])
def test_refuses_a_report_with_a_part_of_a_key(field):
    with pytest.raises(ProtocolError, match="no whole number of keys"):
        codec.decode_worker_frame(tampered("worker", "content_report", **{field: b"1234567"}))
