"""What structured output costs: throughput against free text, and the time of a mask.

    python benchmarks/structured.py [--model NAME] [--repeats 5] [--json FILE] [--markdown] [--quick]

One engine, one torch thread, 16 streams of 64 prompt tokens and 64 tokens out, temperature 1. Free text ignores the end of
text; a structured output has a form that cannot end within its tokens, so both put out equally many. The sides take turns
within a repeat, and the first to go changes. Grammars are compiled before the clock starts.

Rates and times are of CPU seconds of this process, which are those of the clock on a machine that does nothing else.

The mask's time is that of one request in one step: the grammar's next tokens and their effect on the logits, over the tokens
that the throughput runs have put out, on a vocabulary of 49,152. Beside it stands how much of it the grammar library takes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np
import torch
from common import Machine, Outcome, Spread, Table, at_least, at_most, goal_notes, make_parser, publish

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import BuiltEngine, build_engine
from core.engine.sampling_state import build_edits
from core.request import NewRequest
from core.wire.sampling import SamplingParams, StructuredOutput

NUM_STREAMS = 16
NUM_PROMPT_TOKENS = 64
NUM_TOKENS = 64
RATE_GOAL = 0.95  # of free text
MASK_GOAL_US = 50.0

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 1, "maxItems": 5},
        "status": {"enum": ["active", "inactive", "unknown"]},
    },
    "required": ["name", "age", "email", "tags", "status"],
    "additionalProperties": False,
}
FORMS = {
    "JSON schema": StructuredOutput(
        kind="json_schema", value=json.dumps({"type": "array", "items": PERSON, "minItems": 200, "maxItems": 200})
    ),
    "any JSON": StructuredOutput(
        kind="json_schema", value=json.dumps({"type": "array", "items": {"type": "object"}, "minItems": 200})
    ),
    "regex": StructuredOutput(kind="regex", value=r"([A-Z][a-z]{2,9} ){200,300}"),
}


def requests(form: StructuredOutput | None, seed: int, num_tokens: int) -> list[NewRequest]:
    generator = np.random.default_rng(seed)
    return [
        NewRequest(
            request_id=f"r{seed}-{stream}",
            prompt_token_ids=generator.integers(100, 40_000, NUM_PROMPT_TOKENS).tolist(),
            sampling=SamplingParams(max_tokens=num_tokens, seed=seed + stream, structured_output=form),
        )
        for stream in range(NUM_STREAMS)
    ]


def run(built: BuiltEngine, new_requests: Sequence[NewRequest]) -> tuple[float, dict[str, list[int]]]:
    """Return tokens per second, and the tokens by request."""
    engine = built.engine
    tokens: dict[str, list[int]] = {new.request_id: [] for new in new_requests}
    num_live = len(new_requests)
    started = time.process_time()
    for new in new_requests:
        engine.add_request(new)
    while num_live:
        for output in engine.step():
            if output.error is not None:
                raise SystemExit(f"{output.request_id}: {output.error.message}")
            tokens[output.request_id] += output.new_token_ids
            num_live -= output.finish_reason is not None
    seconds = time.process_time() - started
    return sum(map(len, tokens.values())) / seconds, tokens


def mask_times(built: BuiltEngine, form: StructuredOutput, outputs: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds of each mask: to find it, apply it, and go on by the token."""
    assert built.grammars is not None
    grammar = built.grammars.get(form)
    assert grammar is not None
    logits = torch.zeros(built.arch.vocab_size)
    found = []
    for output in outputs:
        edits = build_edits(SamplingParams(structured_output=form), (), (), (), grammar)
        assert edits is not None
        for count, token_id in enumerate(output):
            logits.fill_(0.0)
            started = time.thread_time()
            edits.apply(logits, count)
            edits.append(token_id)
            found.append(time.thread_time() - started)
    return found


def library_times(built: BuiltEngine, form: StructuredOutput, outputs: Sequence[Sequence[int]]) -> list[float]:
    """Return the seconds that the library takes for each mask and token."""
    assert built.grammars is not None
    grammar = built.grammars.get(form)
    assert grammar is not None
    found = []
    for output in outputs:
        matcher = grammar.start()
        for token_id in output:
            started = time.thread_time()
            matcher.allowed_bits()
            matcher.accept((token_id,))
            found.append(time.thread_time() - started)
    return found


def measure(arguments: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    settings = {"model.name": arguments.model, "model.dtype": "float32", "worker.cpu_threads": 1}
    config = load_config(overrides=settings | {"cache.memory_bytes": 512 << 20})
    built = build_engine(config, SystemClock())
    num_tokens = 8 if arguments.quick else NUM_TOKENS
    sides: dict[str, StructuredOutput | None] = {"free text": None, **FORMS}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    outputs: dict[str, list[list[int]]] = {name: [] for name in sides}
    for form in sides.values():
        run(built, requests(form, 10**6, 2))
    for repeat in range(arguments.repeats):
        names = list(sides)
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            rate, tokens = run(built, requests(sides[name], 1000 * repeat, num_tokens))
            rates[name].append(rate)
            outputs[name] += tokens.values()
    rows = [["free text", Spread.of(rates["free text"]).show(0), "", "", "", "", ""]]
    figures: dict[str, object] = {}
    goals: list[dict[str, object]] = []
    for name, form in FORMS.items():
        ratio = Spread.of_ratios(rates[name], rates["free text"])
        times = np.array(mask_times(built, form, outputs[name][:NUM_STREAMS])) * 1e6
        mean, median, late = times.mean(), np.median(times), np.percentile(times, 99)
        library = float(np.mean(library_times(built, form, outputs[name][:NUM_STREAMS]))) * 1e6
        shown = [f"{one:.0f} µs" for one in (mean, library, median, late)]
        rows.append([name, Spread.of(rates[name]).show(0), ratio.show(3), *shown])
        figures[name] = {
            "rates": rates[name],
            "mask_us": {"mean": mean, "median": median, "p99": late, "library_mean": library},
        }
        goals += [
            at_least(f"{name}: rate / free text", ratio.median, RATE_GOAL, "ratio"),
            at_most(f"{name}: mask, mean", mean, MASK_GOAL_US, "us"),
        ]
    figures["free text"] = {"rates": rates["free text"]}
    built.engine.shutdown()
    columns = ["output", "tokens per CPU second", "× free text", "mask, mean", "of it library", "median", "99 %"]
    return Outcome([Table(columns, rows)], goal_notes(goals), figures, goals)


def main() -> None:
    arguments = make_parser(__doc__, 5).parse_args()
    if arguments.quick:
        arguments.repeats = 1
    machine = Machine.now()
    publish(measure(arguments), machine, arguments)


if __name__ == "__main__":
    main()
