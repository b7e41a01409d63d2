"""The durations that workers report match what the simulation has seen; defects of them must be detected."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

import core.sched.outputs
from connectors.p2p.consumer.load import Load
from kvferry.sim.faults import Fault
from kvferry.sim.runs import run_seed
from prefill.role import PrefillHandler

KINDS = (Fault.STALL, Fault.SLOW)  # so that everything takes time


def test_durations_are_compared():
    result = run_seed(0, KINDS)
    assert result.is_good
    assert result.happened["compared_times"] > 0


def begin_to_compute_too_late(patch):
    real = core.sched.outputs._first_token_times

    def first_token_times(state, request):
        return dataclasses.replace(real(state, request), compute_s=0.0)

    patch(core.sched.outputs, "_first_token_times", first_token_times)


def count_the_queue_as_prefill_too(patch):
    real = PrefillHandler._answer

    def answer(self, prefill, now, result):
        prefill.arrival_time -= 0.25
        real(self, prefill, now, result)

    patch(PrefillHandler, "_answer", answer)


def end_transfers_before_their_bytes_are_here(patch):
    real = Load.report

    def report(self, *args):
        ended = real(self, *args)
        usage = msgspec.structs.replace(ended.usage, transfer_ms=0.0, verify_ms=ended.usage.transfer_ms + ended.usage.verify_ms)
        return dataclasses.replace(ended, usage=usage)

    patch(Load, "report", report)


def begin_transfers_with_their_reads(patch):
    real = Load.report

    def report(self, *args):
        self.started_at = self.started_at + 0.001
        return real(self, *args)

    patch(Load, "report", report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "apply",
    [
        begin_to_compute_too_late,
        begin_transfers_with_their_reads,
        count_the_queue_as_prefill_too,
        end_transfers_before_their_bytes_are_here,
    ],
    ids=lambda apply: apply.__name__,
)
def test_wrong_duration_is_found(apply, monkeypatch):
    apply(monkeypatch.setattr)
    violations = [violation for seed in range(5) for violation in run_seed(seed, KINDS).violations]
    assert any("told as" in violation or "came after the end" in violation for violation in violations), violations
