"""When a request ends by its own tokens.

Knows token ids and lengths only; stop strings belong to the router, which owns the text.
"""

from __future__ import annotations

from core.request import Request, RequestStatus


def check_stop(request: Request, token_id: int, max_model_len: int) -> bool:
    """Set the finished status if ``token_id``, just appended, ends the request; return whether it does.

    A stop token before ``min_tokens`` does not count (the sampler masks it, too), but one does that a grammar has left as the
    only token. ``stop_reason`` names a stop token that the client asked for; it stays None at an end-of-sequence token, as in
    vLLM.
    """
    counts = request.grammar is not None or request.num_output_tokens >= request.sampling.min_tokens
    if counts and token_id in request.stop_token_ids:
        request.status = RequestStatus.FINISHED_STOPPED
        request.stop_reason = token_id if token_id in request.sampling.stop_token_ids else None
        return True
    if request.num_output_tokens >= request.max_tokens or request.num_tokens >= max_model_len:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False


def append_output_tokens(request: Request, token_ids: list[int], max_model_len: int) -> list[int]:
    """Append sampled tokens up to the one that ends the request; return the appended tokens."""
    for count, token_id in enumerate(token_ids, start=1):
        request.append_output_token(token_id)
        if check_stop(request, token_id, max_model_len):
            return token_ids[:count]
    return token_ids
