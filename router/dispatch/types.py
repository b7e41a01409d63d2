"""What passes between the client's side of the router and the workers': a submission in, updates out. In token ids, never text.

Owns the types only. ``router.dispatch.dispatcher`` makes the updates from worker messages; ``router.openai.postprocess`` turns
them into text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.wire.media import MMFeature
from core.wire.messages import ErrorInfo, FinishReason, LoadFailurePolicy, TokenLogprobs
from core.wire.sampling import SamplingParams
from router.dispatch.timing import FirstTokenTiming, HandoffReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a client wants, in token ids.

    ``media`` are the files of its images by ``MMFeature.media_index``; ``media_places`` says where the client named each, and
    ``model_fingerprint`` for which weights their identifiers were made. It goes to workers with these only.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    kv_load_failure_policy: LoadFailurePolicy | None = None  # None = the workers' own
    timeout_s: float | None = None  # the client's; None, or one beyond the router's own = the router's
    mm_features: tuple[MMFeature, ...] = ()
    media: tuple[bytes, ...] = ()
    media_places: tuple[str, ...] = ()
    model_fingerprint: bytes = b""  # empty = without images

    @property
    def num_tokens(self) -> int:
        """What a choice may grow to, prompt included."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens

    def budget_s(self, limit_s: float) -> float:
        """How long it may take, where a request may take ``limit_s`` at most."""
        return limit_s if self.timeout_s is None else min(limit_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """New tokens of one choice."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What is known once the prompt is computed. ``timing`` is there if a prefill worker has computed it.

    ``model_fingerprint`` is that of the workers that answer: whoever goes on with the request has the same weights.
    """

    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    timing: FirstTokenTiming | None = None
    model_fingerprint: bytes = b""


@dataclass(slots=True)
class Update:
    """An update of one request for its client. ``error`` comes alone and last."""

    choices: list[ChoiceUpdate] = field(default_factory=list)
    prompt: PromptReport | None = None
    handoff: HandoffReport | None = None
    error: ErrorInfo | None = None
