"""The frames of a worker's replies. What no frame can hold concerns its own request only.

Knows no sockets. ``core.wire.codec`` owns the size of a frame.
"""

from __future__ import annotations

from core.errors import ProtocolError
from core.wire.codec import encode_tokens, encode_worker_message
from core.wire.messages import PrefillDone, RequestFailed, Tokens, WorkerMessage

_ADVICE = "ask for fewer log-probabilities (prompt_logprobs, logprobs), or send a shorter prompt"


def encode_reply(message: WorkerMessage | list[Tokens]) -> tuple[list[bytes], dict[str, ProtocolError]]:
    """Return the frames of a message, or of the tokens of one step, and an error for each request that exceeds one.

    Tokens share a frame, or have one each if they do not fit into it together.
    """
    try:
        return [encode_tokens(message) if isinstance(message, list) else encode_worker_message(message)], {}
    except ProtocolError as error:
        if isinstance(message, list):
            return _encode_each(message, error)
        if isinstance(message, RequestFailed) or not hasattr(message, "request_id"):
            return [], {}
        return [], {message.request_id: _advised(error) if isinstance(message, PrefillDone) else error}


def _encode_each(step: list[Tokens], error: ProtocolError) -> tuple[list[bytes], dict[str, ProtocolError]]:
    if len(step) == 1:
        return [], {step[0].request_id: _advised(error)}
    frames: list[bytes] = []
    errors: dict[str, ProtocolError] = {}
    for tokens in step:
        alone, unsendable = encode_reply([tokens])
        frames += alone
        errors |= unsendable
    return frames, errors


def _advised(error: ProtocolError) -> ProtocolError:
    return ProtocolError(f"{error.message}: {_ADVICE}")
