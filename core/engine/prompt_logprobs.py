"""Log-probabilities of prompt tokens, gathered over the chunks of a prompt.

Owns the missing positions of each request that wants them. Selects the rows of hidden states before the pass, and computes
their log-probabilities after it. The row at position i predicts token i + 1; token 0 has none. A request that asks computes
its whole prompt here; if the last steps of it were discarded, it computes their tokens again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from core.engine.input_batch import StepInputs
from core.engine.sampler import gather_logprobs
from core.request import NewRequestData
from core.wire.messages import TokenLogprobs

_ROWS_PER_CHUNK = 64  # logits of a whole chunk of prompt would take vocab_size floats per row


@dataclass(slots=True)
class _Pending:
    token_ids: list[int]
    num_top: int
    entries: list[TokenLogprobs | None]


@dataclass(slots=True)
class PromptRows:
    """Rows of one step whose logits are needed for one request: ``rows`` of the step, ``first`` its first prompt position."""

    request_id: str
    first: int
    rows: npt.NDArray[np.int64]
    is_last: bool


class PromptLogprobs:
    """Requests whose prompt log-probabilities are not complete yet, or whose last step may still be discarded."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}

    def add(self, new: NewRequestData) -> None:
        """Note a request that asks. One with output has had its answer, here or elsewhere.

        A request that is still known was rolled back to ``num_computed_tokens``: the entries of these stay, and those of later
        tokens are computed again.
        """
        num_top = new.sampling.prompt_logprobs
        if num_top is None or len(new.token_ids) > new.num_prompt_tokens:
            self.remove(new.request_id)
            return
        if new.request_id in self._pending:
            return
        token_ids = new.token_ids[: new.num_prompt_tokens].tolist()
        self._pending[new.request_id] = _Pending(token_ids, num_top, [None] * len(token_ids))

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._pending.pop(request_id, None)

    def select(self, inputs: StepInputs) -> list[PromptRows]:
        """Return the rows of this step that are needed."""
        if not self._pending:
            return []
        found = []
        query_start_loc = inputs.batches[0].query_start_loc
        for number, request_id in enumerate(inputs.request_ids):
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            begin, end = int(query_start_loc[number]), int(query_start_loc[number + 1])
            first = int(inputs.positions[begin])
            if first >= len(pending.token_ids):  # the step that completed the prompt was good: there is output
                self.remove(request_id)
                continue
            last_prompt_row = begin + len(pending.token_ids) - 1 - first
            rows = np.arange(begin, min(end, last_prompt_row), dtype=np.int64)
            found.append(PromptRows(request_id, first, rows, is_last=end > last_prompt_row))
        return found

    def take(
        self, part: PromptRows, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]
    ) -> tuple[TokenLogprobs | None, ...] | None:
        """Add the hidden states ``[len(part.rows), hidden_size]``; return all entries once the prompt is complete."""
        pending = self._pending[part.request_id]
        for offset in range(0, len(part.rows), _ROWS_PER_CHUNK):
            logprobs = compute_logits(hidden[offset : offset + _ROWS_PER_CHUNK]).float().log_softmax(-1)
            place = part.first + offset + 1
            token_ids = pending.token_ids[place : place + len(logprobs)]
            pending.entries[place : place + len(logprobs)] = gather_logprobs(
                logprobs, token_ids, [pending.num_top] * len(token_ids)
            )
        return tuple(pending.entries) if part.is_last else None
