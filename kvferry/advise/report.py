"""Turns a study into advice and a page of text that explains it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.advise.cluster import Slo
from kvferry.advise.costs import Costs
from kvferry.advise.study import ConfidenceInterval, Study, StudySide
from kvferry.advise.trace import BLOCK_TOKENS, Trace


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice, and in one sentence why."""

    disaggregate: bool
    reason: str


def decide(study: Study, model_error: float, min_workers: int) -> Advice:
    """Return the advice. Prefill and decode workers have to win by more than the model's error, with 95 % confidence."""
    ratio = study.ratio
    if study.num_workers < min_workers:
        return Advice(False, f"{study.num_workers} workers are fewer than --min-workers {min_workers}.")
    if not study.aggregated.goodput.mean and not study.disaggregated.goodput.mean:
        return Advice(False, "no cluster of this size meets the SLO at any rate: the SLO is too strict for these costs.")
    if not study.disaggregated.goodput.mean:
        return Advice(False, "prefill and decode workers do not meet the SLO at any rate.")
    if math.isinf(ratio.half_width):
        return Advice(False, "the trace is too short to tell the two apart; 80 requests are the fewest.")
    if ratio.low > 1 + model_error:
        return Advice(True, f"they carry {_times(ratio)}, which is beyond the model's error of {model_error:.0%}.")
    if ratio.high < 1:
        return Advice(False, f"prefill and decode workers carry {_times(ratio)}.")
    return Advice(
        False,
        f"prefill and decode workers carry {_times(ratio)}: not surely more than the model's error of {model_error:.0%}.",
    )


def page(trace: Trace, costs: Costs, slo: Slo, share: float, study: Study, advice: Advice) -> str:
    """Return the whole answer: advice, both sides, what bounds them, and what the model leaves out."""
    return "\n".join(_lines(trace, costs, slo, share, study, advice))


def _lines(trace: Trace, costs: Costs, slo: Slo, share: float, study: Study, advice: Advice) -> Iterator[str]:
    split = study.disaggregated.layout
    proposal = f"disaggregate: {split.num_prefill} prefill and {split.num_decode} decode workers"
    yield f"Advice: {proposal if advice.disaggregate else 'stay aggregated'}; {advice.reason}"
    yield ""
    yield from _about_trace(trace)
    itl = f", 99 % of its tokens within {slo.itl_ms:g} ms" if slo.itl_ms < math.inf else ""
    yield (
        f"SLO     {share:.0%} of requests: first token in {slo.ttft_ms:g} ms (or 1.5 times its own prefill), "
        f"{slo.tpot_ms:g} ms a token{itl}"
    )
    yield ""
    head = f"With {study.num_workers} workers"
    yield f"{head:<29}{'goodput req/s':>14}{'good at its rate':>18}{'TTFT mean / p99':>20}{'ITL p50 / p99':>16}"
    for side in (study.aggregated, study.disaggregated):
        yield _row(side)
    yield f"ratio, part by part: {_show(study.ratio, 3)} (95 % confidence, {len(study.aggregated.goodputs)} parts of the trace)"
    yield ""
    for name, side in (("aggregated", study.aggregated), ("disaggregated", study.disaggregated)):
        needed = f"{side.num_needed} ({side.needed_layout.name})" if side.needed_layout else "more than 64, or no number"
        yield f"Workers needed for this trace, {name}: {needed}"
    yield ""
    yield "What bounds them at the trace's rate"
    yield from _bounds(trace, costs, slo, study)
    yield ""
    yield "The model: prompts are placed by the router's cost, with prefix caches and chunked prefill. Not in it: failures,"
    yield "preemption, errors of the router's predictions, and what other programs do to the machines."


def _about_trace(trace: Trace) -> Iterator[str]:
    prompts = sorted(one.num_tokens for one in trace.requests)
    answers = sorted(one.num_output_tokens for one in trace.requests)
    total = len(prompts)
    rate = trace.rate
    tokens = f"{sum(prompts) / total * rate:,.0f} prompt and {sum(answers) / total * rate:,.0f} answer tokens/s"
    yield f"Trace   {total:,} requests in {trace.span_ms / 1e3:,.0f} s: {rate:.2f} req/s, {tokens}"
    yield (
        f"        prompt p50 {prompts[total // 2]:,}, p99 {prompts[total * 99 // 100]:,}; "
        f"answer p50 {answers[total // 2]:,}, p99 {answers[total * 99 // 100]:,} tokens; "
        + (f"reusable prefixes {_reusable_share(trace):.0%}" if trace.knows_prefixes else "prefixes unknown: counted as none")
    )


def _reusable_share(trace: Trace) -> float:
    """Return the share of prompt tokens that an endless cache would hold."""
    seen: set[int] = set()
    num_hit = 0
    for request in trace.requests:
        is_hit = True
        for block in request.blocks:
            is_hit = is_hit and block in seen
            num_hit += BLOCK_TOKENS * is_hit
        seen.update(request.blocks)
    return num_hit / sum(request.num_tokens for request in trace.requests)


def _row(side: StudySide) -> str:
    outcome = side.at_rate
    ttft = f"{outcome.mean_ttft_ms:,.0f} / {outcome.ttft_ms(0.99):,.0f} ms"
    itl = f"{outcome.itl_ms(0.5):.0f} / {outcome.itl_ms(0.99):.0f} ms"
    return f"{side.layout.name:<29}{_show(side.goodput):>14}{outcome.good_share:>18.1%}{ttft:>20}{itl:>16}"


def _bounds(trace: Trace, costs: Costs, slo: Slo, study: Study) -> Iterator[str]:
    """Yield the loads by the usual formulas: prefill time, decode memory by Little's law, decode step, handoff."""
    requests, split = trace.requests, study.disaggregated.layout
    total = len(requests)
    prefill_ms = sum(costs.prefill_time.ms(one.num_tokens, 0) for one in requests) / total
    load = trace.rate * prefill_ms / 1e3 / split.num_prefill
    yield f"  prefill     {load:.2f} of {split.num_prefill}P without cache hits; the tail of TTFT wants less than about 0.7"
    step_ms = study.disaggregated.at_rate.itl_ms(0.5)
    alive = trace.rate * sum(one.num_output_tokens for one in requests) / total * step_ms / 1e3
    held = trace.rate * step_ms / 1e3
    held *= sum(one.num_output_tokens * (one.num_tokens + one.num_output_tokens / 2) for one in requests) / total
    yield (
        f"  decode KV   {held / costs.kv_tokens / split.num_decode:.2f} of {split.num_decode}D "
        f"({held / costs.kv_tokens / study.num_workers:.2f} of all workers); a decode pool holds every running context"
    )
    batch = alive / split.num_decode
    yield f"  decode step {step_ms:.0f} ms at {batch:.0f} requests a worker; the SLO allows {slo.tpot_ms:g} ms"
    mean_tokens = sum(one.num_tokens for one in requests) // total
    yield f"  handoff     {costs.handoff_ms(mean_tokens):.0f} ms after the first token, for a prompt of {mean_tokens:,} tokens"
    chunk = study.aggregated.layout.chunk
    chunk_ms = max(study.aggregated.at_rate.itl_ms(0.5), costs.prefill.base_ms) + costs.chunk_ms(chunk, mean_tokens // 2)
    yield f"  aggregated  {chunk_ms:.0f} ms between two tokens while another prompt is computed in chunks of {chunk}"


def _times(ratio: ConfidenceInterval) -> str:
    return f"{_show(ratio)} times the rate of aggregated ones"


def _show(interval: ConfidenceInterval, digits: int = 2) -> str:
    if math.isinf(interval.half_width):
        return f"{interval.mean:.{digits}f}"
    return f"{interval.mean:.{digits}f} ± {interval.half_width:.{digits}f}"
