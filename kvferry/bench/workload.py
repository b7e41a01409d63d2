"""The requests of a benchmark, and their arrival times.

A workload is a list of ``BenchRequest``, made once from a seed before the clock starts; it knows nothing of HTTP. Prompts are
token ids (``/v1/completions`` of kvferry, vLLM and others accepts them) or text. Trace files are Mooncake's format: one JSON
object a line with ``timestamp`` (ms), ``input_length``, ``output_length`` (tokens) and ``hash_ids`` (one per 512 tokens; equal
ids stand for equal prefixes, and become equal tokens here).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from core.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
_SEED_BITS = 32
FIRST_TOKEN_ID = 1000  # lower ids are special and byte tokens in the usual vocabularies
_WORDS = ("river", "stone", "light", "cargo", "north", "wheel", "paper", "cloud", "green", "seven", "music", "house")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. ``arrival_s`` counts from the start of the run; 0 for all in a closed loop."""

    arrival_s: float
    prompt: tuple[int, ...] | str
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShape:
    """Lengths of a synthetic workload, in tokens; each is drawn uniformly from [low, high].

    The first ``num_shared_prefix`` tokens of every prompt are the same.
    """

    num_requests: int
    prompt_low: int
    prompt_high: int
    output_low: int
    output_high: int
    num_shared_prefix: int = 0
    rate_per_s: float | None = None  # Poisson arrivals; None = closed loop
    text: bool = False
    vocab_size: int = 10_000


def parse_range(text: str, name: str) -> tuple[int, int]:
    """Parse ``"128"`` or ``"64:256"`` into (low, high).

    Raises:
        ConfigError: not one or two positive numbers in order.
    """
    low_text, _, high_text = text.partition(":")
    try:
        low, high = int(low_text), int(high_text or low_text)
    except ValueError:
        low, high = 0, 0
    if not 1 <= low <= high:
        raise ConfigError(f"{name} = {text!r}: expected N or LOW:HIGH with 1 <= LOW <= HIGH", param=name)
    return low, high


def new_seed() -> int:
    """Return a fresh seed, so that no server has the prompts in its prefix cache."""
    return random.SystemRandom().getrandbits(_SEED_BITS)


def synthetic_workload(shape: SyntheticShape, seed: int) -> list[BenchRequest]:
    """Draw a workload of random tokens (or words) from a seed."""
    rng = random.Random(seed)
    prefix = _tokens(rng, shape.num_shared_prefix, shape.vocab_size)
    arrival = 0.0
    requests = []
    for _ in range(shape.num_requests):
        if shape.rate_per_s is not None:
            arrival += rng.expovariate(shape.rate_per_s)
        length = rng.randint(shape.prompt_low, shape.prompt_high)
        tokens = prefix[:length] + _tokens(rng, length - len(prefix), shape.vocab_size)
        prompt = _words(tokens) if shape.text else tuple(tokens)
        requests.append(BenchRequest(arrival, prompt, rng.randint(shape.output_low, shape.output_high)))
    return requests


class _TraceLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


@dataclass(frozen=True, slots=True)
class TraceShape:
    """The cut of a trace, and its scaling to the server.

    ``num_requests`` takes that many from its beginning; None = all.
    ``length_scale`` multiplies all lengths (the 512-token prefix blocks shrink with them, so prefixes stay shared);
    ``time_scale`` multiplies arrival times. Prompts longer than ``max_prompt_tokens`` after scaling are cut to it.
    """

    num_requests: int | None = None
    length_scale: float = 1.0
    time_scale: float = 1.0
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    text: bool = False
    vocab_size: int = 10_000
    seed: int = 0  # of the tokens; lengths and sharing are the trace's


def trace_workload(path: Path, shape: TraceShape) -> list[BenchRequest]:
    """Read a Mooncake trace, or its beginning (see ``TraceShape``).

    Raises:
        ConfigError: the file cannot be read, or a line is not of the format; names the line.
    """
    block = max(1, round(TRACE_BLOCK_TOKENS * shape.length_scale))
    requests: list[BenchRequest] = []
    for line in _read_trace(path, shape.num_requests):
        length = max(1, round(line.input_length * shape.length_scale))
        if shape.max_prompt_tokens is not None:
            length = min(length, shape.max_prompt_tokens)
        output = max(1, round(line.output_length * shape.length_scale))
        if shape.max_output_tokens is not None:
            output = min(output, shape.max_output_tokens)
        tokens = _trace_tokens(line, length, block, shape)
        prompt = _words(tokens) if shape.text else tuple(tokens)
        requests.append(BenchRequest(line.timestamp / 1000 * shape.time_scale, prompt, output))
    return requests


def _read_trace(path: Path, count: int | None) -> Iterable[_TraceLine]:
    decoder = msgspec.json.Decoder(_TraceLine)
    try:
        lines = path.read_bytes().splitlines()[:count]
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error}", param="trace") from None
    for number, line in enumerate(lines, start=1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: {error}", param="trace") from None


def _trace_tokens(line: _TraceLine, length: int, block: int, shape: TraceShape) -> list[int]:
    """Return tokens of which each block is a function of seed and hash id alone; the tail past the ids belongs to this line."""
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        if len(tokens) >= length:
            break
        tokens += _tokens(random.Random(f"{shape.seed}/{hash_id}"), block, shape.vocab_size)
    if len(tokens) < length:
        tokens += _tokens(
            random.Random(f"{shape.seed}/{line.timestamp}/{line.input_length}"), length - len(tokens), shape.vocab_size
        )
    return tokens[:length]


def _tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(max(0, count))]


def _words(tokens: list[int]) -> str:
    """Return one short word per token id: about one token each in the usual vocabularies."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
