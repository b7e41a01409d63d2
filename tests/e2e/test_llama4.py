"""A small random Llama 4, chunked layers and one that sees all, prefill and decode apart, against transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, Llama4TextConfig

from core.config_workers import CacheSection, SchedulerSection
from kvferry.local import LocalCluster, ProcessOptions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

VOCAB = 211
BLOCK = 16
CHUNK = 4 * BLOCK  # of attention
NUM_LAYERS = 4
NUM_CHUNKED = 3
TOKEN_BYTES = 2 * 2 * 16 * 4  # of a layer: keys and values, heads, head size, float32
BATCHED_TOKENS = {"prefill": 40, "decode": 72}  # of a step; neither is a multiple of the other, nor of a block
CONFIG = Llama4TextConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    intermediate_size_mlp=80,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
    bos_token_id=1,
    eos_token_id=2,
    attention_chunk_size=CHUNK,
    moe_layers=[],
    no_rope_layers=[1, 1, 0, 1],
    floor_scale=100,
    attn_scale=0.3,
)


@pytest.fixture(scope="module")
def model():
    """Random weights whose logits are spread out."""
    torch.manual_seed(5)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), 0.3 if "norm" in name else 0.2)
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model as a folder; its tokenizer has a word for every id."""
    folder = tmp_path_factory.mktemp("llama4")
    model.save_pretrained(folder)
    words = {f"w{token_id}": token_id for token_id in range(VOCAB)}
    BackendTokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def served(folder, cluster_config, serve, tmp_path_factory, eventually):
    """Workers that compute prompts in chunks of different lengths."""
    config = cluster_config(
        f"model.name={folder}",
        "model.served_name=llama4",
        "connector.transports=[shm]",
        "connector.kv_load_failure_policy=fail",
    )
    options = ProcessOptions(
        caches={role: CacheSection(block_size=BLOCK, num_blocks=400) for role in BATCHED_TOKENS},
        schedulers={role: SchedulerSection(max_num_batched_tokens=number) for role, number in BATCHED_TOKENS.items()},
    )
    logs = tmp_path_factory.mktemp("logs")
    with LocalCluster(config, log_dir=logs, options=options) as cluster, serve("llama4", cluster) as found:
        yield found
        eventually(lambda: not found.held(), f"release of {found.held()}")


@pytest.fixture(scope="module")
def assert_greedy(model):
    """Hold an answer against the model's own, up to the first token at which two are as good."""

    def check(prompt, output):
        with torch.inference_mode():
            rows = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        best = rows.topk(2)
        assert min(best.values[:, 0] - best.values[:, 1]) > 1e-3, "a prompt of another seed would say more"
        assert output == best.indices[:, 0].tolist()

    return check


def handoff_bytes(num_tokens):
    """Count the blocks that the token after the prompt attends to: its own chunk's, and all of one layer."""
    num_blocks = -(-num_tokens // BLOCK)
    num_gone = num_tokens // CHUNK * CHUNK // BLOCK
    return (num_blocks * (NUM_LAYERS - NUM_CHUNKED) + (num_blocks - num_gone) * NUM_CHUNKED) * BLOCK * TOKEN_BYTES


def test_handoff_across_chunks_gives_the_answers_of_transformers(served, assert_greedy):
    generator = np.random.default_rng(3)
    lengths = (1, 40, 63, 64, 65, 130, 257)
    prompts = [generator.integers(3, VOCAB, length).tolist() for length in lengths]
    bodies = served.complete_all(prompts, model="llama4", max_tokens=CHUNK + 8, ignore_eos=True)
    for prompt, body in zip(prompts, bodies, strict=True):
        assert_greedy(prompt, body["choices"][0]["token_ids"])
        usage = body["usage"]["kv_transfer"]
        assert (usage["transferred_tokens"], usage["recomputed_tokens"]) == (len(prompt), 0)
        assert usage["transferred_bytes"] == handoff_bytes(len(prompt))


def test_prefill_worker_computes_no_more_tokens_in_a_step_than_its_role_may(served):
    before = served.gauges("prefill-0")["kvferry_engine_steps_total"]
    served.complete([5 + number % 200 for number in range(800)], model="llama4", max_tokens=2)
    steps = served.gauges("prefill-0")["kvferry_engine_steps_total"] - before
    assert steps >= 800 / BATCHED_TOKENS["prefill"], "a few more have nothing to compute"
