"""The time of the decoder and of transformers: same weights, same process, one thread, turn by turn.

Prefill: one prompt, the logits of its last token. Decode: one more token for each of N sequences that hold a context already.
Ours runs on the engine's attention backend over a paged cache; transformers on its own (SDPA, dynamic cache). fp32, CPU.
``gemm floor`` is the time of our packed linears alone on inputs of that size, the part that no other code can take away.

Linears: the four linear layers of ten transformer layers and the head, all on as many rows: as the engine computes them, dense,
and packed by oneDNN's kernels alone. (A prefill step has all layers, and the head on one row only: that is ``gemm floor``.)

    python benchmarks/model.py [--repeats 7] [--only linear prefill decode] [--json FILE] [--markdown] [--quick]

Median (minimum) in milliseconds, and the ratio of the medians (the other way to ours). transformers is needed
(``pip install kvferry[test]``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Machine, Outcome, Table, make_parser, publish
from torch import Tensor

from core.attention.base import AttentionBackend, AttentionBatch, AttentionPlan, PagedKVCache
from core.attention.paged_cpu import PagedCpuBackend
from core.config_types import default_cache_dir
from core.model.arch import ModelArch, parse_arch
from core.model.decoder import Decoder
from core.model.hub import resolve_model
from core.model.linear import DenseLinear, PackedLinear, make_linear
from core.model.loader import load_decoder

BLOCK_SIZE = 64
SECTIONS = ("linear", "prefill", "decode")
DECODE_SHAPES = ((1, 128), (1, 1024), (4, 512), (16, 128), (16, 512))
LINEAR, WHOLE = ("ours", "F.linear", "oneDNN"), ("ours", "transformers", "gemm floor")
Call = Callable[[], object]


class Paged:
    """Our decoder with a cache for ``num_sequences`` sequences of up to ``max_tokens`` tokens."""

    def __init__(self, decoder: Decoder, num_sequences: int, max_tokens: int) -> None:
        arch = decoder.arch
        per_sequence = -(-max_tokens // BLOCK_SIZE)
        num_blocks = 1 + num_sequences * per_sequence
        shape = (num_blocks, arch.num_layers, 2, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
        pool = torch.zeros(shape, dtype=decoder._weights.embedding.dtype)
        self._decoder = decoder
        self._backend: AttentionBackend = PagedCpuBackend(PagedKVCache(pool, PagedCpuBackend.preferred_layout))
        self._tables = 1 + np.arange(num_sequences * per_sequence, dtype=np.int32).reshape(num_sequences, per_sequence)

    def step(self, input_ids: Tensor, start: int, *, every_token: bool = False) -> Tensor:
        """Feed ``input_ids`` ``[num_sequences, new]`` at positions from ``start`` on; return logits of the last or of all."""
        num_sequences, new = input_ids.shape
        positions = np.arange(start, start + new)
        slots = self._tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = AttentionBatch(
            query_start_loc=np.arange(num_sequences + 1, dtype=np.int32) * new,
            seq_lens=np.full(num_sequences, start + new, np.int32),
            block_tables=self._tables,
            slot_mapping=slots.flatten(),
        )
        plans: list[AttentionPlan] = [self._backend.plan(batch)]
        rows = torch.arange(0 if every_token else new - 1, num_sequences * new, 1 if every_token else new)
        flat_positions = torch.from_numpy(np.tile(positions, num_sequences))
        hidden = self._decoder.forward(input_ids.flatten(), flat_positions, self._backend, plans, rows)
        return self._decoder.compute_logits(hidden)


def load_transformers(folder: Path) -> Any:  # noqa: ANN401 - transformers is untyped here
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prefill_calls(decoder: Decoder, reference: Any, num_tokens: int) -> dict[str, Call]:  # noqa: ANN401
    ids = torch.randint(0, decoder.arch.vocab_size, (1, num_tokens))
    paged = Paged(decoder, 1, num_tokens)
    expected = reference(ids, logits_to_keep=1).logits[:, -1]
    assert (paged.step(ids, 0) - expected).abs().max() < 1e-2
    return {
        "ours": lambda: paged.step(ids, 0),
        "transformers": lambda: reference(ids, use_cache=True, logits_to_keep=1),
        "gemm floor": gemm_floor(decoder, num_tokens, 1),
    }


def decode_calls(decoder: Decoder, reference: Any, num_sequences: int, context: int) -> dict[str, Call]:  # noqa: ANN401
    ids = torch.randint(0, decoder.arch.vocab_size, (num_sequences, context + 1))
    paged = Paged(decoder, num_sequences, context + 1)
    paged.step(ids[:, :context], 0)
    cache = reference(ids[:, :context], use_cache=True, logits_to_keep=1).past_key_values

    def theirs() -> Tensor:
        logits: Tensor = reference(ids[:, context:], past_key_values=cache, use_cache=True).logits[:, -1]
        cache.crop(-1)  # keep the context; drops the token just added
        return logits

    assert (paged.step(ids[:, context:], context) - theirs()).abs().max() < 1e-2
    return {
        "ours": lambda: paged.step(ids[:, context:], context),
        "transformers": theirs,
        "gemm floor": gemm_floor(decoder, num_sequences, num_sequences),
    }


def gemm_floor(decoder: Decoder, num_tokens: int, num_outputs: int) -> Call:
    """Return a call of every linear layer of a step: all layers on the tokens, the head on the rows that are sampled."""
    arch, weights = decoder.arch, decoder._weights
    hidden, inner = torch.randn(num_tokens, arch.hidden_size), torch.randn(num_tokens, arch.intermediate_size)
    heads = torch.randn(num_tokens, arch.num_heads * arch.head_dim)

    def run() -> None:
        for number, layer in enumerate(weights.layers):
            layer.qkv(hidden)
            rows = num_outputs if number == arch.num_layers - 1 else num_tokens
            layer.output(heads[:rows])
            layer.gate_up(hidden[:rows])
            layer.down(inner[:rows])
        weights.head(hidden[:num_outputs])

    return run


def linear_calls(arch: ModelArch, num_rows: int) -> dict[str, Call]:
    """Return the linears of ten layers, which exceed the caches several times, and the head; random weights."""
    query, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    hidden, inner = arch.hidden_size, arch.intermediate_size
    shapes = [(query + 2 * kv, hidden), (hidden, query), (2 * inner, hidden), (hidden, inner)] * 10 + [
        (arch.vocab_size, hidden)
    ]
    weights = [torch.randn(shape) for shape in shapes]
    inputs = [torch.randn(num_rows, columns) for _, columns in shapes]
    ours = [make_linear(weight) for weight in weights]
    packed = [PackedLinear(weight, None) for weight in weights]
    dense = [DenseLinear(weight, None) for weight in weights]

    def run(layers: Sequence[Callable[[Tensor], Tensor]]) -> Call:
        return lambda: [layer(x) for layer, x in zip(layers, inputs, strict=True)]

    return {"ours": run(ours), "F.linear": run(dense), "oneDNN": run(packed)}


@dataclass(frozen=True, slots=True)
class Case:
    """The times of one case in milliseconds, by who computes it; ours first, then the one that ours is compared with."""

    name: str
    times_ms: dict[str, list[float]]

    @property
    def median_ms(self) -> dict[str, float]:
        return {label: statistics.median(times) for label, times in self.times_ms.items()}

    def row(self) -> list[str]:
        ours, other, *_ = self.median_ms.values()
        cells = [f"{self.median_ms[label]:.1f} ({min(times):.1f})" for label, times in self.times_ms.items()]
        return [self.name, *cells, f"{other / ours:.2f}"]


def measure(name: str, calls: dict[str, Call], repeats: int) -> Case:
    """Time the calls turn by turn, so that a disturbance hits all of them; the first turn warms up."""
    times: dict[str, list[float]] = {label: [] for label in calls}
    for turn in range(repeats + 1):
        for label, call in calls.items():
            start = time.perf_counter()
            call()
            if turn > 0:
                times[label].append((time.perf_counter() - start) * 1e3)
    return Case(name, times)


def outcome(name: str, linear: Sequence[Case], whole: Sequence[Case]) -> Outcome:
    tables = [
        Table(("ms", *labels, f"{labels[1]} / ours"), [case.row() for case in cases])
        for labels, cases in ((LINEAR, linear), (WHOLE, whole))
        if cases
    ]
    figures: dict[str, object] = {"cases": [{"name": case.name, "median_ms": case.median_ms} for case in (*linear, *whole)]}
    return Outcome(tables, [f"{name}, float32, one thread: median (minimum)"], figures)


def main() -> None:
    parser = make_parser(__doc__ or "", repeats=7)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.repeats, arguments.only = 1, ["linear"]
    machine = Machine.now()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = resolve_model(arguments.model, Path(default_cache_dir()))
    arch = parse_arch(files.config)
    decoder = load_decoder(arch, files.weight_files, dtype=torch.float32)
    reference = load_transformers(files.path)
    linear, whole = [], []
    with torch.inference_mode():
        for num_rows in (1, 2, 4, 8, 16, 64, 256, 1024) if "linear" in arguments.only else ():
            linear.append(measure(f"linear, {num_rows} rows", linear_calls(arch, num_rows), 3 * arguments.repeats))
        for num_tokens in (64, 256, 1024) if "prefill" in arguments.only else ():
            whole.append(measure(f"prefill {num_tokens}", prefill_calls(decoder, reference, num_tokens), arguments.repeats))
        for num_sequences, context in DECODE_SHAPES if "decode" in arguments.only else ():
            calls = decode_calls(decoder, reference, num_sequences, context)
            whole.append(measure(f"decode {num_sequences} x context {context}", calls, 4 * arguments.repeats))
    publish(outcome(files.name, linear, whole), machine, arguments)


if __name__ == "__main__":
    main()
