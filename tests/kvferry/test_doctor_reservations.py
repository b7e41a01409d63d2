"""The doctor compares what the settings reserve with the memory and the huge pages that there are."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from core.config import load_config
from core.memory_file import HugePageStock
from kvferry import cli, doctor_checks, reserved_memory
from tests.kvferry.findings import OF_ANY_PROCESS


def test_pool_larger_than_the_memory_limit_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    first = next(doctor_checks.check_memory(load_config(assignments=[f"cache.memory_bytes={2 << 30}"])))
    text = "2 KV pools of 2 GiB: 4 GiB, kernels: up to 128 MiB; 1 GiB of memory"
    assert (first.verdict, first.text) == ("failure", text)


def test_a_pool_that_only_another_process_would_have_is_no_failure(monkeypatch, few_huge_pages):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 2 << 30)
    pool = "cache.memory_bytes=8GiB"
    for setting, verdict in (
        ("log.level=INFO", "failure"),
        (OF_ANY_PROCESS, "warning"),
        ("worker.engine_id=p", "failure"),
    ):
        assert next(doctor_checks.check_memory(load_config(assignments=[pool, setting]))).verdict == verdict
        assert {one.verdict for one in huge_pages("cache.huge_pages=always", setting)} == {verdict}


def test_advice_about_memory_depends_on_what_runs_here(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 2 << 30)
    store = ["local.kvstore=true", "kvstore.memory_bytes=8GiB", "kvstore.bind_address=tcp://0.0.0.0:5580", OF_ANY_PROCESS]
    found = [next(doctor_checks.check_memory(load_config(assignments=each))) for each in (["cache.memory_bytes=8GiB"], store)]
    assert found[0].fix == "lower what these settings reserve, or raise the memory limit"
    assert found[1].fix == f"if a process that reserves some of this is to run here: {found[0].fix}"
    assert "kvstore.memory_bytes: 8 GiB" in found[1].text


def test_pools_of_all_workers_of_a_host_count(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 30)
    settings = ["worker.engine_id=p0", f"cache.memory_bytes={1 << 30}", "worker.workers_on_host=4"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"


def test_both_pools_of_a_served_cluster_count_and_one_of_a_single_worker(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 29)
    served, single = load_config(), load_config(assignments=["worker.engine_id=p0"])
    assert next(doctor_checks.check_memory(served)).verdict == "failure"
    text = "1 KV pool of 1 GiB: 1 GiB, kernels: up to 64 MiB; 1.5 GiB of memory"
    assert next(doctor_checks.check_memory(single)).text == text


def test_kernels_that_every_worker_on_a_processor_may_keep_count_too(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 4 << 30)
    workers = ["worker.engine_id=p0", "worker.workers_on_host=3", "worker.kernel_cache_entries=400"]
    settings = [f"cache.memory_bytes={1 << 30}", *workers]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"
    found = next(doctor_checks.check_memory(load_config(assignments=[*settings, "model.device=cuda"])))
    assert (found.verdict, found.text) == ("ok", "nothing beside the model; 4 GiB of memory")


def test_stores_of_workers_count_as_serve_counts_them(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 8 << 30)
    found = next(doctor_checks.check_memory(load_config(assignments=["connector.name=store", "kvstore.memory_bytes=4GiB"])))
    assert (found.verdict, "kvstore.memory_bytes: 8 GiB" in found.text) == ("failure", True)


@pytest.fixture
def few_huge_pages(monkeypatch):
    monkeypatch.setattr(reserved_memory, "huge_page_stock", lambda: HugePageStock(2 << 20, 8, 4))


def huge_pages(*settings):
    return list(doctor_checks.check_huge_pages(load_config(assignments=[f"cache.memory_bytes={16 << 20}", *settings])))


def test_huge_pages_that_are_missing_are_as_bad_as_the_wish_for_them_is_strong(few_huge_pages):
    assert huge_pages() == []
    store = ["connector.name=store", "local.kvstore=true", f"kvstore.memory_bytes={8 << 20}", "kvstore.huge_pages=always"]
    pool, arena = huge_pages("cache.huge_pages=always", *store)
    assert (pool.verdict, arena.verdict) == ("failure", "ok")
    assert pool.text == "cache.huge_pages = always: 16 pages of 2048 kB are needed, 4 of 8 are free"
    (wish,) = huge_pages("cache.huge_pages=auto")
    assert wish.verdict == "warning"


def test_huge_pages_of_one_section_are_not_there_for_the_next(few_huge_pages):
    offload = ["connector.name=offload", f"connector.offload.memory_bytes={4 << 20}", "connector.offload.huge_pages=always"]
    pool, blocks = huge_pages("worker.engine_id=p0", f"cache.memory_bytes={6 << 20}", "cache.huge_pages=always", *offload)
    assert (pool.verdict, blocks.verdict) == ("ok", "failure")
    assert blocks.text.endswith("2 pages of 2048 kB are needed, 1 of 8 are free")


def test_huge_pages_of_a_section_that_is_not_in_use_are_not_missed(few_huge_pages):
    assert huge_pages("kvstore.huge_pages=always", "connector.offload.huge_pages=always") == []


def test_huge_pages_that_a_process_of_these_settings_may_have_are_no_failure(few_huge_pages, listener):
    (found,) = huge_pages("cache.huge_pages=always", f"worker.ops_port={listener}")
    assert found.verdict == "warning"
    assert found.text.endswith(f"; the process at worker.ops_port 127.0.0.1:{listener} may have them")


def test_address_that_is_none_of_this_host_excuses_no_missing_huge_pages(few_huge_pages):
    (found,) = huge_pages("cache.huge_pages=always", "router.host=192.0.2.7")
    assert (found.verdict, "may have them" in found.text) == ("failure", False)


@pytest.mark.parametrize(
    ("settings", "verdicts_found"),
    [
        (["cache.huge_pages=always"], ["warning"]),
        (["cache.huge_pages=auto"], []),
        (["cache.huge_pages=always", "model.device=cuda"], []),
    ],
)
def test_huge_pages_of_a_number_of_blocks_cannot_be_counted_here(settings, verdicts_found, few_huge_pages):
    found = huge_pages("cache.num_blocks=100", *settings)
    assert [one.verdict for one in found] == verdicts_found
    assert all("depends on the model" in one.text for one in found)


@pytest.mark.parametrize(("wish", "exit_code"), [("always", 0), ("auto", 0), ("never", 1)])
def test_a_pool_whose_huge_pages_a_running_process_has_is_no_failure(wish, exit_code, few_huge_pages, listener, monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    pool = ["worker.engine_id=p0", f"cache.memory_bytes={2 << 30}", f"cache.huge_pages={wish}", "connector.transports=tcp"]
    for port, expected in ((listener, exit_code), (0, 1)):
        settings = [*pool, "router.port=0", f"worker.ops_port={port}"]
        done = CliRunner().invoke(cli.app, ["doctor", *(word for one in settings for word in ("--set", one))])
        assert done.exit_code == expected, done.output


def test_a_pool_in_huge_pages_counts_against_no_other_memory(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    monkeypatch.setattr(reserved_memory, "huge_page_stock", lambda: HugePageStock(2 << 20, 4096, 4096))
    settings = [f"cache.memory_bytes={2 << 30}", "cache.huge_pages=always"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "ok"
