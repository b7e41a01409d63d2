"""From logits to tokens and log-probabilities.

Owns the choice of a token and nothing that outlives a step; per-request state lies in ``core.engine.sampling_state``. Every
row is computed by itself from its own logits, parameters and random number: the result does not depend on what else is in the
batch.

A random token is drawn by inverting the cumulative distribution at *one* uniform number. That is exact (probabilities in
float32, their running sum in float64), needs one hash per token where Gumbel noise needs one number per vocabulary entry,
and is continued by any other worker from (seed, choice, position) alone. Filters keep whole ties: a token stays if its
logit (top-k, min-p) or probability (top-p) is not below that of the last one kept, so no sort order takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from core.attention.torch_kernels import download, upload
from core.engine.sampling_state import SamplingRows
from core.errors import InvalidRequest, KVFerryError
from core.wire.messages import TokenLogprobs

# Most distributions have their top-p mass in this many tokens; finding these costs 1/30 of a full sort.
_TOP_P_CANDIDATES = 256
# Tokens per segment of the running sum.
_SEGMENT = 256


@dataclass(slots=True)
class SampledTokens:
    """One token per row of logits; ``logprobs`` is empty or holds one entry per row, None where not asked for.

    ``failures`` names the rows whose logits are not finite: their weights or their KV may be damaged. ``refusals`` names the
    rows whose request allows no token: their KV is good. What stands for either in the two lists means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failures: dict[int, KVFerryError] = field(default_factory=dict)
    refusals: dict[int, KVFerryError] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Log-probabilities on their way to the host: of the rows ``slots``, with ``counts[i]`` most likely tokens each."""

    slots: list[int]
    counts: list[int]
    own: Tensor
    ranks: Tensor
    top_values: Tensor
    top_ids: Tensor

    def entries(self, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        """Return one entry for each of ``token_ids``, the chosen ones."""
        columns = (column.tolist() for column in (self.own, self.ranks, self.top_ids, self.top_values))
        found = zip(token_ids, *columns, strict=True)
        return [
            TokenLogprobs((token_id, *ids[:count]), (value, *values[:count]), rank)
            for (token_id, value, rank, ids, values), count in zip(found, self.counts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LaunchedSamples:
    """Tokens that the device is choosing. ``on_device`` int64 ``[num_rows]`` may be used at once by later launches.

    The other tensors are being copied to the host. highest: ``[num_rows]``, the largest logits; edited: the rows with edits,
    their largest logits after the edits, and the error of their grammar.
    """

    on_device: Tensor
    token_ids: Tensor
    highest: Tensor
    edited: list[tuple[int, Tensor, KVFerryError | None]]
    logprobs: LaunchedLogprobs | None

    def finish(self) -> SampledTokens:
        """Return the tokens; the caller has waited for the device."""
        failures = _rows_without_numbers(self.highest)
        refusals: dict[int, KVFerryError] = {}
        for slot, highest, grammar_error in self.edited:
            if slot not in failures and not bool(highest.isfinite()):
                refusals[slot] = grammar_error or InvalidRequest(
                    "allowed_token_ids, logit_bias and the structured output leave no token to choose: allow the tokens that "
                    "its form needs, or leave allowed_token_ids out",
                    param="allowed_token_ids",
                )
        token_ids: list[int] = self.token_ids.tolist()
        if self.logprobs is None:
            return SampledTokens(token_ids, [], failures, refusals)
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        slots = self.logprobs.slots
        for slot, entry in zip(slots, self.logprobs.entries([token_ids[slot] for slot in slots]), strict=True):
            logprobs[slot] = entry
        return SampledTokens(token_ids, logprobs, failures, refusals)


def launch_sampling(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> LaunchedSamples:
    """Begin to choose the next token of each row; ``rows`` is read, not advanced. Does not wait for a CUDA device.

    ``logits``: ``[num_rows, vocab_size]``, overwritten, of any float dtype. ``index``: the row of ``rows`` of each row.
    Log-probabilities are those of the model itself, before temperature, penalties and filters.
    """
    wants_logprobs = np.flatnonzero(rows.num_logprobs[index] >= 0)
    is_greedy = not wants_logprobs.size and not rows.has_edits[index].any() and not (rows.temperature[index] > 0.0).any()
    if is_greedy:
        return _launch_greedy(logits)
    logits = logits.float()
    highest = download(_highest(logits))
    raw = logits[upload(wants_logprobs, logits.device)].log_softmax(-1) if wants_logprobs.size else None
    edited = []
    for slot in np.flatnonzero(rows.has_edits[index]).tolist():
        edits = rows.edits[index[slot]]
        if edits is not None:
            edits.apply(logits[slot], int(rows.num_output_tokens[index[slot]]))
            edited.append((slot, download(logits[slot].amax()), edits.failure))
    token_ids = _choose(logits, rows, index)
    logprobs = None
    if raw is not None:
        chosen = token_ids[upload(wants_logprobs, logits.device)]
        logprobs = _launch_logprobs(raw, chosen, rows.num_logprobs[index[wants_logprobs]].tolist(), wants_logprobs.tolist())
    return LaunchedSamples(token_ids, download(token_ids), highest, edited, logprobs)


def _launch_greedy(logits: Tensor) -> LaunchedSamples:
    """Begin to choose the first of the largest logits of each row, in one pass over them; a NaN counts as the largest."""
    if logits.device.type == "cpu":
        token_ids = _argmax(logits.float())
        highest = logits.gather(-1, token_ids[:, None])[:, 0]
    else:
        highest, token_ids = logits.max(-1)
    return LaunchedSamples(token_ids, download(token_ids), download(highest.float()), [], None)


def _highest(logits: Tensor) -> Tensor:
    """Return the largest entry of each row; NaN if any is."""
    return torch.from_numpy(np.max(logits.numpy(), axis=-1)) if logits.device.type == "cpu" else logits.amax(-1)


def _rows_without_numbers(highest: Tensor) -> dict[int, KVFerryError]:
    """Return the rows that no token can be chosen from: the largest entry is NaN if any is, or infinite."""
    broken = np.flatnonzero(~np.isfinite(highest.numpy())).tolist()
    return {slot: KVFerryError("the model's logits are not finite: its weights or its KV cache are damaged") for slot in broken}


def gather_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row the given token with its rank (1 = most likely) and the ``num_top[row]`` most likely ones.

    ``logprobs``: ``[num_rows, vocab_size]``. Waits for the device.
    """
    launched = _launch_logprobs(logprobs, torch.tensor(token_ids, device=logprobs.device), list(num_top), [])
    if logprobs.is_cuda:
        torch.cuda.current_stream(logprobs.device).synchronize()
    return launched.entries(token_ids)


def _launch_logprobs(logprobs: Tensor, chosen: Tensor, num_top: list[int], slots: list[int]) -> LaunchedLogprobs:
    """Begin to look up the tokens ``chosen`` ``[num_rows]`` and the most likely ones."""
    own = logprobs.gather(1, chosen[:, None])
    width = min(max(num_top, default=0), logprobs.shape[1])
    top = logprobs.topk(width)
    return LaunchedLogprobs(
        slots=slots,
        counts=num_top,
        own=download(own[:, 0]),
        ranks=download((logprobs > own).sum(-1) + 1),
        top_values=download(top.values),
        top_ids=download(top.indices),
    )


def _choose(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> Tensor:
    """Return the argmax of greedy rows and a draw for the others, int64 ``[num_rows]`` on the device."""
    is_random = rows.temperature[index] > 0.0
    if not is_random.any():
        return _argmax(logits)
    if is_random.all():
        return _draw(logits, rows, index)
    greedy, random = (upload(np.flatnonzero(mask), logits.device) for mask in (~is_random, is_random))
    token_ids = torch.empty(len(index), dtype=torch.int64, device=logits.device)
    token_ids[greedy] = _argmax(logits[greedy])
    token_ids[random] = _draw(logits[random], rows, index[is_random])
    return token_ids


def _draw(logits: Tensor, rows: SamplingRows, index: npt.NDArray[np.int64]) -> Tensor:
    """Return one draw per row. ``logits`` ``[num_rows, vocab_size]`` is overwritten."""
    device = logits.device
    logits.div_(upload(rows.temperature[index], device)[:, None])
    _filter_by_logit(logits, rows.top_k[index], rows.min_p[index])
    probabilities = logits.softmax(-1)
    _filter_by_mass(probabilities, rows.top_p[index])
    return _invert(probabilities, upload(rows.uniforms(index), device))


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return per row the first token at which the running sum exceeds ``uniforms[row]`` times the total.

    In two levels, which reads each probability once and writes next to nothing: the sums of segments name the segment,
    the running sum within it the token.

        cumulative   s0    s0+s1       s0+s1+s2          target = u * total
        segments     |-----|----------|-----x----|       x - (s0+s1) is what is left to find in segment 2
    """
    num_rows, vocab_size = probabilities.shape
    padded = F.pad(probabilities, (0, -vocab_size % _SEGMENT)) if vocab_size % _SEGMENT else probabilities
    segments = padded.view(num_rows, -1, _SEGMENT)
    cumulative = segments.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniforms[:, None] * cumulative[:, -1:]
    # Where the edits have excluded every token all sums are NaN and each search runs off its end; hence the clamps.
    segment = torch.searchsorted(cumulative, target, right=True).clamp_(max=segments.shape[1] - 1)
    before = F.pad(cumulative, (1, 0)).gather(1, segment)
    inner = segments[torch.arange(num_rows, device=segments.device), segment[:, 0]].cumsum(-1, dtype=torch.float64)
    # Strictly below the segment's sum despite rounding: the token found then has a positive probability.
    rest = torch.minimum(target - before, torch.nextafter(inner[:, -1:], torch.zeros_like(target)))
    place = torch.searchsorted(inner, rest, right=True).clamp_(max=_SEGMENT - 1)
    return (segment * _SEGMENT + place)[:, 0].clamp_(max=vocab_size - 1)


def _filter_by_logit(logits: Tensor, top_k: npt.NDArray[np.int64], min_p: npt.NDArray[np.float32]) -> None:
    """Set to -inf, in place, what top-k and min-p exclude."""
    limited = np.flatnonzero((top_k > 0) & (top_k < logits.shape[1]))
    if not limited.size and not min_p.any():
        return
    with np.errstate(divide="ignore"):  # -inf where min-p is off
        floor = logits.amax(-1) + upload(np.log(min_p), logits.device)
    if limited.size:
        counts = upload(top_k[limited], logits.device)
        part = upload(limited, logits.device)
        best = logits[part].topk(int(top_k[limited].max())).values
        floor[part] = torch.maximum(floor[part], best.gather(1, counts[:, None] - 1)[:, 0])
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def _filter_by_mass(probabilities: Tensor, top_p: npt.NDArray[np.float64]) -> None:
    """Set to 0, in place, what lies below the smallest set of most likely tokens whose mass reaches top-p."""
    limited = np.flatnonzero(top_p < 1.0)
    if not limited.size:
        return
    part, mass = upload(limited, probabilities.device), upload(top_p[limited], probabilities.device)
    rows = probabilities[part]
    cutoff = _cutoffs(rows, mass) if probabilities.device.type == "cpu" else _cutoffs_by_sort(rows, mass)
    probabilities[part] = rows.masked_fill_(rows < cutoff[:, None], 0.0)


def _cutoffs_by_sort(rows: Tensor, mass: Tensor) -> Tensor:
    """Return what ``_cutoffs`` does; on CUDA a sort takes less time than to wait for whether it can be spared."""
    return _mass_cutoff(rows.sort(-1, descending=True).values, mass[:, None])[0]


def _cutoffs(rows: Tensor, mass: Tensor) -> Tensor:
    """Return the smallest probability of each row that is kept: ``mass`` ``[num_rows]`` lies in it and the larger ones."""
    cutoff, is_found = _mass_cutoff(rows.topk(min(_TOP_P_CANDIDATES, rows.shape[1])).values, mass[:, None])
    for slot in torch.nonzero(~is_found)[:, 0].tolist():
        # Tokens below this bound have a mass of less than 1 - top-p together, so none of them is kept.
        bound = 0.5 * (1.0 - float(mass[slot])) / rows.shape[1]
        kept = _sort_descending(rows[slot][rows[slot] >= bound])
        cutoff[slot] = _mass_cutoff(kept[None], mass[slot, None, None])[0]
    return cutoff


def _mass_cutoff(descending: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
    """Return per row the smallest probability that is kept, and whether the given candidates hold the mass."""
    position = (descending.cumsum(-1, dtype=torch.float64) < mass).sum(-1)
    is_found = position < descending.shape[1]
    last = position.clamp_(max=descending.shape[1] - 1)
    return descending.gather(1, last[:, None])[:, 0], is_found


# On the CPU numpy's kernels for these two are vectorised and torch's are not.


def _argmax(logits: Tensor) -> Tensor:
    """Return the position of each row's largest entry, the first of equal ones."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _sort_descending(values: Tensor) -> Tensor:
    """Return a sorted copy of ``values`` ``[n]``."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy())).flip(0)
    return values.sort(descending=True).values
