"""The benchmark of a GPU: its arithmetic, and a run of every line of it on the CPU."""

import importlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.benchmark_goals import check_goal
from tests.support.fake_cuda import ClaimedCuda


@pytest.fixture(scope="module")
def load_gpu(load_benchmark):
    """Return a module of the benchmark's, with its neighbours importable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield load_benchmark


@pytest.mark.slow
def test_smoke_run_measures_everything_and_fails_nowhere(run_benchmark, tmp_path):
    path = tmp_path / "gpu.json"
    printed = run_benchmark("gpu", "--smoke", "--json", str(path))
    figures = json.loads(path.read_text())
    assert figures["notes"] == []
    assert figures["numerics"]["float32"]["is_good"]
    assert figures["decode"]["tiny 2 x 64"]["tokens_per_s"] > 0
    assert figures["prefill"]["tiny 32"]["seconds"] > 0
    assert figures["host"]["tiny"]["scheduler_ms"] > 0
    assert figures["transformers"]["tiny 1 x 16"] > 0
    pair = figures["handoff"]["tiny shm"]
    assert pair["transport"] == "shm"
    assert pair["num_fallbacks"] == 0
    assert pair["num_same_texts"] == pair["num_texts"] > 0
    assert pair["transferred_bytes"] > 0
    assert "does not fit" in printed
    assert "mean nothing" in printed


def test_settings_reach_every_engine(load_gpu):
    gpu = load_gpu("gpu")
    plan = gpu.changed(gpu.smoke_plan(), ["cache.block_size=32", "model.attention=sdpa"])
    for size in (plan.engine, plan.pair.engine):
        found = load_gpu("gpu_engine").settings(Path("models/tiny"), size, "cpu")
        assert (found["cache.block_size"], found["model.attention"]) == (32, "sdpa")


@pytest.mark.full
@pytest.mark.skipif(torch.cuda.is_available(), reason="a stand-in for a CUDA device, where there is none")
def test_an_engine_is_measured_on_a_stand_in_for_a_device(load_gpu, tmp_path, monkeypatch):
    """The parts that only run on a GPU: pinned memory, a pool sized to the free memory, recorded steps."""
    cuda = ClaimedCuda(free=1788 << 20, total=1788 << 20)
    gpu = load_gpu("gpu")
    monkeypatch.setattr(gpu, "transports_here", lambda device: ())
    monkeypatch.setattr(importlib.import_module("gpu_engine").EngineBench, "_device_s", lambda bench, num_steps: 0.0)
    smoke = gpu.smoke_plan()
    engine = replace(smoke.engine, num_blocks=0, changes=(("model.attention", "gather"),))
    report = gpu.Report(float("inf"), frozenset({"ceilings", "decode", "prefill", "host"}))
    torch.set_num_threads(1)
    with cuda.installed():
        gpu.GpuBenchmark(replace(smoke, device="cuda", engine=engine), tmp_path, report).run()
    assert report.notes == []
    assert {"ceilings", "decode", "prefill", "host"} <= report.figures.keys()
    assert cuda.num_replayable


@pytest.mark.gpu
@pytest.mark.timeout(290)  # two pairs of processes, each of which compiles kernels and records graphs
def test_handoff_between_two_gpu_processes_gives_what_one_would_compute(run_benchmark, tmp_path):
    path = tmp_path / "gpu.json"
    run_benchmark("gpu", "--only", "numerics", "handoff", "--models", "smollm2", "--json", str(path))
    figures = json.loads(path.read_text())
    assert figures["notes"] == []
    assert figures["numerics"]["bfloat16"]["is_good"]
    for pair in figures["handoff"].values():
        assert pair["num_fallbacks"] == 0
        assert 2 * pair["num_same_texts"] > pair["num_texts"], "bfloat16 may leave a text at a close choice, not most of them"


def test_shape_counts_weights_and_work_of_llama_8b(load_gpu):
    shape = load_gpu("gpu_models").LLAMA_8B
    assert shape.num_bytes == pytest.approx(2 * 8.03e9, rel=0.001)
    assert shape.kv_bytes_per_token(2) == 128 << 10
    assert shape.prefill_flops(8192) == pytest.approx(2 * 6.98e9 * 8192 + 4 * 32 * 4096 * 8192**2 / 2, rel=0.01)
    assert shape.decode_bytes(1, 0, 2) == pytest.approx(15.0e9, rel=0.01)  # all but the embedding


def test_device_is_busy_in_the_union_of_its_events(load_gpu):
    def event(start, end, kind=torch.autograd.DeviceType.CUDA):
        return SimpleNamespace(time_range=SimpleNamespace(start=start, end=end), device_type=kind)

    events = [event(10, 20), event(0, 5), event(12, 18), event(19, 25), event(0, 100, torch.autograd.DeviceType.CPU)]
    assert load_gpu("gpu_engine").busy_s(events) == pytest.approx(20e-6)
    assert load_gpu("gpu_engine").busy_s([]) == 0


def test_what_fails_is_reported_and_stops_nothing(load_gpu, capsys):
    report = load_gpu("gpu_report").Report(deadline=float("inf"), wanted=frozenset({"decode"}))
    with report.part("decode", "8 x 8") as is_wanted:
        assert is_wanted
        raise torch.OutOfMemoryError("too much\nof it")
    with report.part("prefill") as is_wanted:
        assert not is_wanted
    assert report.notes == ["decode 8 x 8: FAILED: OutOfMemoryError: too much"]
    assert report.num_failures == 1
    assert "OutOfMemoryError" in capsys.readouterr().err


def test_no_part_is_begun_when_time_is_up(load_gpu):
    report = load_gpu("gpu_report").Report(deadline=0.0, wanted=frozenset({"decode"}))
    with report.part("decode", "8 x 8") as is_wanted:
        assert not is_wanted
    assert report.notes == ["decode 8 x 8: no time was left"]


def test_an_aim_is_reached_or_missed(load_gpu):
    report = load_gpu("gpu_report").Report(deadline=0.0, wanted=frozenset())
    report.add("decode", "a", "1", 0.8, 0.75)
    report.add("decode", "b", "1", 0.7, 0.75)
    assert [row[2:] for row in report.rows] == [("80.0 %", "75 % reached"), ("70.0 %", "75 % MISSED")]
    assert [goal["met"] for goal in report.goals] == [True, False]
    for goal in report.goals:
        check_goal(goal)


DIES = """
import os, signal, time
def measure(mark, report):
    for case in ("first", "dies", "fails", "loses", "hangs", "last"):
        with report.part("decode", case) as is_wanted:
            if is_wanted:
                with open(mark, "a") as file:
                    file.write(case + " ")
                report.add("decode", case, "1")
                if case == "dies":
                    os.kill(os.getpid(), signal.SIGSEGV)
                report.is_device_lost = lambda: case == "loses"
                if case in ("fails", "loses"):
                    raise RuntimeError("an error of a kernel")
                while case == "hangs" and report.wanted == {"decode", "hang"}:
                    time.sleep(1)
    report.send(has_ended=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_process_that_dies_or_hangs_costs_the_part_it_was_at(load_gpu, tmp_path, monkeypatch, hangs):
    monkeypatch.delitem(sys.modules, "dying_measure", raising=False)
    (tmp_path / "dying_measure.py").write_text(DIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_gpu("gpu_report")  # and from here on the other process finds it, by its own name
    dying_measure, module, states = importlib.import_module("dying_measure"), importlib.import_module("gpu_report"), []
    now = time.monotonic()
    report = module.Report(now + 60, frozenset({"decode", "hang"} if hangs else {"decode"}))
    target, mark = dying_measure.measure, tmp_path / "begun"
    report = module.measure_in_processes(target, (mark,), report, now + (6 if hangs else 60), states.append)
    assert mark.read_text().split() == ["first", "dies", "fails", "loses", "hangs", *([] if hangs else ["last"])]
    reasons = ["ended with status -11", "an error of a kernel", "an error of a kernel"]
    for note, reason in zip(report.notes, reasons, strict=False):
        assert reason in note
    assert any("was killed" in note for note in report.notes) == hangs
    assert states[-1].rows == report.rows
