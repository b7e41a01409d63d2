"""Settings with which no process would start are found by the doctor, and by ``serve`` before it starts any."""

from __future__ import annotations

import json
import os

import pytest

from core.config import load_config
from core.errors import ConfigError
from core.model.arch import parse_arch
from kvferry import doctor_checks, preflight
from kvferry.cluster_plan import workers_here
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts
from tests.kvferry.test_doctor_model import TINY_LLAMA


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("router.tool_format=abc", "router.tool_format = 'abc': no such format; known: auto, "),
        ("router.proxy_addresses=abc", "router.proxy_addresses: 'abc' is neither an address nor a network"),
        ("router.images.allowed_hosts=http://", "router.images.allowed_hosts: 'http://' is no host"),
    ],
)
def test_what_only_a_router_reads_is_checked_before_it_starts(setting, said):
    with pytest.raises(ConfigError) as refused:
        preflight.check_router(load_config(assignments=[setting]))
    assert refused.value.message.startswith(said)
    found = verdicts(doctor_checks.check_router, setting)["router"]
    assert (found.verdict, found.text) == ("failure", refused.value.message)
    assert verdicts(doctor_checks.check_router, setting, OF_ANY_PROCESS)["router"].verdict == "warning"
    assert verdicts(doctor_checks.check_router) == {}


def test_kernels_for_a_gpu_are_refused_where_workers_compute_on_the_cpu():
    found = verdicts(doctor_checks.check_engine, "model.device=cpu", "model.attention=triton")["engine"]
    assert (found.verdict, found.text.partition(":")[0]) == ("failure", "model.attention = triton")
    assert verdicts(doctor_checks.check_engine, "model.device=cpu", "model.attention=gather")["engine"].verdict == "ok"
    settings = ["model.device=cpu", "model.attention=triton", OF_ANY_PROCESS, "worker.ops_port=0"]
    with pytest.raises(ConfigError, match=r"^model\.attention = triton: "):
        preflight.check_process("decode", load_config(assignments=settings))
    preflight.check_process("encode", load_config(assignments=[*settings, "model.name=owner/unknown"]))  # it uses no attention


def test_more_threads_than_processors_are_found():
    cores = len(os.sched_getaffinity(0))
    assert "threads" not in verdicts(doctor_checks.check_engine, f"worker.cpu_threads={cores}")
    found = verdicts(doctor_checks.check_engine, f"worker.cpu_threads={cores + 1}")["threads"]
    assert (found.verdict, found.text.partition(",")[0]) == ("warning", f"worker.cpu_threads = {cores + 1}")


def test_a_pool_whose_size_the_model_tells_is_held_against_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "memory_limit_bytes", lambda: 1 << 30)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    settings = ["model.device=cpu", f"model.name={tmp_path}"]
    block_bytes = 64 * 2 * 16 * 4
    too_many = (1 << 30) // block_bytes
    arch = parse_arch(TINY_LLAMA)
    for num_blocks, is_right in ((2, True), (too_many // 2, False), (too_many // 2 - 1, True)):  # two workers
        config = load_config(assignments=[*settings, f"cache.num_blocks={num_blocks}"])
        if is_right:
            preflight.check_model(arch, workers_here(config))
            continue
        with pytest.raises(ConfigError, match=rf"^cache\.num_blocks = {num_blocks}: blocks of .* 1 GiB of memory") as refused:
            preflight.check_model(arch, workers_here(config))
        assert refused.value.param == "cache.num_blocks"
        found = verdicts(doctor_checks.check_model, *settings, f"cache.num_blocks={num_blocks}")["model"]
        assert (found.verdict, found.text) == ("failure", refused.value.message)
