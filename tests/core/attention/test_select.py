"""The start-up choice: what the probe lets pass, what it refuses, and what is logged."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from core.attention import compiled_decode, compiled_prefill, select
from core.attention.base import AttentionSpec, KVLayout
from core.attention.batched import BatchedSdpaBackend
from core.attention.paged_cpu import PagedCpuBackend
from core.attention.pages import PagesBackend
from core.attention.sdpa import SdpaBackend
from core.attention.select import AttentionChoice, AttentionProblem, choose_attention, probe
from core.attention.varlen import VarlenBackend
from core.errors import ConfigError
from tests.support.varlen_kernel import documented_varlen_attn_with_sums

SPEC = AttentionSpec(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)


def select_backend(*args, **options):
    """Return the backend of the choice."""
    return choose_attention(*args, **options).backend


def problem(dtype=torch.float32, specs=(SPEC,), block_size=64):
    return AttentionProblem(torch.device("cpu"), dtype, specs, num_layers=3, block_size=block_size)


class StandInPagesBackend(PagesBackend):
    kernel = documented_varlen_attn_with_sums


class SlightlyWrong(SdpaBackend):
    name = "paged_cpu"

    def attend(self, layer, query, spec, plan):
        return super().attend(layer, query, spec, plan) * 1.01


class WindowBlind(SdpaBackend):
    name = "paged_cpu"

    def attend(self, layer, query, spec, plan):
        return super().attend(layer, query, AttentionSpec(9, 3, 64, 0.125), plan)


class WritesWrongLayer(SdpaBackend):
    name = "paged_cpu"

    def write_kv(self, layer, key_value, plan):
        super().write_kv(layer - 1, key_value, plan)


class WrongOnWholePrompts(SdpaBackend):
    name = "paged_cpu"

    def attend(self, layer, query, spec, plan):
        output = super().attend(layer, query, spec, plan)
        return output if len(query) <= 6 else output * 1.01


class Refusing(SdpaBackend):
    name = "paged_cpu"

    def attend(self, layer, query, spec, plan):
        raise NotImplementedError("no kernel image for this page size\nlong trace")


def test_cpu_default_is_the_paged_kernel_and_is_logged(caplog):
    with caplog.at_level(logging.INFO):
        assert select_backend(problem()) is PagedCpuBackend
    assert "event=attention_backend backend=paged_cpu layout=HND" in caplog.text


def test_the_log_says_which_kernels_are_compiled(caplog, monkeypatch):
    monkeypatch.setattr(compiled_decode, "built_library", lambda: None)
    monkeypatch.setattr(compiled_prefill, "built_library", lambda: None)
    with caplog.at_level(logging.INFO):
        choose_attention(problem())
    assert "decode=torch prefill=torch" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("mask", [{}, {"sliding_window": 512}, {"chunk_size": 8192}])
def test_probe_accepts_the_working_kernels(dtype, block_size, mask):
    asked = problem(dtype, (SPEC, AttentionSpec(4, 1, 32, 0.2, **mask)), block_size)
    assert probe(PagedCpuBackend, asked) is None
    assert probe(SdpaBackend, asked) is None
    assert probe(StandInPagesBackend, asked) is None


@pytest.mark.parametrize("wrong", [SlightlyWrong, WritesWrongLayer, WrongOnWholePrompts, Refusing])
def test_auto_falls_back_to_the_next_candidate_and_gives_the_reason(caplog, wrong):
    with caplog.at_level(logging.INFO):
        assert select_backend(problem(), candidates=(wrong, SdpaBackend)) is SdpaBackend
    assert "event=attention_backend_refused backend=paged_cpu reason=" in caplog.text
    assert "event=attention_backend backend=sdpa" in caplog.text


def test_auto_asks_only_backends_of_the_device(caplog):
    class ForAnotherDevice(Refusing):
        device_types = frozenset({"cuda"})

    assert select_backend(problem(), candidates=(ForAnotherDevice, SdpaBackend)) is SdpaBackend
    assert "refused" not in caplog.text


def test_probe_feels_a_window_longer_than_its_sequences():
    windowed = problem(specs=(SPEC, AttentionSpec(9, 3, 64, 0.125, sliding_window=100_000)))
    assert "slots that no query may see" in probe(WindowBlind, windowed)
    assert probe(WindowBlind, problem()) is None


class ReadsLeftOfTheMask(SdpaBackend):
    """Gives the values that a sequence no longer sees weight 0, as a kernel does that reads whole tiles."""

    def attend(self, layer, query, spec, plan):
        output = super().attend(layer, query, spec, plan)
        for sequence, block_ids in plan.sequences:
            values = self._gather(self.cache.value(layer), block_ids)[:, : sequence.seq_len]
            output[sequence.query_start : sequence.query_end] += 0 * values.sum()
        return output


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("mask", [{"sliding_window": 512}, {"chunk_size": 8192}])
def test_probe_refuses_a_kernel_that_reads_what_lies_left_of_the_mask(mask, block_size):
    masked = problem(specs=(AttentionSpec(9, 3, 64, 0.125, **mask),), block_size=block_size)
    assert "slots that no query may see" in probe(ReadsLeftOfTheMask, masked)
    assert "slots that no query may see" in probe(ReadsLeftOfTheMask, replace(masked, specs=(SPEC, *masked.specs))), (
        "of any layer"
    )
    assert probe(ReadsLeftOfTheMask, problem(block_size=block_size)) is None
    for backend in (PagedCpuBackend, BatchedSdpaBackend, StandInPagesBackend, SdpaBackend):
        assert probe(backend, masked) is None


def test_probe_reports_the_first_line_of_a_refusal():
    assert probe(Refusing, problem()) == "NotImplementedError: no kernel image for this page size"


def test_probe_refuses_a_result_that_is_not_a_number():
    class Leaking(SdpaBackend):
        def attend(self, layer, query, spec, plan):
            return super().attend(layer, query, spec, plan) * float("nan")

    assert "NaN" in probe(Leaking, problem())


def test_a_kernel_that_loses_the_device_is_named_and_no_other_is_asked(monkeypatch, caplog):
    asked = []

    def is_lost(device):
        asked.append(device)
        return True

    monkeypatch.setattr(select, "_is_lost", is_lost)
    with pytest.raises(ConfigError, match=r"paged_cpu has made cpu useless .*no kernel image.*model\.attention") as caught:
        choose_attention(problem(), candidates=(Refusing, SdpaBackend))
    assert caught.value.param == "model.attention"
    assert asked == [torch.device("cpu")]
    assert "backend=sdpa" not in caplog.text


def test_named_backend_is_never_replaced():
    assert select_backend(problem(), "sdpa") is SdpaBackend
    with pytest.raises(ConfigError, match="paged_cpu: NotImplementedError: no kernel image"):
        select_backend(problem(), "paged_cpu", candidates=(Refusing, SdpaBackend))
    with pytest.raises(
        ConfigError, match="no attention backend 'flash'; known: auto, paged_cpu, varlen, triton, pages, gather, sdpa"
    ):
        select_backend(problem(), "flash")


def test_torch_refuses_varlen_on_the_cpu_and_the_probe_reports_it():
    refusal = probe(VarlenBackend, problem(torch.bfloat16))
    assert re.search("'CPU' backend|lacks block_table", refusal), refusal  # the second before torch 2.12


def test_varlen_without_a_kernel_is_refused_by_the_probe():
    def missing(*_args, **_kwargs):
        raise ImportError("cannot import name 'varlen_attn'")

    class WithoutKernel(VarlenBackend):
        kernel = missing

    assert "varlen_attn" in probe(WithoutKernel, problem())


def test_varlen_in_the_wrong_layout_is_a_config_error(paged):
    with pytest.raises(ConfigError, match="NHD, got HND"):
        VarlenBackend(paged.Step(paged.Case([paged.Seq(3)]), KVLayout.HND).cache)


class WantsPagesOf256(SdpaBackend):
    name = "wants_256"
    larger_block_sizes = (100, 128, 256)

    def plan(self, batch):
        if self.cache.block_size % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        return super().plan(batch)


def test_a_kernel_that_demands_larger_pages_decides_the_block_size():
    assert choose_attention(problem(), "auto", (WantsPagesOf256, SdpaBackend)) == AttentionChoice(WantsPagesOf256, 256)


def test_a_larger_block_is_a_multiple_of_the_configured_one(caplog):
    asked = replace(problem(), block_size=96)
    assert choose_attention(asked, "auto", (WantsPagesOf256, SdpaBackend)) == AttentionChoice(SdpaBackend, 96)
    assert [record.message.count("divisible") for record in caplog.records if "refused" in record.message] == [1]


def test_the_configured_size_comes_first():
    assert choose_attention(problem(), "auto", (SdpaBackend,)).block_size == problem().block_size
