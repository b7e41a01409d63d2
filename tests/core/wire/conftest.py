"""One sample of every message of the wire, with every field set to something that is not its default."""

from __future__ import annotations

import msgspec
import pytest

from core.tracing import TraceContext
from core.wire.contents import ContentReport
from core.wire.early import MeetProducer, PrefillProgress, PullEarly
from core.wire.engine_calls import EngineCall, EngineReply
from core.wire.kv import (
    ControlError,
    GroupBlocks,
    Handshake,
    HandshakeRefused,
    HandshakeReply,
    KVHandoff,
    KVLayoutInfo,
    LeaseRelease,
    LeaseRenew,
    LeaseState,
    PrefixHeld,
    PrefixQuestion,
    PrefixRefused,
)
from core.wire.media import ECSeal, ECSource, MMFeature
from core.wire.messages import (
    Abort,
    ChoiceStart,
    Drain,
    EncodeDone,
    EncodeFailed,
    EncodeRequest,
    ErrorInfo,
    Generate,
    Goodbye,
    Heartbeat,
    PrefillChoice,
    PrefillDone,
    Refused,
    Register,
    Registered,
    RegisterEncoder,
    Rejected,
    Release,
    Renew,
    RequestFailed,
    SwitchRefused,
    SwitchRole,
    TokenLogprobs,
    Tokens,
    TransferUsage,
    Usage,
)
from core.wire.sampling import SamplingParams, StructuredOutput

LAYOUT = KVLayoutInfo(
    dtype="float32", order="HND", block_size=64, num_layers=2, num_kv_heads=3, head_dim=4, block_bytes=12288, num_groups=2
)
HANDOFF = KVHandoff(
    transfer_id="t1",
    engine_id="p0",
    incarnation=2**64 - 1,
    control_address="tcp://127.0.0.1:5",
    model_fingerprint=b"model",
    layout=LAYOUT,
    groups=(GroupBlocks(group_id=1, block_ids=(3, 4), generations=(7, 8), block_hashes=(b"a" * 16, b"b" * 16)),),
    num_tokens=100,
    lease_ms=30000,
)
SAMPLING = SamplingParams(
    max_tokens=5,
    min_tokens=1,
    temperature=0.5,
    top_p=0.25,
    top_k=3,
    min_p=0.125,
    seed=9,
    repetition_penalty=1.5,
    presence_penalty=-1.0,
    frequency_penalty=2.0,
    logit_bias={4: -100.0},
    allowed_token_ids=(1, 2),
    stop_token_ids=(0,),
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
    structured_output=StructuredOutput(kind="regex", value="a+"),
)
LOGPROBS = TokenLogprobs((5, 6), (-0.5, -1.5), 1)
ERROR = ErrorInfo(code="digest", message="bad", http_status=502, retryable=True, param="prompt")
TRANSFER = TransferUsage(
    transport="shm",
    transferred_tokens=1,
    transferred_bytes=2,
    transfer_ms=3.5,
    verify_ms=0.25,
    queue_ms=4.5,
    first_step_ms=5.5,
    verified_blocks=6,
    recomputed_tokens=7,
    fallback_reason="stale",
)
TRACE = TraceContext(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="vendor=1")
FEATURE = MMFeature(identifier=b"i" * 16, offset=1, length=2, num_embeds=2, media_index=1)
SOURCE = ECSource(
    seal=ECSeal(identifier=b"i" * 16, num_embeds=2, hidden_size=4, dtype="float32", digest=2**64 - 1),
    connector="shared",
    engine_id="e0",
    incarnation=3,
    lease_ms=60000,
    payload=b"where",
)

WORKER_MESSAGES = {
    "prefill_progress": PrefillProgress(request_id="r1", kv_handoff=HANDOFF, first_token=16, ready_ms=250.0),
    "register": Register(
        engine_id="p0",
        incarnation=1,
        role="prefill",
        model="m",
        model_fingerprint=b"model",
        layout=LAYOUT,
        max_model_len=2048,
        max_num_seqs=8,
        num_blocks=10,
        max_num_choices=40,
        connector="p2p",
        transports=("shm", "tcp"),
        host_id="host",
        kv_verify="digest",
        has_digests=True,
        ops_address="http://127.0.0.1:1",
        pid=7,
        ec_connector="shared",
    ),
    "register_encoder": RegisterEncoder(
        engine_id="e0",
        incarnation=3,
        model="m",
        model_fingerprint=b"model",
        ec_connector="shared",
        max_num_images=9,
        host_id="host",
        ops_address="http://127.0.0.1:2",
        pid=8,
    ),
    "heartbeat": Heartbeat(
        engine_id="p0",
        incarnation=1,
        num_running=1,
        num_waiting=2,
        kv_cache_usage=0.5,
        num_leased_blocks=3,
        is_draining=True,
    ),
    "content_report": ContentReport(
        engine_id="p0", incarnation=1, number=7, is_snapshot=True, stored=bytes(range(16)), removed=b"removed."
    ),
    "heartbeat_of_switched": Heartbeat(
        engine_id="p0", incarnation=1, number=9, num_switches=2, num_of_former_role=3, is_planner=True
    ),
    "switch_refused": SwitchRefused(engine_id="p0", incarnation=1, error=ERROR),
    "goodbye": Goodbye(engine_id="p0", incarnation=1),
    "prefill_done": PrefillDone(
        request_id="r1",
        choices=(PrefillChoice(index=0, token_id=5, logprobs=LOGPROBS, finish_reason="stop", stop_reason=2),),
        kv_handoff=HANDOFF,
        prompt_logprobs=(None, LOGPROBS),
        num_cached_tokens=16,
        queue_ms=1.5,
        prefill_ms=2.5,
    ),
    "request_failed": RequestFailed(request_id="r1", error=ERROR),
    "encode_done": EncodeDone(request_id="r1", ec_sources=(SOURCE,), num_cached=1, queue_ms=1.5, encode_ms=2.5),
    "encode_failed": EncodeFailed(request_id="r1", error=ERROR, media_index=1),
    "engine_reply": EngineReply(
        request_id="r1", position=2, body=b"part", status=404, content_type="application/json", is_last=True
    ),
    "rejected": Rejected(error=ERROR),
}
TOKENS = {
    "tokens": [
        Tokens("r1", 0, 1, (5,)),
        Tokens(
            "r1",
            1,
            2,
            (6, 7),
            "stop",
            7,
            (LOGPROBS, LOGPROBS),
            Usage(num_cached_tokens=3, prompt_logprobs=(None, LOGPROBS), kv_transfer=TRANSFER),
        ),
    ],
}
ROUTER_MESSAGES = {
    "meet_producer": MeetProducer(engine_id="prefill-0", incarnation=7, control_address="tcp://10.0.0.1:5600"),
    "pull_early": PullEarly(
        request_id="r1", kv_handoff=HANDOFF, ready_ms=250.0, prompt_token_ids=(1, 2, 3), cache_salt="tenant"
    ),
    "registered": Registered(router_id="router", heartbeat_interval_ms=500),
    "registered_snapshot": Registered(router_id="router", takes_contents=True, needs_snapshot=True),
    "refused": Refused(error=ERROR),
    "generate": Generate(
        request_id="r1",
        prompt_token_ids=(1, 2, 300),
        sampling=SAMPLING,
        n=2,
        handoff=True,
        kv_handoff=HANDOFF,
        choices=(ChoiceStart(index=0, output_token_ids=(5,)),),
        priority=-1,
        cache_salt="salt",
        deadline_ms=1000,
        kv_load_failure_policy="fail",
        trace=TRACE,
        mm_features=(FEATURE,),
        media=(b"", b"file"),
        ec_sources=(SOURCE,),
        engine_request=b"{}",
    ),
    "encode_request": EncodeRequest(
        request_id="r1", mm_features=(FEATURE,), media=(b"", b"file"), priority=-1, deadline_ms=1000, trace=TRACE
    ),
    "engine_call": EngineCall(request_id="r1", path="/v1/messages", body=b"{}", deadline_ms=1000),
    "abort": Abort(request_ids=("r1",), reason="timeout"),
    "release": Release(transfer_ids=("t1",)),
    "renew": Renew(transfer_ids=("t1",)),
    "drain": Drain(deadline_ms=10),
    "registered_planner": Registered(router_id="router", plans_roles=True, num_switches=2),
    "switch_role": SwitchRole(role="prefill", incarnation=1, num_switches=2, heartbeat=9, reason="why"),
}
CONTROL_MESSAGES = {
    "handshake": Handshake(
        engine_id="d0", incarnation=2, model_fingerprint=b"model", layout=LAYOUT, transports=("tcp",), host_id="h"
    ),
    "handshake_reply": HandshakeReply(
        engine_id="p0",
        incarnation=1,
        model_fingerprint=b"model",
        layout=LAYOUT,
        transport="tcp",
        transport_metadata=b"meta",
        num_blocks=10,
    ),
    "handshake_refused": HandshakeRefused(engine_id="p0", incarnation=1, code="layout", message="64 != 16"),
    "lease_renew": LeaseRenew(transfer_ids=("t1", "t2")),
    "lease_state": LeaseState(incarnation=1, left_ms={"t1": 0}),
    "lease_release": LeaseRelease(transfer_ids=("t1",), reason="aborted"),
    "prefix_question": PrefixQuestion(
        number=4, engine_id="decode-0", incarnation=1, model_fingerprint=b"\x01\x02", block_size=64, chain=bytes(range(32))
    ),
    "prefix_held": PrefixHeld(number=4, kv_handoff=HANDOFF),
    "prefix_refused": PrefixRefused(number=4, incarnation=1, reason="pressure"),
    "control_error": ControlError(code="protocol_error", message="bad"),
}


@pytest.fixture
def wire_samples() -> dict[str, dict[str, msgspec.Struct | list[Tokens]]]:
    return {"worker": WORKER_MESSAGES, "tokens": TOKENS, "router": ROUTER_MESSAGES, "control": CONTROL_MESSAGES}
