"""From logits to tokens and log-probabilities.

Owns the choice of a token and nothing that outlives a step; per-request state lies in ``core.engine.sampling_state``. Called by
``core.engine.runner`` with the logits of the rows that sample. Every row is computed by itself from its own logits,
parameters and random number: the result does not depend on what else is in the batch.

A random token is drawn by inverting the cumulative distribution at *one* uniform number. That is exact (probabilities in
float32, their running sum in float64), needs one hash per token where Gumbel noise needs one number per vocabulary entry,
and is continued by any other worker from (seed, choice, position) alone. Filters keep whole ties: a token stays if its
logit (top-k, min-p) or probability (top-p) is not below that of the last one kept, so no sort order takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.engine.sampling_state import SamplingRows
from core.wire.messages import TokenLogprobs

# Most distributions have their top-p mass in this many tokens; a partial sort of them costs 1/30 of a full sort.
_TOP_P_CANDIDATES = 256


@dataclass(slots=True)
class SampledTokens:
    """One token per row of logits; ``logprobs`` is empty or holds one entry per row, None where not asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> SampledTokens:
    """Choose the next token of each row; ``rows`` is read, not advanced.

    ``logits``: ``[num_rows, vocab_size]``, overwritten. ``index``: the row of ``rows`` behind each row of logits.
    Log-probabilities are those of the model itself, before temperature, penalties and filters.
    """
    logits = logits.float()
    wants_logprobs = np.flatnonzero(rows.num_logprobs[index] >= 0)
    raw = logits[torch.from_numpy(wants_logprobs).to(logits.device)].log_softmax(-1) if wants_logprobs.size else None
    for slot in np.flatnonzero(rows.has_edits[index]).tolist():
        edits = rows.edits[index[slot]]
        if edits is not None:
            edits.apply(logits[slot], int(rows.num_output_tokens[index[slot]]))
    token_ids = _choose(logits, rows, index)
    if raw is None:
        return SampledTokens(token_ids, [])
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    chosen = [token_ids[slot] for slot in wants_logprobs.tolist()]
    found = gather_logprobs(raw, chosen, rows.num_logprobs[index[wants_logprobs]].tolist())
    for slot, entry in zip(wants_logprobs.tolist(), found, strict=True):
        logprobs[slot] = entry
    return SampledTokens(token_ids, logprobs)


def gather_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row the given token with its rank (1 = most likely) and the ``num_top[row]`` most likely ones.

    ``logprobs``: ``[num_rows, vocab_size]``.
    """
    chosen = torch.tensor(token_ids, device=logprobs.device)[:, None]
    own = logprobs.gather(1, chosen)
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    own_values = own[:, 0].tolist()
    width = min(max(num_top, default=0), logprobs.shape[1])
    top = logprobs.topk(width) if width else None
    top_values = top.values.tolist() if top else [[]] * len(token_ids)
    top_ids = top.indices.tolist() if top else [[]] * len(token_ids)
    return [
        TokenLogprobs((token_id, *ids[:count]), (value, *values[:count]), rank)
        for token_id, value, rank, ids, values, count in zip(
            token_ids, own_values, ranks, top_ids, top_values, num_top, strict=True
        )
    ]


def _choose(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> list[int]:
    """Return the argmax of greedy rows and a draw for the others."""
    is_random = rows.temperature[index] > 0.0
    if not is_random.any():
        return _argmax(logits)
    if is_random.all():
        return _draw(logits, rows, index)
    token_ids = np.empty(len(index), dtype=np.int64)
    for slots, choose in ((np.flatnonzero(~is_random), None), (np.flatnonzero(is_random), _draw)):
        part = logits[torch.from_numpy(slots).to(logits.device)]
        token_ids[slots] = choose(part, rows, index[slots]) if choose else _argmax(part)
    result: list[int] = token_ids.tolist()
    return result


def _argmax(logits: Tensor) -> list[int]:
    """Return the position of each row's largest entry, the first of equal ones."""
    # numpy's argmax is vectorised, torch's on CPU is not: 4 us against 42 us for a row of 49,152.
    positions = logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1)
    result: list[int] = positions.tolist()
    return result


def _draw(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> list[int]:
    """Return one draw per row. ``logits`` ``[num_rows, vocab_size]`` is overwritten."""
    device = logits.device
    temperature = torch.from_numpy(rows.temperature[index]).to(device)
    # Subtract the maximum first: a tiny temperature must not overflow.
    logits = (logits - logits.amax(-1, keepdim=True)).div_(temperature[:, None])
    _filter_by_logit(logits, rows.top_k[index], rows.min_p[index])
    probabilities = logits.softmax(-1)
    _filter_by_mass(probabilities, rows.top_p[index])
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    # u < 1, so the target is below the last sum, and the first sum above it belongs to a token of positive probability.
    target = cumulative[:, -1:] * torch.from_numpy(rows.uniforms(index)).to(device)[:, None]
    chosen = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Where the edits have excluded every token all sums are NaN; the draw must still be a token.
    result: list[int] = chosen.clamp_(max=logits.shape[1] - 1).tolist()
    return result


def _filter_by_logit(logits: Tensor, top_k: npt.NDArray[np.int64], min_p: npt.NDArray[np.float32]) -> None:
    """Set to -inf, in place, what top-k and min-p exclude. Each row's largest logit is 0."""
    vocab_size = logits.shape[1]
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if not limited.size and not min_p.any():
        return
    with np.errstate(divide="ignore"):
        floor = torch.from_numpy(np.log(min_p)).to(logits.device)  # -inf where off
    if limited.size:
        counts = torch.from_numpy(top_k[limited]).to(logits.device)
        part = torch.from_numpy(limited).to(logits.device)
        best = logits[part].topk(int(top_k[limited].max())).values
        floor[part] = torch.maximum(floor[part], best.gather(1, counts[:, None] - 1)[:, 0])
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def _filter_by_mass(probabilities: Tensor, top_p: npt.NDArray[np.float64]) -> None:
    """Set to 0, in place, what lies below the smallest set of most likely tokens whose mass reaches top-p."""
    limited = np.flatnonzero(top_p < 1.0)
    if not limited.size:
        return
    part = torch.from_numpy(limited).to(probabilities.device)
    mass = torch.from_numpy(top_p[limited]).to(probabilities.device)[:, None]
    rows = probabilities[part]
    candidates = min(_TOP_P_CANDIDATES, rows.shape[1])
    cutoff, reached = _mass_cutoff(rows.topk(candidates).values, mass)
    if not bool(reached.all()):
        spread = torch.nonzero(~reached)[:, 0]
        cutoff[spread] = _mass_cutoff(rows[spread].sort(-1, descending=True).values, mass[spread])[0]
    probabilities[part] = rows.masked_fill_(rows < cutoff[:, None], 0.0)


def _mass_cutoff(descending: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return per row the smallest probability that is kept, and whether the given candidates hold the mass."""
    sums = descending.cumsum(-1, dtype=torch.float64)
    position = (sums < mass).sum(-1)
    reached = position < descending.shape[1]
    last = position.clamp_(max=descending.shape[1] - 1)
    return descending.gather(1, last[:, None])[:, 0], reached
