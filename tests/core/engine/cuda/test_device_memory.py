import numpy as np
import pytest
import torch

from core.attention.batched import BatchedSdpaBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.config_workers import SchedulerSection
from core.engine.cuda.device_memory import DeviceMemory, measure, pool_bytes
from core.engine.trial_steps import run_largest_step, run_longest_prefills, run_widest_decode
from core.errors import ConfigError
from tests.support.varlen_kernel import documented_varlen_attn_with_sums

GIB = 1 << 30
BLOCK = 16


class StandInPagesBackend(PagesBackend):
    kernel = documented_varlen_attn_with_sums


def memory(**changes):
    return DeviceMemory(**{"total": 80 * GIB, "free": 62 * GIB, "weights": 16 * GIB, "activations": 2 * GIB, **changes})


def test_the_pool_takes_what_weights_and_a_step_leave_of_the_workers_share():
    assert pool_bytes(memory(), 0.5) == 40 * GIB - (768 << 20) - 16 * GIB - 2 * GIB - (512 << 20)


def test_graphs_reserve_the_widest_decode_step_beside_unrecorded_steps():
    graphs = GIB + (512 << 20)
    without = pool_bytes(memory(decode=GIB), 0.5, has_graphs=False)
    assert pool_bytes(memory(decode=GIB), 0.5) == without - graphs


def test_two_workers_of_half_a_device_do_not_take_each_others_memory():
    taken = 16 * GIB + pool_bytes(memory(), 0.45) + 2 * GIB
    second = 16 * GIB + pool_bytes(memory(free=80 * GIB - taken - 17 * GIB), 0.45) + 2 * GIB
    assert taken + second < 80 * GIB


def test_memory_that_others_hold_is_not_counted_on():
    assert pool_bytes(memory(free=10 * GIB), 0.9) == 10 * GIB - 2 * GIB - (512 << 20)


def test_a_share_that_holds_no_pool_is_refused_with_the_figures():
    with pytest.raises(ConfigError, match="gpu_memory_utilization") as caught:
        pool_bytes(memory(), 0.2)
    assert str(16 * GIB) in str(caught.value)
    assert "model.max_model_len" in str(caught.value)


def test_a_step_that_does_not_fit_names_the_settings_that_make_it_smaller(monkeypatch):
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *device: 16 * GIB)

    def run_largest():
        raise torch.OutOfMemoryError("Tried to allocate 4 GiB")

    with pytest.raises(ConfigError, match="max_model_len") as caught:
        measure(torch.device("cuda"), run_largest, run_largest)
    assert all(name in str(caught.value) for name in ("max_num_batched_tokens", "max_num_seqs", "allocate 4 GiB"))


@pytest.mark.parametrize("backend", [SdpaBackend, BatchedSdpaBackend])
@pytest.mark.parametrize("num_tokens", [1, 96, 700])
def test_the_largest_step_runs_on_one_block_whatever_its_size(build_tiny, backend, num_tokens):
    """700 tokens are more than one sequence of this model may have."""
    built = build_tiny()
    seen = []
    decoder = built.engine.runner.decoder
    head = decoder.compute_logits
    decoder.compute_logits = lambda hidden: seen.append(tuple(hidden.shape)) or head(hidden)
    section = SchedulerSection(max_num_batched_tokens=num_tokens, max_num_seqs=32)
    run_largest_step(decoder, backend, built.pool.config, section, torch.float32)
    assert seen == [(min(num_tokens, 32), 48)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", [SdpaBackend, BatchedSdpaBackend, StandInPagesBackend])
@pytest.mark.parametrize("num_seqs", [1, 40])
def test_the_widest_decode_step_has_every_sequence_at_its_full_length(build_tiny, monkeypatch, backend, num_seqs):
    built = build_tiny()
    decoder, batches, shapes = built.engine.runner.decoder, [], []
    plan, forward = backend.plan, decoder.forward
    monkeypatch.setattr(backend, "plan", lambda self, batch: batches.append(batch) or plan(self, batch))
    decoder.forward = lambda *args: shapes.append(tuple(forward(*args).shape)) or forward(*args)
    section = SchedulerSection(max_num_seqs=num_seqs)
    run_widest_decode(decoder, backend, built.pool.config, section, torch.float32, 100)
    assert shapes == [(num_seqs, decoder.arch.hidden_size)]
    assert batches[0].seq_lens.tolist() == [100] * num_seqs


@pytest.mark.parametrize("backend", [SdpaBackend, BatchedSdpaBackend, StandInPagesBackend])
@pytest.mark.parametrize(("num_seqs", "num_tokens", "longest"), [(4, 14, 200), (40, 14, 200), (1, 1, 200), (1, 60, 40)])
def test_long_prefixes_are_measured_too(build_tiny, monkeypatch, backend, num_seqs, num_tokens, longest):
    built = build_tiny()
    decoder, batches, shapes = built.engine.runner.decoder, [], []
    plan, forward = backend.plan, decoder.forward
    monkeypatch.setattr(backend, "plan", lambda self, batch: batches.append(batch) or plan(self, batch))
    monkeypatch.setattr("core.engine.trial_steps._TABLE_ENTRIES", 16)
    decoder.forward = lambda *args: shapes.append(tuple(forward(*args).shape)) or forward(*args)
    section = SchedulerSection(max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
    run_longest_prefills(decoder, backend, built.pool.config, section, torch.float32, longest)
    (batch,) = batches
    num_queries, width = np.diff(batch.query_start_loc), 16 // len(batch.seq_lens)
    assert num_queries.sum() == min(num_tokens, longest * len(num_queries))
    assert len(num_queries) == min(num_seqs, max(1, num_tokens // 2)), "a single query would be one of decode"
    assert batch.seq_lens.tolist() == [*[min(longest, width * BLOCK)] * (len(num_queries) - 1), longest]
    assert shapes == [(num_queries.sum(), decoder.arch.hidden_size)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measuring_counts_weights_and_the_peak_of_a_step():
    device = torch.device("cuda")
    weights = torch.zeros(64 << 20, dtype=torch.uint8, device=device)

    def take(num_bytes):
        return lambda: torch.zeros(num_bytes // 4, dtype=torch.float32, device=device).sum()  # of integers: 64 bits each

    found = measure(device, take(128 << 20), take(32 << 20))
    assert found.weights >= weights.numel()
    assert 128 << 20 <= found.activations < 160 << 20
    assert 32 << 20 <= found.decode < 64 << 20
    assert found.free + found.weights < found.total
