"""An answer that another engine has begun under a grammar is generated again from its first token, and compared.

A server can begin a grammar only at the first token of an answer, so output so far cannot become part of the prompt. The same
holds for words that must not come (``bad_words``): vLLM looks for their first tokens in the output only. With the same seed
the same tokens come again; those that the client has are held back. Other tokens end the request. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agent.vllm_protocol import Choice, Logprobs, rendered
from core.errors import RequestError
from core.request import NewRequest


class ReplayDiverged(RequestError):
    """Another engine has generated other tokens than those that the client has, so the answer cannot go on."""

    code = "replay_diverged"
    http_status = 503


def is_regenerated(request: NewRequest) -> bool:
    """Return True if output so far is generated again."""
    if not request.output_token_ids:
        return False
    found = rendered(request)
    return request.sampling.structured_output is not None or (found is not None and found.must_begin_anew)


class KnownTokens:
    """Takes from an answer the tokens that its client has."""

    def __init__(self, known: Sequence[int]) -> None:
        self._known = known
        self._num_seen = 0

    def strip(self, choice: Choice) -> Choice:
        """Return what is new of a part of the answer.

        Raises:
            ReplayDiverged: the client has other tokens, or more.
        """
        token_ids = choice.token_ids or []
        num_left = len(self._known) - self._num_seen
        again, new = token_ids[:num_left], token_ids[num_left:]
        if again != list(self._known[self._num_seen : self._num_seen + len(again)]) or (
            choice.finish_reason is not None and len(again) < num_left
        ):
            raise ReplayDiverged(
                f"the engine was lost after {len(self._known)} tokens of an answer that must begin anew, and the next engine "
                f"generated other ones: send the request again"
            )
        self._num_seen += len(again)
        if not again:
            return choice
        content = choice.logprobs.content if choice.logprobs is not None else None
        logprobs = Logprobs(content[len(again) :]) if content is not None else choice.logprobs
        return msgspec.structs.replace(choice, token_ids=new, logprobs=logprobs)
