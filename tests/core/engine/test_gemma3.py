"""The engine on the real Gemma 3 in a pool that is too small, against transformers on the same weights."""

from __future__ import annotations

import pytest

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import build_engine
from core.kv.invariants import find_violations
from core.model.tokenizer import Tokenizer
from core.request import NewRequest
from core.wire.sampling import SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def built():
    settings = {"model.name": "gemma3-270m", "cache.num_blocks": 110, "scheduler.max_num_batched_tokens": 256}
    built = build_engine(load_config(overrides=settings), SystemClock())
    yield built
    built.engine.shutdown()
    built.pool.close()


def test_preempted_requests_with_shared_prefixes_give_the_tokens_of_transformers(built, run_engine, gemma3_oracle):
    sentences = [f"On day {day} the ferry carried {day * 37 % 91} people across the strait." for day in range(1, 99)]
    text = Tokenizer(built.files).encode(" ".join(sentences))
    prompts = [[*text[:640], *text[700 + 20 * number : 720 + 21 * number]] for number in range(4)]
    requests = [
        NewRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=150))
        for number, prompt in enumerate(prompts)
    ]
    found = run_engine(built.engine, requests, per_step=1)
    assert built.engine.stats.num_preemptions > 0
    assert built.engine.stats.num_prefix_hit_tokens > 0
    for number, prompt in enumerate(prompts):
        assert len(found[f"r{number}"].token_ids) == 150
        gemma3_oracle.assert_token_identical(prompt, found[f"r{number}"].token_ids)
    assert find_violations(built.engine.scheduler.kv_cache_manager) == []
