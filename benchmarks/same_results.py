"""How far logits depend on the way they are computed on a CPU: chunks, batches, prefill or decode, and the element type.

    python benchmarks/same_results.py [--model smollm2-135m] [--cpu avx2] [--json FILE] [--markdown] [--quick]

12 prompts of 320 tokens of English and 24 tokens after each, all of them given: 300 predictions by the backend that serves, in
each element type, without and with 8-bit weights; with --cpu avx2 as on a CPU without AVX-512. Nothing is timed. Compared with
a prompt in chunks of 256 alone and its other tokens by decode steps:

    chunks      the prompt in chunks of 64 and of 100, and whole
    batch       all 12 at once
    one kernel  the tokens behind the prompt by prefill, two at a time: what a preemption computes again
    float32     for bfloat16: weights rounded to bfloat16, everything else in float32

``gap``: the largest change of the gap between the two best logits. ``other``: predictions with another best token, and the
largest gap among them.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import Machine, Outcome, Table, make_parser, publish
from cpu_choice import add_cpu_choice, compute_as_chosen
from model import Paged
from quantized import windows_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from core.attention import compiled_decode, compiled_prefill
from core.config_types import default_cache_dir
from core.errors import ConfigError
from core.model import compiled_layers, few_rows
from core.model.arch import parse_arch
from core.model.decoder import Decoder
from core.model.hub import ModelFiles, resolve_model
from core.model.loader import load_decoder

NUM_PROMPTS, PROMPT, ANSWER = 12, 320, 24
USUAL_CHUNK, CHUNKS = 256, (64, 100, PROMPT)


def predict(decoder: Decoder, tokens: Tensor, chunk: int = USUAL_CHUNK, *, per_step: int = 1) -> Tensor:
    """Return float32 logits ``[sequences * (ANSWER + 1), vocab]`` of ``tokens`` ``[sequences, PROMPT + ANSWER]``, together."""
    paged, rows = Paged(decoder, len(tokens), PROMPT + ANSWER), []
    for start in range(0, PROMPT, chunk):
        last = paged.step(tokens[:, start : min(start + chunk, PROMPT)], start)
    rows.append(last[:, None])
    for start in range(PROMPT, PROMPT + ANSWER, per_step):
        logits = paged.step(tokens[:, start : start + per_step], start, every_token=True)
        rows.append(logits.view(len(tokens), per_step, -1))
    return torch.cat(rows, 1).float().flatten(0, 1)


def one_by_one(decoder: Decoder, tokens: Tensor, chunk: int = USUAL_CHUNK, *, per_step: int = 1) -> Tensor:
    return torch.cat([predict(decoder, each[None], chunk, per_step=per_step) for each in tokens])


def compare(expected: Tensor, found: Tensor) -> dict[str, float]:
    best = expected.topk(2, 1).indices
    gaps = [each.gather(1, best)[:, 0] - each.gather(1, best)[:, 1] for each in (expected, found)]
    others = best[:, 0] != found.argmax(1)
    return {
        "logits": float((expected - found).abs().max()),
        "gap": float((gaps[0] - gaps[1]).abs().max()),
        "others": int(others.sum()),
        "largest gap of others": float(gaps[0][others].max()) if others.any() else 0.0,
    }


def cells(found: dict[str, float]) -> list[str]:
    if not found["logits"]:
        return ["equal", "0", "0"]
    others = f"{found['others']:.0f}, gaps up to {found['largest gap of others']:.3f}" if found["others"] else "0"
    return [f"differ by up to {found['logits']:.2g}", f"{found['gap']:.2g}", others]


def load(files: ModelFiles, dtype: torch.dtype, quantization: str = "none") -> Decoder:
    return load_decoder(parse_arch(files.config), files.weight_files, dtype=dtype, quantization=quantization)


def load_rounded(files: ModelFiles) -> Decoder:
    """Return a decoder in float32 whose weights are those of the one in bfloat16."""
    arch = parse_arch(files.config)
    with TemporaryDirectory() as folder:
        copies = [Path(folder) / path.name for path in files.weight_files]
        for path, copy in zip(files.weight_files, copies, strict=True):
            save_file({name: tensor.bfloat16() for name, tensor in load_file(path).items()}, copy)
        return load_decoder(arch, copies, dtype=torch.float32)


def differences(files: ModelFiles, dtype: torch.dtype, quantization: str, tokens: Tensor) -> dict[str, dict[str, float]]:
    """Return what each way to compute changes, by its label."""
    decoder = load(files, dtype, quantization)
    expected = one_by_one(decoder, tokens)
    found = {f"chunks of {chunk}": one_by_one(decoder, tokens, chunk) for chunk in CHUNKS}
    found["batch"] = predict(decoder, tokens)
    found["one kernel"] = one_by_one(decoder, tokens, per_step=2)
    if dtype is torch.bfloat16 and quantization == "none":
        found["float32"] = one_by_one(load_rounded(files), tokens)
    return {label: compare(expected, logits) for label, logits in found.items()}


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__ or "", repeats=1)
    add_cpu_choice(parser)
    arguments = parser.parse_args()
    machine = Machine.now()
    libraries = [module.built_library() for module in (compiled_decode, compiled_prefill, compiled_layers, few_rows)]
    compute_as_chosen(arguments, *libraries)
    torch.set_num_threads(1)
    files = resolve_model(arguments.model, Path(default_cache_dir()))
    tokens = windows_of(files, 1 if arguments.quick else NUM_PROMPTS, PROMPT + ANSWER)
    rows, figures, notes = [], {}, [f"{len(tokens) * (ANSWER + 1)} predictions in each row"]
    for dtype in (torch.float32, torch.bfloat16):
        for quantization in ("none", "int8"):
            name = str(dtype).removeprefix("torch.") + (", 8-bit weights" if quantization == "int8" else "")
            try:
                found = differences(files, dtype, quantization, tokens)
            except ConfigError as error:
                notes.append(f"{name}: {error.message.partition('; ')[0]}")
                continue
            for label, one in found.items():
                figures[f"{name}: {label}"] = one
                rows.append([name, label, *cells(one)])
    table = Table(("", "compared", "logits", "gap, largest change", "other best token"), rows)
    publish(Outcome([table], notes, {"differences": figures}), machine, arguments)


if __name__ == "__main__":
    main()
