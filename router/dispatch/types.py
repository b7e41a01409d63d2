"""What the HTTP side of the router and its dispatcher exchange: submissions in, updates out, in token ids.

``router.dispatch.dispatcher`` makes updates from worker messages; ``router.openai.postprocess`` turns them into text.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from core.errors import DeadlineExceeded
from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo, FinishReason, LoadFailurePolicy, TokenLogprobs
from core.wire.sampling import SamplingParams
from router.dispatch.timing import FirstTokenTiming, HandoffReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt of a client, in token ids.

    ``media`` are the image files, indexed by ``MMFeature.media_index``, and ``media_places`` their places in the HTTP body. The
    image identifiers are valid only for the weights of ``model_fingerprint``; only workers with these weights serve it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    tenant: int = 0  # names the client's API key; requests of different ones share the cluster fairly
    affinity: str = ""  # names a session or user, whose requests go to the same worker among about equal ones
    cache_salt: str = ""
    kv_load_failure_policy: LoadFailurePolicy | None = None  # None = the workers' setting
    timeout_s: float | None = None  # set by the client; the router's own limit applies if it is None or longer
    spent_s: float = 0.0  # how much of that time was over when it was submitted
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()
    media_places: tuple[str, ...] = ()
    form_field: str = ""  # the field of the HTTP body that gives the form of the output; empty if none does
    model_fingerprint: bytes = b""  # empty without images
    engine_request: bytes = b""  # as that of ``Generate``

    @property
    def num_tokens(self) -> int:
        """The most tokens of a choice, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def budget_s(self, limit_s: float) -> float:
        """Return the time it may still take, in seconds, if every request may take at most ``limit_s``."""
        return (limit_s if self.timeout_s is None else min(limit_s, self.timeout_s)) - self.spent_s


def time_is_over(limit_s: float, *, is_own: bool) -> DeadlineExceeded:
    """Return the error of a request that took longer than ``limit_s``; ``is_own``: the client has set this limit."""
    setting = "timeout_s" if is_own else "router.request_timeout_s"
    param = setting if is_own else None
    return DeadlineExceeded(f"the request took longer than {round(limit_s, 6):g} s, its limit by {setting}", param=param)


class ChoiceUpdate(msgspec.Struct, frozen=True):
    """New tokens of one choice. A struct, as is ``Update``: there is one per token, and a frozen dataclass takes far longer."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class PromptReport:
    """The facts that are known once the prompt is computed. ``timing`` is set if a prefill worker computed it.

    ``model_fingerprint`` names the weights of all workers that serve the request, retries included. ``is_late``: its
    ``num_cached_tokens`` was told at the end of the answer. If it is not ``is_first``, it only completes an earlier report, of
    which that number was not known.
    """

    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    timing: FirstTokenTiming | None = None
    model_fingerprint: bytes = b""
    is_late: bool = False
    is_first: bool = True


class Update(msgspec.Struct):
    """New output of one request for its client. An update with ``error`` holds nothing else and is the last."""

    choices: list[ChoiceUpdate] = msgspec.field(default_factory=list)
    prompt: PromptReport | None = None
    handoff: HandoffReport | None = None
    error: ErrorInfo | None = None

    @property
    def has_tokens(self) -> bool:
        """True if a choice has new tokens."""
        choices = self.choices
        return bool(choices[0].token_ids) if len(choices) == 1 else any(choice.token_ids for choice in choices)

    @property
    def ends_something(self) -> bool:
        """True if it ends a choice, or the request with an error."""
        choices = self.choices
        if len(choices) == 1:
            return choices[0].finish_reason is not None
        return self.error is not None or any(choice.finish_reason is not None for choice in choices)


def token_update(token_ids: tuple[int, ...]) -> Update:
    """Return the update of a request's only choice with tokens that end nothing."""
    return Update([ChoiceUpdate(0, token_ids)])
