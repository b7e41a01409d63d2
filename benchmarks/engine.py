"""The engine against transformers on the same weights, on the CPU, interleaved in one process.

    python benchmarks/engine.py [--repeats 5] [--threads 1] [--step-tokens 256] [--json result.json]

Both sides compute greedily in float32 with the same number of threads; no stop token ends a text early. Baseline: transformers'
``generate`` with its default (SDPA) attention and dynamic cache. Every repeat uses new prompts, so no prefix is cached, and the
side that goes first alternates. Figures are medians over the repeats; a speedup is the median of the ratios within a repeat.
Three cases:

* prefill     one prompt of 1,024 tokens to its first token; the engine computes it in steps of ``--step-tokens``
* decode      one stream: prompt 128, then 64 tokens; time per token after the first
* 16 streams  prompts of 256 tokens, 64 tokens out, all 16 there at the start; output tokens per second over everything.
              Baseline: one batched ``generate`` of the same 16 (no padding, as they are equally long). Beside it stands what
              the 16 would take one after the other: 4 times the time of the first 4, measured in the first repeat only

The floors are measured in the same run: the rate of this model's largest matrix product by the fastest of our linear layers,
and the rate at which memory can be read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.clock import SystemClock
from core.config import load_config
from core.config_workers import SchedulerSection
from core.engine.build import BuiltEngine, build_engine
from core.model.arch import ModelArch
from core.model.linear import DenseLinear, make_linear
from core.request import NewRequest
from core.wire.sampling import SamplingParams

PREFILL_TOKENS = 1024
DECODE_PROMPT, DECODE_TOKENS = 128, 64
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 16, 256, 64
SEQUENTIAL_SAMPLE = 4


@dataclass
class Case:
    """Seconds of one case per repeat: the engine's, the baseline's, and what else was measured in the same run."""

    name: str
    unit: str
    amount: float  # tokens that the seconds were spent on
    ours: list[float] = field(default_factory=list)
    baseline: list[float] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    floor_s: float = 0.0
    floor_name: str = ""

    def summary(self) -> dict[str, object]:
        ratios = [theirs / ours for ours, theirs in zip(self.ours, self.baseline, strict=True)]
        ours_s = statistics.median(self.ours)
        return {
            "case": self.name,
            "ours_ms": ours_s * 1e3,
            "transformers_ms": statistics.median(self.baseline) * 1e3,
            **{f"{name}_ms": statistics.median(times) * 1e3 for name, times in self.extra.items()},
            "unit": self.unit,
            "ours_rate": self.amount / ours_s,
            "transformers_rate": self.amount / statistics.median(self.baseline),
            "speedup": statistics.median(ratios),
            "speedup_min": min(ratios),
            "speedup_max": max(ratios),
            "floor_ms": self.floor_s * 1e3,
            "floor_name": self.floor_name,
            "times_floor": ours_s / self.floor_s if self.floor_s else None,
        }


class StepTimes(LogitsProcessor):
    """Notes when ``generate`` has the logits of each step, and changes nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return scores


class Ours:
    """The engine, driven as the worker does: add, then step until done."""

    def __init__(self, built: BuiltEngine) -> None:
        self.engine = built.engine
        self.count = 0

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], list[list[int]]]:
        """Return the times at which each step ended, the first entry being the start, and the outputs."""
        names = [f"r{self.count + number}" for number in range(len(prompts))]
        self.count += len(prompts)
        tokens: dict[str, list[int]] = {name: [] for name in names}
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        times = [time.perf_counter()]
        for name, prompt in zip(names, prompts, strict=True):
            self.engine.add_request(NewRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
        while self.engine.has_work():
            outputs = self.engine.step()
            times.append(time.perf_counter())
            for output in outputs:
                tokens[output.request_id] += output.new_token_ids
        return times, [tokens[name] for name in names]


class Theirs:
    """Transformers on the same weights."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        # Sampling settings in the model's files would only cause warnings; end-of-sequence must not end a text.
        for name in ("eos_token_id", "temperature", "top_p", "top_k"):
            setattr(self.model.generation_config, name, None)
        self.model.generation_config.pad_token_id = 0

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[list[float], list[list[int]]]:
        """Return start and the time of each step's logits, then the end; and the outputs."""
        steps = StepTimes()
        start = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor(prompts)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                logits_processor=[steps],
            )
        end = time.perf_counter()
        return [start, *steps.times, end], out[:, ids.shape[1] :].tolist()


def total(times: list[float]) -> float:
    return times[-1] - times[0]


def behind_first(times: list[float], num_tokens: int) -> float:
    """Seconds per token after the first one; the last entries of ``times`` belong to the tokens."""
    return (times[-1] - times[-num_tokens]) / (num_tokens - 1)


class Suite:
    """All cases over one pair of models."""

    def __init__(self, model: str, step_tokens: int, seed: int) -> None:
        settings = {
            "model.name": model,
            "model.device": "cpu",
            "model.dtype": "float32",
            "cache.memory_bytes": 400 << 20,
            "scheduler.max_num_seqs": STREAMS,
            "scheduler.max_num_batched_tokens": step_tokens,
        }
        built = build_engine(load_config(overrides=settings), SystemClock())
        self.ours = Ours(built)
        self.theirs = Theirs(built.files.path)
        self.arch = built.arch
        self.random = np.random.default_rng(seed)
        self.prefill = Case(f"prefill {PREFILL_TOKENS}", "tokens/s", PREFILL_TOKENS)
        self.decode = Case("decode, 1 stream", "tokens/s", 1)
        self.streams = Case(f"{STREAMS} streams", "output tokens/s", STREAMS * STREAM_TOKENS, extra={"sequential": []})
        self.num_equal = self.num_streams = 0

    def close(self) -> None:
        self.ours.engine.shutdown()

    @property
    def cases(self) -> list[Case]:
        return [self.prefill, self.decode, self.streams]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return self.random.integers(20, self.arch.vocab_size, (count, length)).tolist()

    def repeat(self, ours_first: bool) -> None:
        prompts = self.prompts(1, PREFILL_TOKENS)

        def ours() -> None:
            self.prefill.ours.append(total(self.ours.run(prompts, 1)[0]))

        def theirs() -> None:
            self.prefill.baseline.append(total(self.theirs.run(prompts, 1)[0]))

        in_order([ours, theirs], ours_first)
        self._decode(ours_first)
        self._streams(ours_first)

    def _decode(self, ours_first: bool) -> None:
        prompts = self.prompts(1, DECODE_PROMPT)

        def ours() -> None:
            self.decode.ours.append(behind_first(self.ours.run(prompts, DECODE_TOKENS)[0][:-1], DECODE_TOKENS))

        def theirs() -> None:
            self.decode.baseline.append(behind_first(self.theirs.run(prompts, DECODE_TOKENS)[0][:-1], DECODE_TOKENS))

        in_order([ours, theirs], ours_first)

    def _streams(self, ours_first: bool) -> None:
        prompts = self.prompts(STREAMS, STREAM_PROMPT)
        outputs: dict[str, list[list[int]]] = {}

        def ours() -> None:
            times, outputs["ours"] = self.ours.run(prompts, STREAM_TOKENS)
            self.streams.ours.append(total(times))

        def theirs() -> None:
            times, outputs["theirs"] = self.theirs.run(prompts, STREAM_TOKENS)
            self.streams.baseline.append(total(times))

        in_order([ours, theirs], ours_first)
        if not self.streams.extra["sequential"]:
            sample = [total(self.theirs.run([one], STREAM_TOKENS)[0]) for one in prompts[:SEQUENTIAL_SAMPLE]]
            self.streams.extra["sequential"].append(sum(sample) * STREAMS / SEQUENTIAL_SAMPLE)
        self.num_streams += STREAMS
        self.num_equal += sum(a == b for a, b in zip(outputs["ours"], outputs["theirs"], strict=True))

    def add_floors(self) -> dict[str, float]:
        flops_per_s, bytes_per_s = gemm_rate(self.arch), read_rate()
        weights = num_linear_weights(self.arch)
        head = self.arch.vocab_size * self.arch.hidden_size
        self.prefill.floor_s = prefill_flops(self.arch, PREFILL_TOKENS) / flops_per_s
        self.prefill.floor_name = "matrix products at the measured rate"
        self.decode.floor_s = 4 * (weights + head) / bytes_per_s
        self.decode.floor_name = "reading the weights once per token"
        prompt_s = STREAMS * prefill_flops(self.arch, STREAM_PROMPT) / flops_per_s
        kv_bytes = 4 * 2 * self.arch.num_layers * self.arch.num_kv_heads * self.arch.head_dim
        mean_context = STREAM_PROMPT + STREAM_TOKENS / 2
        step_s = (4 * (weights + head) + STREAMS * mean_context * kv_bytes) / bytes_per_s
        self.streams.floor_s = prompt_s + (STREAM_TOKENS - 1) * step_s
        self.streams.floor_name = "matrix rate, then weights and KV once a step"
        return {"gemm_gflops_per_s": flops_per_s / 1e9, "read_gb_per_s": bytes_per_s / 1e9}


def in_order(sides: list[Callable[[], None]], forward: bool) -> None:
    for side in sides if forward else reversed(sides):
        side()


def num_linear_weights(arch: ModelArch) -> int:
    """Elements of all projections of all layers, the head left out."""
    attention = arch.hidden_size * arch.head_dim * (2 * arch.num_heads + 2 * arch.num_kv_heads)
    return arch.num_layers * (attention + 3 * arch.hidden_size * arch.intermediate_size)


def prefill_flops(arch: ModelArch, num_tokens: int) -> float:
    """Multiplications and additions of a prompt: projections, causal attention (the needed half), one row of logits."""
    attention = 2 * num_tokens * (num_tokens + 1) * arch.num_heads * arch.head_dim * arch.num_layers
    head = 2 * arch.vocab_size * arch.hidden_size
    return 2.0 * num_linear_weights(arch) * num_tokens + attention + head


def best_of(count: int, function: Callable[[], object]) -> float:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def gemm_rate(arch: ModelArch) -> float:
    """Operations per second of the gate and up projection over a whole prompt, dense or packed: the best of 20 each."""
    weight = torch.randn(2 * arch.intermediate_size, arch.hidden_size)
    rows = torch.randn(PREFILL_TOKENS, arch.hidden_size)
    layers = (DenseLinear(weight, None), make_linear(weight))
    return 2.0 * weight.numel() * len(rows) / min(best_of(20, partial(layer, rows)) for layer in layers)


def read_rate() -> float:
    """Bytes per second of summing up 512 MiB: the best of 10."""
    block = torch.ones(128 << 20, dtype=torch.float32)
    return block.nbytes / best_of(10, block.sum)


def print_table(rows: list[dict[str, object]]) -> None:
    print(f"{'case':24s} {'ours':>12s} {'transformers':>13s} {'speedup (min-max)':>20s} {'floor':>10s} {'ours/floor':>10s}")
    for row in rows:
        spread = f"{row['speedup']:.2f} ({row['speedup_min']:.2f}-{row['speedup_max']:.2f})"
        print(
            f"{row['case']:24s} {row['ours_ms']:9.1f} ms {row['transformers_ms']:10.1f} ms {spread:>20s} "
            f"{row['floor_ms']:7.1f} ms {row['times_floor']:10.2f}"
        )
        print(
            f"{'':24s} {row['ours_rate']:9.1f}    {row['transformers_rate']:10.1f}    {row['unit']}; floor: {row['floor_name']}"
        )
        if "sequential_ms" in row:
            print(f"{'':24s} transformers one by one: {row['sequential_ms']:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--step-tokens", type=int, default=SchedulerSection().step_tokens)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    suite = Suite(arguments.model, arguments.step_tokens, arguments.seed)
    load_before = os.getloadavg()
    suite.repeat(ours_first=True)  # warm-up: first allocations, kernels chosen
    for case in suite.cases:
        case.ours.clear()
        case.baseline.clear()
    for number in range(arguments.repeats):
        suite.repeat(ours_first=number % 2 == 0)
    rates = suite.add_floors()
    suite.close()
    rows = [case.summary() for case in suite.cases]
    print(f"threads on each side: {arguments.threads}; steps of {arguments.step_tokens} tokens; repeats: {arguments.repeats}")
    print_table(rows)
    print(f"load average {load_before[0]:.2f} before, {os.getloadavg()[0]:.2f} behind")
    print(f"matrix products {rates['gemm_gflops_per_s']:.1f} GFLOP/s, memory {rates['read_gb_per_s']:.1f} GB/s")
    print(f"streams with equal tokens on both sides: {suite.num_equal} of {suite.num_streams}")
    if arguments.json:
        result = {
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "summary": rows,
            "rates": rates,
            "raw": [asdict(case) for case in suite.cases],
            "equal_streams": [suite.num_equal, suite.num_streams],
            "load": [load_before, os.getloadavg()],
            "torch": torch.__version__,
        }
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
