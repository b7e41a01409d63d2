"""What a worker sends if replies are larger than a frame."""

from __future__ import annotations

import pytest

from core.wire.codec import decode_worker_frame
from core.wire.messages import EncodeDone, ErrorInfo, Goodbye, PrefillDone, RequestFailed, Tokens
from core.worker.reply_frames import encode_reply


def tokens(request_id: str, count: int, index: int = 0) -> Tokens:
    return Tokens(request_id, index, 0, (1,) * count)


@pytest.fixture(autouse=True)
def small_frames(monkeypatch):
    monkeypatch.setattr("core.wire.codec.MAX_WORKER_FRAME_BYTES", 100)


def test_tokens_of_a_step_share_a_frame():
    step = [tokens("a", 5), tokens("b", 5)]
    (frame,), errors = encode_reply(step)
    assert (decode_worker_frame(frame), errors) == (step, {})


def test_tokens_that_do_not_fit_together_have_a_frame_each():
    step = [tokens("a", 60), tokens("b", 60), tokens("b", 60, index=1)]
    frames, errors = encode_reply(step)
    assert ([decode_worker_frame(frame) for frame in frames], errors) == ([[item] for item in step], {})


def test_tokens_that_do_not_fit_alone_concern_their_request_only():
    frames, errors = encode_reply([tokens("a", 5), tokens("big", 200), tokens("b", 5)])
    assert [decode_worker_frame(frame) for frame in frames] == [[tokens("a", 5)], [tokens("b", 5)]]
    assert list(errors) == ["big"]
    assert "tokens take" in errors["big"].message
    assert "fewer log-probabilities (prompt_logprobs, logprobs)" in errors["big"].message


def test_another_reply_that_does_not_fit_is_an_error_of_its_request():
    frames, errors = encode_reply(EncodeDone(request_id="r" * 100, ec_sources=()))
    assert (frames, list(errors)) == ([], ["r" * 100])


def test_a_prompt_with_too_many_log_probabilities_is_told_to_ask_for_fewer():
    frames, errors = encode_reply(PrefillDone(request_id="r", choices=(), prompt_logprobs=(None,) * 100))
    assert frames == []
    assert "fewer log-probabilities" in errors["r"].message


@pytest.mark.parametrize(
    "message",
    [RequestFailed(request_id="r", error=ErrorInfo(code="x", message="y" * 100)), Goodbye(engine_id="w" * 100, incarnation=1)],
)
def test_what_ends_no_request_is_left_out(message):
    assert encode_reply(message) == ([], {})
