import gc
import os
import shutil
import threading
from array import array
from pathlib import Path

import pytest
import torch

from core.clock import SystemClock
from core.config import load_config
from core.config_workers import WorkerSection
from core.engine.build import apply_cpu_threads, build_engine, resolve_scheduling
from core.engine.core import EngineCore
from core.errors import ConfigError, ConnectorUnavailable
from core.kv.hashing import BlockHasher
from core.kv.seals import decode_seal
from core.request import NewRequest
from core.wire.sampling import SamplingParams


def on_a_thread(function):
    """Run on a fresh thread, whose settings end with it, and return the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def settings_after(section):
    def apply():
        count = apply_cpu_threads(section)
        return count, torch.get_num_threads(), os.sched_getaffinity(0)

    before = torch.get_num_threads()
    try:
        return on_a_thread(apply)
    finally:
        torch.set_num_threads(before)


def test_lengths_and_facts_agree_with_the_model_and_the_pool(build_tiny):
    built = build_tiny(cache__num_blocks=11)
    assert built.max_model_len == 160  # ten usable blocks of 16
    assert built.num_blocks == 11
    assert built.eos_token_ids == {2}
    assert built.layout.block_bytes == 3 * 2 * 2 * 16 * 8 * 4
    assert len(built.model_fingerprint) == 16
    assert build_tiny(cache__num_blocks=100).max_model_len == 512  # what the model allows
    assert build_tiny(model__max_model_len=99).max_model_len == 99


def test_an_eos_outside_the_vocabulary_is_left_out_and_said(build_tiny, tiny_llama, run_engine, greedy, tmp_path, caplog):
    folder = shutil.copytree(tiny_llama[0], tmp_path / "added")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 211]}')
    built = build_tiny(model__name=str(folder))
    assert "event=eos_left_out token_ids=211" in caplog.text
    new = NewRequest(request_id="a", prompt_token_ids=range(3, 9), sampling=greedy, stop_token_ids=built.eos_token_ids)
    assert run_engine(built.engine, [new])["a"].finish_reason in {"stop", "length"}


def test_missing_compiled_code_is_said(build_tiny, monkeypatch, caplog):
    monkeypatch.setattr("core.engine.build.missing_libraries", lambda: ["model._layer_ops", "attention._paged_prefill"])
    build_tiny()
    assert "event=compiled_libraries_missing libraries=model._layer_ops,attention._paged_prefill" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model__max_model_len": 513}, "the model allows 512"),
        ({"model__max_model_len": 161, "cache__num_blocks": 11}, "pool holds 160"),
        ({"cache__num_blocks": 1}, "at least 2"),
        ({"model__device": "cuda"}, "no CUDA device"),
    ],
)
def test_settings_that_do_not_fit_are_refused(build_tiny, settings, message):
    if "model__device" in settings and torch.cuda.is_available():
        pytest.skip("a CUDA device is there")
    with pytest.raises(ConfigError, match=message):
        build_tiny(**settings)


def test_unknown_model_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        build_engine(load_config(overrides={"model.name": str(tmp_path / "nothing.gguf")}), SystemClock())


def test_connector_gets_layout_fingerprint_and_the_pool(build_tiny, copy_connector):
    connector = copy_connector()
    seen = []
    built = build_tiny(lambda layout, fingerprint: seen.append((layout, fingerprint)) or connector)
    assert seen == [(built.layout, built.model_fingerprint)]
    assert connector.worker.pool.num_blocks == built.num_blocks


def pool_files():
    folder = Path("/proc/self/fd")
    return sum("kvferry-kv" in os.readlink(folder / name) for name in os.listdir(folder) if (folder / name).is_symlink())


@pytest.mark.parametrize(
    ("has_readers", "settings", "makes_digests"),
    [
        (True, {}, True),  # shm and tcp
        (True, {"connector__transports": ["shm"]}, False),
        (True, {"connector__transports": ["shm"], "connector__kv_verify": "digest"}, True),
        (True, {"connector__kv_verify": "identity"}, False),
        (False, {"connector__kv_verify": "digest"}, False),
    ],
)
def test_digests_are_made_where_readers_may_demand_them(build_tiny, has_readers, settings, makes_digests):
    seals = build_tiny(has_readers=has_readers, **settings).pool.seals
    assert seals.has_digests is makes_digests
    assert seals.incarnation == 5


def test_the_engine_seals_what_it_computes(build_tiny):
    built = build_tiny(has_readers=True)
    request = NewRequest(request_id="a", prompt_token_ids=range(3, 35), sampling=SamplingParams(max_tokens=1))
    built.engine.add_request(request)
    built.engine.step()
    pool = built.pool
    rows = [decode_seal(pool.seals.row(block_id)) for block_id in range(pool.config.num_blocks)]
    sealed = {block_id: seal for block_id, seal in enumerate(rows) if seal is not None}
    chain = BlockHasher(built.model_fingerprint).hash_request_blocks(array("i", request.prompt_token_ids))
    assert sorted(seal.block_hash for seal in sealed.values()) == sorted(chain)
    digest_blocks = pool.region.new_digester()
    assert [seal.digest for seal in sealed.values()] == digest_blocks(list(sealed))


def test_a_build_that_fails_gives_the_pool_back(build_tiny, no_garbage):
    before, during = pool_files(), []

    def broken(layout, fingerprint):
        during.append(pool_files())
        raise ConnectorUnavailable("no")

    with pytest.raises(ConnectorUnavailable) as refused:
        build_tiny(broken)
    del refused
    gc.collect()  # the mapping keeps a descriptor of its own, and lives in the frames of the error
    assert during[0] > before
    assert pool_files() == before


def test_a_small_step_is_timed_on_a_cpu_before_the_first_request(build_tiny):
    size, seconds = build_tiny().known_step
    assert (size.num_tokens, size.num_requests) == (16, 1)
    assert seconds > 0


def test_engine_and_pool_can_be_closed_twice(build_tiny, copy_connector):
    connector = copy_connector()
    built = build_tiny(connector)
    ends = []
    connector.worker.shutdown = lambda: ends.append("worker")
    connector.scheduler.shutdown = lambda: ends.append("scheduler")
    other = os.dup(built.pool.region.memory_fd)
    for _ in range(2):
        built.engine.shutdown()
        built.pool.close()
    assert sorted(ends) == ["scheduler", "worker"]
    reused = os.dup(other)  # takes the number that the pool has given back
    built.pool.close()
    os.fstat(reused)
    os.close(reused)
    os.close(other)


def test_hashes_of_another_block_size_are_refused(build_tiny):
    engine = build_tiny().engine
    with pytest.raises(ValueError, match=r"32 tokens.*16"):
        EngineCore(engine.scheduler, engine.runner, BlockHasher(b"model", 32), 211)


def test_a_worker_takes_its_share_of_the_cores():
    cores = len(os.sched_getaffinity(0))
    assert settings_after(WorkerSection(workers_on_host=1))[:2] == (cores, cores)
    assert settings_after(WorkerSection(workers_on_host=100))[:2] == (1, 1)
    assert settings_after(WorkerSection(workers_on_host=100, cpu_threads=2))[:2] == (2, 2)


def test_workers_of_one_host_are_pinned_apart():
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("one core")
    pinned = [settings_after(WorkerSection(workers_on_host=len(cores), host_slot=slot))[2] for slot in range(len(cores))]
    assert set.union(*pinned) == cores
    assert all(len(one) == 1 for one in pinned)


def test_pinning_can_be_off_and_leaves_other_threads_alone():
    cores = os.sched_getaffinity(0)
    assert settings_after(WorkerSection(workers_on_host=8, pin_cpus=False))[2] == cores
    settings_after(WorkerSection(workers_on_host=8))
    assert os.sched_getaffinity(0) == cores


@pytest.mark.parametrize(
    ("num_tokens", "device", "expected"), [(0, "cpu", 256), (0, "cuda", 8192), (512, "cpu", 512), (512, "cuda", 512)]
)
def test_largest_step_depends_on_the_device_unless_it_is_set(num_tokens, device, expected):
    config = load_config(overrides={"scheduler.max_num_batched_tokens": num_tokens})
    assert resolve_scheduling(config, torch.device(device)).scheduler.step_tokens == expected
