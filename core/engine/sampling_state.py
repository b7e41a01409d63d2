"""What the sampler keeps per request: parameters as numpy columns, edits of the logits, and the random number.

Owns the counter-based random stream, the incremental penalty counts, and one row per running request. Does not know
schedulers, models or batches; rows are numbered by ``core.engine.input_batch.InputBatch``, read by ``core.engine.sampler``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.attention.torch_kernels import upload
from core.engine.allowed_tokens import keep_allowed
from core.errors import KVFerryError
from core.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from core.grammar.compiled import CompiledGrammar, GrammarMatcher

_PERSON = b"kvferry-sample"
_UINT64 = (1 << 64) - 1
_GREEDY_BELOW = 1e-5  # of the temperature, as in vLLM: dividing by less would overflow


def uniform(seed: int, choice_index: int, position: int) -> float:
    """Return the random number in [0, 1) for one output token: a pure function of its three arguments.

    ``position`` counts the output tokens before this one, other workers' tokens included, so any worker continues the
    stream at any point, independent of its batch. 53 bits of BLAKE2b over the three numbers: cheaper for
    the few rows of a step than a vectorised Philox.
    """
    message = struct.pack("<QQQ", seed & _UINT64, choice_index, position)
    digest = hashlib.blake2b(message, digest_size=8, person=_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class TokenHistory:
    """The distinct tokens of a request and how often each was put out, kept up to date token by token.

    Prompt tokens have a count of 0 until they are put out as well. They are held for the repetition penalty only, and are
    left out (``prompt_token_ids`` empty) where that is off.
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        for token_id in output_token_ids:
            self.append(token_id)

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, ``[num_distinct]`` (a view)."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``token_ids`` was put out, ``[num_distinct]`` (a view)."""
        return self._counts[: len(self._slots)]

    def append(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot >= len(self._ids):
            capacity = max(64, 2 * len(self._ids))
            self._ids = np.concatenate((self._ids, np.zeros(capacity - len(self._ids), dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(capacity - len(self._counts), dtype=np.float32)))
        self._ids[slot] = token_id
        self._counts[slot] += 1.0


class LogitsEdits:
    """Everything that changes one request's logits before a token is chosen.

    Applied in vLLM's order: allowed tokens, stop tokens below ``min_tokens``, bias, penalties; last the grammar, of which
    ``matcher`` is the request's place.
    """

    __slots__ = ("_allowed", "_bias_ids", "_bias_values", "_history", "_matcher", "_params", "_stop_ids")

    def __init__(
        self,
        params: SamplingParams,
        stop_token_ids: Iterable[int],
        history: TokenHistory | None,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self._matcher = matcher
        self._params = params
        self._history = history
        self._allowed = np.array(params.allowed_token_ids, dtype=np.int64) if params.allowed_token_ids else None
        self._stop_ids = np.array(sorted(stop_token_ids), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)

    def append(self, token_id: int) -> None:
        """Count one output token."""
        if self._history is not None:
            self._history.append(token_id)
        if self._matcher is not None:
            self._matcher.accept((token_id,))

    @property
    def failure(self) -> KVFerryError | None:
        """Why no token can follow, where the grammar is the reason."""
        return self._matcher.error if self._matcher is not None else None

    def apply(self, logits: Tensor, num_output_tokens: int) -> None:
        """Change ``logits`` ``[vocab_size]`` (float32) in place."""
        device = logits.device
        if self._allowed is not None:
            allowed = upload(self._allowed, device)
            kept = logits[allowed]
            logits.fill_(-torch.inf)
            logits[allowed] = kept
        must_go_on = num_output_tokens < self._params.min_tokens and self._stop_ids.size > 0
        if must_go_on and self._matcher is None:
            logits[upload(self._stop_ids, device)] = -torch.inf
        if self._bias_ids.size:
            logits[upload(self._bias_ids, device)] += upload(self._bias_values, device)
        if self._history is not None and self._history.token_ids.size:
            self._penalize(logits, self._history)
        if self._matcher is not None:
            keep_allowed(logits, self._allowed_by_grammar(self._matcher, must_go_on))

    def _allowed_by_grammar(self, matcher: GrammarMatcher, must_go_on: bool) -> npt.NDArray[np.uint8] | None:
        """Return the bits of the tokens that the grammar allows.

        Below ``min_tokens`` stop tokens are among them only if the request allows no other.
        """
        bits = matcher.allowed_bits()
        if bits is None or not must_go_on:
            return bits
        others = bits.copy()
        np.bitwise_and.at(others, self._stop_ids // 8, ~(1 << self._stop_ids % 8).astype(np.uint8))
        allowed = self._allowed
        can_go_on = others.any() if allowed is None else (others[allowed // 8] & (1 << allowed % 8).astype(np.uint8)).any()
        return others if can_go_on else bits

    def _penalize(self, logits: Tensor, history: TokenHistory) -> None:
        """Repetition over prompt and output (arXiv 1909.05858), frequency and presence over the output (OpenAI)."""
        params = self._params
        token_ids = upload(history.token_ids, logits.device)
        counts = upload(history.output_counts, logits.device)
        seen = logits[token_ids]
        factor = params.repetition_penalty
        if factor != 1.0:
            seen = torch.where(seen > 0, seen / factor, seen * factor)
        seen -= params.frequency_penalty * counts
        seen -= params.presence_penalty * (counts > 0)
        logits[token_ids] = seen


def build_edits(
    params: SamplingParams,
    stop_token_ids: Iterable[int],
    prompt_token_ids: Iterable[int],
    output_token_ids: Sequence[int],
    grammar: CompiledGrammar | None = None,
) -> LogitsEdits | None:
    """Return the request's edits, None (the common case) where no parameter changes any logit."""
    repetition = params.repetition_penalty != 1.0
    penalized = repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    if not (penalized or params.allowed_token_ids or params.min_tokens or params.logit_bias or grammar is not None):
        return None
    history = TokenHistory(prompt_token_ids if repetition else (), output_token_ids) if penalized else None
    matcher = grammar.start(output_token_ids) if grammar is not None else None
    return LogitsEdits(params, stop_token_ids, history, matcher)


class SamplingRows:
    """Sampling parameters and progress of all running requests, one row each, in numpy columns.

    Rows are dense: ``InputBatch`` says which row a request has and calls ``move`` when it closes a hole.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.temperature = np.ones(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # -1 = none asked for
        self.num_output_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.has_edits = np.zeros(max_num_seqs, dtype=np.bool_)
        self.streams: list[tuple[int, int]] = [(0, 0)] * max_num_seqs  # (seed, choice index)
        self.edits: list[LogitsEdits | None] = [None] * max_num_seqs

    def put(
        self, row: int, params: SamplingParams, choice_index: int, num_output_tokens: int, edits: LogitsEdits | None
    ) -> None:
        """Fill a row for a request that starts or resumes here."""
        self.temperature[row] = params.temperature if params.temperature >= _GREEDY_BELOW else 0.0
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        self.num_output_tokens[row] = num_output_tokens
        self.has_edits[row] = edits is not None
        self.streams[row] = (params.seed, choice_index)
        self.edits[row] = edits

    def move(self, source: int, target: int) -> None:
        """Move a row."""
        for column in (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.num_logprobs,
            self.num_output_tokens,
            self.has_edits,
        ):
            column[target] = column[source]
        self.streams[target] = self.streams[source]
        self.edits[target] = self.edits[source]

    def clear(self, row: int) -> None:
        """Let go of what a row no request uses holds."""
        self.has_edits[row] = False
        self.edits[row] = None

    def advance(self, rows: npt.NDArray[np.int64]) -> None:
        """Count one new output token per row; ``rows`` are distinct. ``append`` follows once it is known."""
        self.num_output_tokens[rows] += 1

    def append(self, row: int, token_id: int) -> None:
        """Let the edits of a row know a token that is counted already."""
        edits = self.edits[row]
        if edits is not None:
            edits.append(token_id)

    def uniforms(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the random number of each row's next token, ``[len(rows)]``."""
        positions = self.num_output_tokens[rows].tolist()
        streams = [self.streams[row] for row in rows.tolist()]
        numbers = [uniform(seed, choice, position) for (seed, choice), position in zip(streams, positions, strict=True)]
        return np.array(numbers, dtype=np.float64)
