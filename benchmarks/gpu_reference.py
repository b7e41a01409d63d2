"""The engine beside transformers on the same weights: whether the numbers agree, and how fast the other is.

Numbers: transformers computes the engine's own text once more, in float32 and in the dtype that is compared, and every sampled
token's log-probability is held against the first. What is allowed is what transformers itself loses by the dtype, twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_ceilings import wait_for
from gpu_engine import EngineSize, Prompts, release_memory, settings
from gpu_models import Shape

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import build_engine
from core.request import NewRequest
from core.wire.sampling import SamplingParams

ALLOWED = 2.0  # times what transformers loses itself
FLOOR = 1e-3  # of log-probabilities, in nats


@dataclass(frozen=True, slots=True)
class Agreement:
    """Largest differences of log-probabilities from float32, in nats; and tokens that float32 would not have put first."""

    ours: float
    transformers: float
    num_tokens: int
    num_other_tokens: int
    largest_gap: float  # of float32's best log-probability to that of such a token

    @property
    def is_good(self) -> bool:
        limit = max(FLOOR, ALLOWED * self.transformers)
        return self.ours <= limit and self.largest_gap <= 2 * limit


def compare_numbers(folder: Path, shape: Shape, device: str, dtype: str, num_prompts: int) -> Agreement:
    """Generate greedily with the engine and compute the same with transformers."""
    size = EngineSize(max_num_seqs=num_prompts, max_context=512, step_tokens=256, num_blocks=num_prompts * 32, dtype=dtype)
    built = build_engine(load_config(overrides=settings(folder, size, device)), SystemClock())
    prompts = [Prompts(shape.vocab).kept(number, 16 + 23 * number) for number in range(num_prompts)]
    sampling = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    for number, prompt in enumerate(prompts):
        built.engine.add_request(NewRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling))
    texts: list[list[int]] = [[] for _ in prompts]
    found: list[list[float]] = [[] for _ in prompts]
    while built.engine.has_requests():
        for output in built.engine.step():
            texts[int(output.request_id)] += output.new_token_ids
            found[int(output.request_id)] += [entry.logprobs[0] for entry in output.logprobs or []]
    built.engine.shutdown()
    built.pool.close()
    exact = [_logprobs(folder, device, "float32", prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    theirs = [_logprobs(folder, device, dtype, prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    return _compare(texts, found, exact, theirs)


def generation_rates(
    folder: Path, device: str, dtype: str, cases: Sequence[tuple[int, int]], num_tokens: int
) -> Iterator[tuple[int, int, float]]:
    """Yield batch, context, and output tokens per second of transformers' ``generate`` after the first token.

    With its default attention and cache; the time to the first token is measured apart, behind one that does not count.
    """
    model = _load(folder, device, dtype)
    generation = model.generation_config
    for name in ("eos_token_id", "temperature", "top_p", "top_k"):
        setattr(generation, name, None)
    generation.pad_token_id = 0
    for batch, context in cases:
        prompts = [Prompts(model.config.vocab_size).kept(number, context) for number in range(batch)]
        ids = torch.tensor(prompts, device=device)
        _, first_s, all_s = (_generate_s(model, ids, length) for length in (1, 1, 1 + num_tokens))
        yield batch, context, batch * num_tokens / max(1e-9, all_s - first_s)
    del model
    release_memory()


def _generate_s(model: Any, ids: torch.Tensor, num_tokens: int) -> float:  # noqa: ANN401
    begin = time.perf_counter()
    with torch.inference_mode():
        lengths = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **lengths)
    wait_for(ids.device.type)
    return time.perf_counter() - begin


def _compare(
    texts: list[list[int]], found: list[list[float]], exact: list[torch.Tensor], theirs: list[torch.Tensor]
) -> Agreement:
    ours_off, theirs_off, gaps = [0.0], [0.0], [0.0]
    num_other = 0
    for text, logprobs, wanted, other in zip(texts, found, exact, theirs, strict=True):
        tokens = torch.tensor(text)[:, None]
        true = wanted.gather(1, tokens)[:, 0]
        ours_off.append(float((torch.tensor(logprobs, dtype=true.dtype) - true).abs().max()))
        theirs_off.append(float((other.gather(1, tokens)[:, 0] - true).abs().max()))
        gap = wanted.max(1).values - true
        num_other += int((gap > 0).sum())
        gaps.append(float(gap.max()))
    return Agreement(max(ours_off), max(theirs_off), sum(map(len, texts)), num_other, max(gaps))


def _logprobs(folder: Path, device: str, dtype: str, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Return what transformers says of every place of the text, [num_tokens, vocab] float32 on the host."""
    model = _load(folder, device, dtype)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *text[:-1]]], device=device)).logits[0, len(prompt) - 1 :]
    return torch.log_softmax(logits.float(), dim=-1).cpu()


def _load(folder: Path, device: str, dtype: str) -> Any:  # noqa: ANN401 - transformers is untyped here
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
