"""The engine on the real SmolLM2-135M against transformers on the same weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.clock import SystemClock
from core.config import load_config
from core.config_types import default_cache_dir
from core.engine.build import build_engine
from core.model.hub import resolve_model
from core.request import NewRequest
from core.wire.sampling import SamplingParams

MARGIN = 1e-3
SHARED = 100  # tokens that a quarter of the prompts have in common


@pytest.fixture(scope="module")
def reference():
    files = resolve_model("smollm2-135m", Path(default_cache_dir()))
    return AutoModelForCausalLM.from_pretrained(files.path, dtype=torch.float32).eval()


def mixed_requests(vocab_size, count, longest):
    """Prompts of some tokens to ``longest`` and a common start, 4 to 30 tokens out, a third of them random."""
    generator = np.random.default_rng(1)
    shared = generator.integers(20, vocab_size, SHARED).tolist()
    for number in range(count):
        prompt = generator.integers(20, vocab_size, int(generator.integers(1, longest))).tolist()
        sampling = SamplingParams(
            max_tokens=int(generator.integers(4, 30)), temperature=0.8 if number % 3 == 2 else 0.0, top_p=0.9, seed=number
        )
        yield NewRequest(
            request_id=f"r{number}", prompt_token_ids=shared + prompt if number % 4 == 0 else prompt, sampling=sampling
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("count", "longest"), [(8, 120), pytest.param(32, 600, marks=pytest.mark.full)])
def test_mixed_requests_give_the_tokens_of_transformers(reference, run_engine, count, longest):
    settings = {"cache.memory_bytes": 700 << 20, "scheduler.max_num_seqs": count // 2}
    built = build_engine(load_config(overrides=settings), SystemClock())
    requests = list(mixed_requests(built.arch.vocab_size, count, longest))
    found = run_engine(built.engine, requests, per_step=2)
    built.engine.shutdown()
    assert built.engine.stats.num_prefix_hit_tokens > 0
    assert len(found) == count
    num_tokens = num_divergent = 0
    for new in requests:
        output = found[new.request_id].token_ids
        assert len(output) == new.sampling.max_tokens
        if new.sampling.temperature == 0.0:
            num_tokens += len(output)
            num_divergent += diverges(reference, list(new.prompt_token_ids), output)
    assert num_tokens > 8 * count
    assert num_divergent <= 1


def diverges(reference, prompt, output) -> bool:
    """Check the output token by token up to the first that differs, which must be a near tie; say whether there is one."""
    with torch.inference_mode():
        rows = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    for position, (row, token) in enumerate(zip(rows, output, strict=True)):
        best = row.topk(2)
        if token != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert gap < MARGIN, f"token {position}: {token} instead of {int(best.indices[0])}, gap {gap:.2g}"
            return True
    return False
