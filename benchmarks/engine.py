"""The engine against transformers and vLLM on the same weights, on the CPU, in turns.

    python benchmarks/engine.py [--repeats 3] [--threads 1] [--dtype float32] [--peers] [--step-tokens 256] [--json result.json]

All sides compute greedily in the same dtype with the same number of threads; no stop token ends a text early. Baseline:
transformers' ``generate`` with its default (SDPA) attention and dynamic cache, in this process. With ``--peers`` vLLM's eager
CPU engine takes its turn, too, in a process of its own (``engine_peer.py``, after ``make install-vllm``), which sleeps
meanwhile. Every repeat uses new prompts, so no prefix is cached, and the order of the sides alternates. Figures are medians
over the repeats; a speedup is the median of the ratios within a repeat. One stream takes only a second, so it has five turns in
each repeat. Four cases:

* prefill     one prompt of 256, then one of 1,024 tokens to its first token; ours is computed in steps of ``--step-tokens``
* decode      one stream: prompt 128, then 64 tokens; time per token after the first
* 16 streams  prompts of 256 tokens, 64 tokens out, all 16 there at the start; output tokens per second over everything.
              Baseline: one batched ``generate`` of the same 16 (no padding, as they are equally long). Beside it stands what
              the 16 would take one after the other: 4 times the time of the first 4, measured in the first repeat only

The floors are measured in the same run: the rate of this model's largest matrix product by the fastest of our linear layers,
and the rate at which memory can be read. Goals beside vLLM: prefill at the lower of 1.15 times its rate and 0.95 times the
floor's, decode at 1.4 times its rate, 16 streams at 1.25 times. Goals beside transformers, without ``--peers`` and with one
thread: prefill at 1.25 times its rate, decode at 1.3 times, 16 streams at 1.7 times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import goal_notes
from engine_cases import Case, goals_of, print_table
from engine_sides import Ours, Side, Theirs, Vllm
from peer_process import PeerProcess

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.clock import SystemClock
from core.config import load_config
from core.config_workers import SchedulerSection
from core.engine.build import build_engine
from core.model.arch import ModelArch
from core.model.linear import DenseLinear, make_linear

PREFILL_TOKENS = (256, 1024)
DECODE_PROMPT, DECODE_TOKENS, DECODE_TURNS = 128, 64, 5
STREAMS, STREAM_PROMPT, STREAM_TOKENS = 16, 256, 64
SEQUENTIAL_SAMPLE = 4
GOALS = {"prefill": 1.25, "decode": 1.3, "streams": 1.7}  # transformers' time / ours, at least
VLLM_GOALS = {"prefill": 1.15, "decode": 1.4, "streams": 1.25}


class Suite:
    """All cases over one model on all sides: ``ours``, ``transformers`` and, with a ``peer``, ``vllm``."""

    def __init__(
        self, model: str, dtype: str, step_tokens: int, seed: int, make_peer: Callable[[str], PeerProcess] | None
    ) -> None:
        settings = {
            "model.name": model,
            "model.device": "cpu",
            "model.dtype": dtype,
            "cache.memory_bytes": 400 << 20,
            "scheduler.max_num_seqs": STREAMS,
            "scheduler.max_num_batched_tokens": step_tokens,
        }
        built = build_engine(load_config(overrides=settings), SystemClock())
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.ours = Ours(built)
        self.theirs = Theirs(built.files.path, self.dtype)
        self.sides: dict[str, Side] = {"ours": self.ours, "transformers": self.theirs}
        self.vllm = Vllm(make_peer(str(built.files.path))) if make_peer else None
        if self.vllm is not None:
            self.sides["vllm"] = self.vllm
        self.arch = built.arch
        self.random = np.random.default_rng(seed)
        self.prefills = [
            Case(f"prefill {length}", "tokens/s", length, GOALS["prefill"], VLLM_GOALS["prefill"], is_prefill=True)
            for length in PREFILL_TOKENS
        ]
        self.decode = Case("decode, 1 stream", "tokens/s", 1, GOALS["decode"], VLLM_GOALS["decode"])
        num_tokens = STREAMS * STREAM_TOKENS
        self.streams = Case(f"{STREAMS} streams", "output tokens/s", num_tokens, GOALS["streams"], VLLM_GOALS["streams"])
        self.num_equal = self.num_streams = 0

    def close(self) -> None:
        """End our engine."""
        self.ours.engine.shutdown()

    @property
    def cases(self) -> list[Case]:
        """Return the cases in the order of the table."""
        return [*self.prefills, self.decode, self.streams]

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Return new prompts."""
        return self.random.integers(20, self.arch.vocab_size, (count, length)).tolist()

    def repeat(self, is_forward: bool) -> None:
        """Measure every case once on every side, the sides in this order or the other."""
        sides = list(self.sides.items() if is_forward else reversed(self.sides.items()))
        for case, length in zip(self.prefills, PREFILL_TOKENS, strict=True):
            prompts = self.prompts(1, length)
            for name, side in sides:
                case.add(name, total(side.run(prompts, 1)[0]))
        for _ in range(DECODE_TURNS):
            prompts = self.prompts(1, DECODE_PROMPT)
            for name, side in sides:
                self.decode.add(name, seconds_per_token(side.run(prompts, DECODE_TOKENS)[0], DECODE_TOKENS))
        self._streams(sides)

    def _streams(self, sides: list[tuple[str, Side]]) -> None:
        prompts = self.prompts(STREAMS, STREAM_PROMPT)
        outputs: dict[str, list[list[int]]] = {}
        for name, side in sides:
            times, outputs[name] = side.run(prompts, STREAM_TOKENS)
            self.streams.add(name, total(times))
        if "sequential" not in self.streams.extra:
            sample = [total(self.theirs.run([one], STREAM_TOKENS)[0]) for one in prompts[:SEQUENTIAL_SAMPLE]]
            self.streams.extra["sequential"] = [sum(sample) * STREAMS / SEQUENTIAL_SAMPLE]
        self.num_streams += STREAMS
        self.num_equal += sum(a == b for a, b in zip(outputs["ours"], outputs["transformers"], strict=True))

    def add_floors(self) -> dict[str, float]:
        """Set the floors of the cases; returns the measured rates."""
        flops_per_s, bytes_per_s = gemm_rate(self.arch, self.dtype), read_rate()
        weights = num_linear_weights(self.arch)
        head = self.arch.vocab_size * self.arch.hidden_size
        for case, length in zip(self.prefills, PREFILL_TOKENS, strict=True):
            case.floor_s = prefill_flops(self.arch, length) / flops_per_s
            case.floor_name = "matrix products at the measured rate"
        size = self.dtype.itemsize
        self.decode.floor_s = size * (weights + head) / bytes_per_s
        self.decode.floor_name = "reading the weights once per token"
        prompt_s = STREAMS * prefill_flops(self.arch, STREAM_PROMPT) / flops_per_s
        kv_bytes = size * 2 * self.arch.num_layers * self.arch.num_kv_heads * self.arch.head_dim
        mean_context = STREAM_PROMPT + STREAM_TOKENS / 2
        step_s = (size * (weights + head) + STREAMS * mean_context * kv_bytes) / bytes_per_s
        self.streams.floor_s = prompt_s + (STREAM_TOKENS - 1) * step_s
        self.streams.floor_name = "matrix rate, then weights and KV once a step"
        return {"gemm_gflops_per_s": flops_per_s / 1e9, "read_gb_per_s": bytes_per_s / 1e9}


def total(times: list[float]) -> float:
    """Return the seconds from the start to the end."""
    return times[-1] - times[0]


def seconds_per_token(times: list[float], num_tokens: int) -> float:
    """Return the seconds per token after the first one, if the entry after the start belongs to the first token."""
    return (times[num_tokens] - times[1]) / (num_tokens - 1)


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


def gemm_rate(arch: ModelArch, dtype: torch.dtype) -> float:
    """Operations per second of the gate and up projection over a whole prompt, dense or packed: the best of 20 each."""
    weight = torch.randn(2 * arch.intermediate_size, arch.hidden_size).to(dtype)
    rows = torch.randn(PREFILL_TOKENS[-1], arch.hidden_size).to(dtype)
    layers = (DenseLinear(weight, None), make_linear(weight))
    return 2.0 * weight.numel() * len(rows) / min(best_of(20, partial(layer, rows)) for layer in layers)


def read_rate() -> float:
    """Bytes per second of summing up 512 MiB: the best of 10."""
    block = torch.ones(128 << 20, dtype=torch.float32)
    return block.nbytes / best_of(10, block.sum)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--peers", action="store_true", help="measure vLLM, too")
    parser.add_argument("--step-tokens", type=int, default=SchedulerSection().step_tokens)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    load_before = os.getloadavg()
    with ExitStack() as peers:

        def make_peer(folder: str) -> PeerProcess:
            return peers.enter_context(PeerProcess("engine_peer.py", folder, arguments.dtype, num_threads=arguments.threads))

        suite = Suite(
            arguments.model, arguments.dtype, arguments.step_tokens, arguments.seed, make_peer if arguments.peers else None
        )
        suite.repeat(is_forward=True)  # warm-up: first allocations, kernels chosen
        for case in suite.cases:
            case.clear()
        for number in range(arguments.repeats):
            suite.repeat(is_forward=number % 2 == 0)
        rates = suite.add_floors()
        suite.close()
    report(suite, rates, load_before, arguments)


def report(suite: Suite, rates: dict[str, float], load_before: tuple[float, ...], arguments: argparse.Namespace) -> None:
    """Print the table, and write the figures if asked to."""
    rows = [case.summary() for case in suite.cases]
    goals = goals_of(rows, arguments.threads)
    print(
        f"{arguments.dtype}; threads on each side: {arguments.threads}; steps of {arguments.step_tokens} tokens; "
        f"repeats: {arguments.repeats}"
    )
    print_table(rows)
    print(f"load average {load_before[0]:.2f} before, {os.getloadavg()[0]:.2f} after")
    print(f"matrix products {rates['gemm_gflops_per_s']:.1f} GFLOP/s, memory {rates['read_gb_per_s']:.1f} GB/s")
    print(f"streams with equal tokens in ours and transformers: {suite.num_equal} of {suite.num_streams}")
    add_us = {}
    if suite.vllm is not None:
        add_us = {"ours": statistics.median(suite.ours.add_us), "vllm": statistics.median(suite.vllm.add_us)}
        print(f"adding a request to the engine: ours {add_us['ours']:.0f} us, vLLM {add_us['vllm']:.0f} us")
    for note in goal_notes(goals):
        print(note)
    if arguments.json:
        result = {
            "goals": goals,
            "arguments": {name: str(value) for name, value in vars(arguments).items()},
            "summary": rows,
            "rates": rates,
            "raw": [asdict(case) for case in suite.cases],
            "equal_streams": [suite.num_equal, suite.num_streams],
            "add_us": add_us,
            "load": [load_before, os.getloadavg()],
            "torch": torch.__version__,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
