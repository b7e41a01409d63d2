"""What 8-bit weights and inputs (``model.quantization = int8``) and bfloat16 win and lose against float32, with one thread.

    python benchmarks/quantized.py [--model smollm2-135m] [--windows 32] [--repeats 7] [--json FILE] [--markdown] [--quick]

Quality: every position of windows of English (prose of ``docs``, without tables and code) is predicted from the tokens before
it in its window. ``perplexity`` of the token that follows; ``divergence``, the mean over positions of KL(float32 || this), in
nats; ``same token``, the share of positions at which the most probable token is that of float32.

Speed: a prompt of 256 tokens, and one step of 1 and of 16 sequences with 128 tokens each, turn by turn; times of float32 over
those of the variant.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Machine, Outcome, Spread, Table, make_parser, publish
from model import Call, Paged
from torch import Tensor

from core.config_types import default_cache_dir
from core.model.arch import parse_arch
from core.model.decoder import Decoder
from core.model.hub import ModelFiles, resolve_model
from core.model.loader import load_decoder
from core.model.tokenizer import Tokenizer

WINDOW = 256  # tokens
CONTEXT = 128  # tokens of each sequence before the step that is timed
DOCS = Path(__file__).resolve().parent.parent / "docs"
FLOAT32 = "float32"
VARIANTS = {
    FLOAT32: (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "float32, int8 weights": (torch.float32, "int8"),
    "bfloat16, int8 weights": (torch.bfloat16, "int8"),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Of a variant, over all positions of all windows."""

    perplexity: float
    divergence: float  # nats
    same_token: float


def load(files: ModelFiles, variant: str) -> Decoder:
    dtype, quantization = VARIANTS[variant]
    return load_decoder(parse_arch(files.config), files.weight_files, dtype=dtype, quantization=quantization)


def windows_of(files: ModelFiles, number: int, length: int) -> Tensor:
    """Return ``[number, length]`` token ids, windows at equal distances in the prose of the documents."""
    lines = []
    for path in sorted(DOCS.glob("*.md")):
        parts = path.read_text().split("```")[::2]  # between blocks of code
        lines += [line for part in parts for line in part.splitlines() if line and line[0] not in "|#<"]
    ids = torch.tensor(Tokenizer(files).encode("\n".join(lines)))
    starts = torch.linspace(0, len(ids) - length, number).long()
    return torch.stack([ids[start : start + length] for start in starts.tolist()])


def log_probabilities(decoder: Decoder, window: Tensor) -> Tensor:
    """Return ``[WINDOW - 1, vocab_size]`` for every token but the first, float32."""
    logits = Paged(decoder, 1, WINDOW).step(window[None], 0, every_token=True)
    return logits[:-1].float().log_softmax(1)


def measure_quality(decoders: Mapping[str, Decoder], windows: Tensor) -> dict[str, Quality]:
    losses: dict[str, list[float]] = {name: [] for name in decoders}
    divergences: dict[str, list[float]] = {name: [] for name in decoders}
    same: dict[str, list[float]] = {name: [] for name in decoders}
    for window in windows:
        exact = log_probabilities(decoders[FLOAT32], window)
        for name, decoder in decoders.items():
            found = exact if name == FLOAT32 else log_probabilities(decoder, window)
            losses[name].append(-float(found.gather(1, window[1:, None]).mean()))
            divergences[name].append(float((exact.exp() * (exact - found)).sum(1).mean()))
            same[name].append(float((exact.argmax(1) == found.argmax(1)).float().mean()))
    return {
        name: Quality(
            float(torch.tensor(losses[name]).mean().exp()), statistics.mean(divergences[name]), statistics.mean(same[name])
        )
        for name in decoders
    }


def calls_of(decoder: Decoder) -> dict[str, Call]:
    """Return what is timed: a prompt, and a step of 1 and of 16 sequences."""
    ids = torch.randint(0, decoder.arch.vocab_size, (16, max(WINDOW, CONTEXT + 1)))
    prompt = Paged(decoder, 1, WINDOW)
    calls: dict[str, Call] = {f"prompt of {WINDOW}": lambda: prompt.step(ids[:1, :WINDOW], 0)}
    for number in (1, 16):
        paged, some = Paged(decoder, number, CONTEXT + 1), ids[:number]
        paged.step(some[:, :CONTEXT], 0)
        name = f"step of {number}"
        calls[name] = lambda paged=paged, some=some: paged.step(some[:, CONTEXT : CONTEXT + 1], CONTEXT)  # type: ignore[misc]
    return calls


def measure_speed(decoders: Mapping[str, Decoder], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return {case: {variant: seconds of each repeat}}."""
    calls = {name: calls_of(decoder) for name, decoder in decoders.items()}
    seconds: dict[str, dict[str, list[float]]] = {}
    for case in calls[FLOAT32]:
        seconds[case] = {name: [] for name in decoders}
        for turn in range(repeats + 1):
            for name in decoders:
                started = time.perf_counter()
                calls[name][case]()
                if turn:
                    seconds[case][name].append(time.perf_counter() - started)
    return seconds


def outcome(
    quality: Mapping[str, Quality], seconds: Mapping[str, Mapping[str, Sequence[float]]], num_positions: int
) -> Outcome:
    faster = {
        name: {case: Spread.of_ratios(times[FLOAT32], times[name]) for case, times in seconds.items()} for name in quality
    }
    rows = [
        [
            name,
            f"{one.perplexity:.3f}",
            f"{one.divergence:.5f}",
            f"{one.same_token:.2%}",
            *(faster[name][case].show(2) for case in seconds),
        ]
        for name, one in quality.items()
    ]
    columns = ("", "perplexity", "divergence", "same token", *(f"{case}, faster" for case in seconds))
    figures: dict[str, object] = {
        "quality": {name: {field: getattr(one, field) for field in one.__slots__} for name, one in quality.items()},
        "seconds": seconds,
    }
    milliseconds = ", ".join(f"{case} {1e3 * statistics.median(times[FLOAT32]):.1f}" for case, times in seconds.items())
    notes = [f"{num_positions:,} positions; float32 takes, ms: {milliseconds}"]
    return Outcome([Table(columns, rows)], notes, figures)


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__ or "", repeats=7)
    parser.add_argument("--windows", type=int, default=32, help=f"of {WINDOW} tokens (default: %(default)s)")
    arguments: argparse.Namespace = parser.parse_args()
    if arguments.quick:
        arguments.windows, arguments.repeats = 1, 1
    machine = Machine.now()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = resolve_model(arguments.model, Path(default_cache_dir()))
    decoders = {name: load(files, name) for name in VARIANTS}
    windows = windows_of(files, arguments.windows, WINDOW)
    seconds = measure_speed(decoders, arguments.repeats)
    quality = measure_quality(decoders, windows)
    publish(outcome(quality, seconds, windows.shape[0] * (WINDOW - 1)), machine, arguments)


if __name__ == "__main__":
    main()
