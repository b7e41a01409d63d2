"""``doctor memory`` says what the engine then does."""

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner

from core.clock import SystemClock
from core.config import load_config
from core.engine.build import build_engine
from core.errors import ConfigError, ContextTooLong
from core.kv.hashing import BlockHasher
from core.request import NewRequest, Request
from core.wire.sampling import SamplingParams
from kvferry import cli
from kvferry.doctor_memory import report_memory

SETTINGS = ("cache.block_size=16", "cache.memory_bytes=400000", "scheduler.max_num_batched_tokens=64", "worker.pin_cpus=false")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two full layers, then four with windows of 64 tokens."""
    torch.manual_seed(5)
    config = Qwen2Config(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=2,
    )
    folder = tmp_path_factory.mktemp("windowed")
    Qwen2ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def config(folder):
    return load_config(assignments=[f"model.name={folder}", *SETTINGS])


@pytest.fixture
def engine(config):
    built = build_engine(config, SystemClock())
    yield built
    built.pool.close()


def test_a_gpu_has_two_steps_in_flight(config, monkeypatch):
    assert report_memory(config).max_in_flight_tokens == 64
    monkeypatch.setattr("core.engine.build.device_of", lambda section: torch.device("cuda"))
    assert report_memory(config).max_in_flight_tokens == 128


def test_pool_is_the_one_that_the_engine_allocates(config, engine):
    report = report_memory(config)
    pool = engine.pool
    assert (report.num_blocks, report.block_bytes) == (pool.config.num_blocks - 1, pool.layout.block_bytes)
    assert report.pool_bytes == pool.cache.pool.nbytes
    assert [group.layers for group in report.groups] == [group.layer_indices for group in pool.config.groups]
    assert [group.attention for group in report.groups] == ["full", "window of 64", "window of 64"]
    assert report.max_model_len == engine.max_model_len == engine.engine.scheduler.max_model_len
    assert report.tokens_that_fit == report.concurrency * report.max_model_len
    bytes_per_block = [group.max_bytes_per_request // group.max_blocks_per_request for group in report.groups]
    assert bytes_per_block == [pool.layout.block_bytes] * 3


@pytest.mark.parametrize("context", [64, 200])
def test_as_many_requests_are_admitted_together_as_it_says(config, engine, context):
    """Blocks are taken from the free ones as a whole prompt of that length takes them, until the gate says no."""
    manager = engine.engine.scheduler.kv_cache_manager
    report = report_memory(config, context)
    taken, num_requests = [], 0
    while True:
        prompt = [(num_requests * 7 + position) % 97 for position in range(context)]
        new = NewRequest(request_id=f"r{num_requests}", prompt_token_ids=prompt, sampling=SamplingParams())
        request = Request(new, BlockHasher(b"doctor"))
        if manager.allocate_slots(request, 1, full_sequence_must_fit=True) is None:
            break
        taken += manager.block_pool.get_new_blocks(manager.get_num_missing_blocks(request))
        num_requests += 1
    assert num_requests == report.concurrency > 0


def test_longest_request_is_the_longest_that_the_engine_takes(config, engine):
    longest = report_memory(config).max_model_len
    scheduler = engine.engine.scheduler
    scheduler.check_length(longest - 1)  # and one token to sample
    with pytest.raises(ContextTooLong, match=f"{longest} tokens"):
        scheduler.check_length(longest)
    with pytest.raises(ConfigError, match=f"no request can have {longest + 1} tokens: model and KV pool allow {longest}"):
        report_memory(config, longest + 1)


def test_command_prints_groups_blocks_and_concurrency(folder):
    assignments = [part for setting in SETTINGS for part in ("--set", setting)]
    command = ["doctor", "memory", "--model", str(folder), "--context", "200", *assignments]
    shown = CliRunner().invoke(cli.app, command)
    assert shown.exit_code == 0
    found = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).output)
    assert found["groups"][1]["attention"] == "window of 64"
    lines = dict(line.split("  ", 1) for line in shown.output.splitlines())
    assert "layers 2, 3" in lines["group 1"]
    assert f"{found['num_blocks']:,} blocks of 16 tokens and {found['block_bytes']:,} bytes" in lines["KV pool"]
    assert f"{found['concurrency']:,} of 200 tokens" in lines["requests at once"]
