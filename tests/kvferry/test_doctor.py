"""The doctor finds what is wrong, says what to do, and leaves with the right exit code."""

import socket

import pytest
from typer.testing import CliRunner

from core.config import load_config
from core.memory_file import HugePageStock
from kvferry import cli, doctor_checks
from kvferry.doctor import findings_of


def verdicts(check, *settings):
    return {finding.subject: finding for finding in check(load_config(assignments=settings))}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]


def test_digests_without_compiled_code_are_slow_and_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(doctor_checks, "compiled_library", lambda: None)
    found = verdicts(doctor_checks.check_digests)["digests"]
    assert (found.verdict, found.fix) == ("warning", "install gcc, then kvferry again")
    monkeypatch.setattr(doctor_checks, "compiled_library", object)
    assert verdicts(doctor_checks.check_digests)["digests"].verdict == "ok"


def test_model_that_is_not_fetched_comes_with_the_command_to_fetch_it(tmp_path):
    found = verdicts(doctor_checks.check_model, f"model.cache_dir={tmp_path}")["model"]
    assert (found.verdict, found.fix) == ("warning", "kvferry models smollm2-135m")


def test_model_in_a_folder_is_found(tmp_path):
    assert verdicts(doctor_checks.check_model, f"model.name={tmp_path}", f"model.cache_dir={tmp_path}")["model"].verdict == "ok"


def test_pool_larger_than_the_memory_limit_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    first = next(doctor_checks.check_memory(load_config(assignments=[f"cache.memory_bytes={2 << 30}"])))
    text = "KV pools of 2 workers of this machine: 4 GiB; kernels: up to 128 MiB; 1 GiB of memory"
    assert (first.verdict, first.text) == ("failure", text)


def test_pools_of_all_workers_of_a_host_count(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 30)
    settings = [f"cache.memory_bytes={1 << 30}", "worker.workers_on_host=4"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"


def test_both_pools_of_a_served_cluster_count_and_one_of_a_single_worker(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 29)
    served, single = load_config(), load_config(assignments=["worker.engine_id=p0"])
    assert next(doctor_checks.check_memory(served)).verdict == "failure"
    assert (
        next(doctor_checks.check_memory(single)).text == "KV pools of a worker: 1 GiB; kernels: up to 64 MiB; 1.5 GiB of memory"
    )


def test_kernels_that_every_worker_on_a_processor_may_keep_count_too(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 4 << 30)
    settings = [f"cache.memory_bytes={1 << 30}", "worker.workers_on_host=3", "worker.kernel_cache_entries=400"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"
    found = next(doctor_checks.check_memory(load_config(assignments=[*settings, "model.device=cuda"])))
    assert (found.verdict, found.text) == ("warning", "KV pools of 3 workers of this machine: 3 GiB; 4 GiB of memory")


def test_router_that_serve_would_start_itself_is_not_missed():
    assert list(doctor_checks.check_peers(load_config())) == []


def test_port_in_use_is_named_with_its_setting(listener):
    found = list(doctor_checks.check_ports(load_config(assignments=[f"router.port={listener}"])))
    assert found[0].verdict == "warning"
    assert f"router.port 127.0.0.1:{listener} cannot be bound" in found[0].text


def test_peer_that_listens_is_told_from_one_that_does_not(listener):
    address = f"worker.router_addresses=tcp://127.0.0.1:{listener}"
    assert verdicts(doctor_checks.check_peers, address)["peers"].verdict == "ok"
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    assert (
        verdicts(doctor_checks.check_peers, f"worker.router_addresses=tcp://127.0.0.1:{closed}")["peers"].verdict == "warning"
    )


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "ok"),
        (["worker.control_address=tcp://*:5571"], "failure"),
        (["worker.control_address=tcp://*:5571", "security.insecure=true"], "warning"),
        (["worker.control_address=tcp://*:5571", "security.cluster_key=0123456789abcdef0123456789abcdef"], "ok"),
        (["security.cluster_key=short"], "failure"),
    ],
)
def test_open_sockets_need_a_key(settings, verdict, monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    assert verdicts(doctor_checks.check_security, *settings)["security"].verdict == verdict


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "ok"),
        (["worker.control_address=tcp://10.0.0.1:5571"], "warning"),
        (["worker.router_addresses=tcp://router:5570"], "warning"),
        (["worker.control_address=tcp://*:5571", "security.cluster_key=0123456789abcdef0123456789abcdef"], "warning"),
    ],
)
def test_ucx_beyond_loopback_is_reported_whatever_key_there_is(settings, verdict, monkeypatch):
    for variable in ("KVFERRY_CLUSTER_KEY", "UCX_NET_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    found = verdicts(doctor_checks.check_security, "connector.transports=nixl,tcp", *settings)
    assert found["security of nixl"].verdict == verdict


@pytest.mark.parametrize(("devices", "verdict"), [("lo", "ok"), ("eth0,mlx5_0:1", "warning")])
def test_ucx_devices_of_the_environment_are_reported(devices, verdict, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    found = verdicts(doctor_checks.check_security, "connector.transports=nixl,tcp")["security of nixl"]
    assert (found.verdict, devices in found.text) == (verdict, True)


def test_without_nixl_nothing_is_said_of_ucx():
    assert "security of nixl" not in verdicts(doctor_checks.check_security)


def test_every_configured_transport_is_looked_at():
    found = verdicts(doctor_checks.check_transports, "connector.transports=shm,nixl,tcp")
    assert set(found) == {"transport shm", "transport nixl", "transport tcp"}


def test_memory_of_another_process_can_be_read_or_the_reason_is_reported():
    reason = doctor_checks.why_memory_of_others_cannot_be_read()
    assert reason is None or "cannot be read" in reason


def test_what_is_not_in_order_says_what_to_do():
    assert [finding for finding in findings_of(load_config()) if finding.verdict != "ok" and not finding.fix] == []


def test_command_shows_findings_and_fails_only_for_failures(monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    good = CliRunner().invoke(cli.app, ["doctor", "--set", "connector.transports=tcp"])
    assert good.exit_code == 0, good.output
    assert "transport tcp: needs nothing but the network" in good.stdout
    bad = CliRunner().invoke(cli.app, ["doctor", "--set", "security.cluster_key=short"])
    assert bad.exit_code == 1
    assert "FAIL  security" in bad.stdout
    assert "→ kvferry keygen" in bad.stdout


def test_huge_pages_that_are_missing_are_as_bad_as_the_wish_for_them_is_strong(monkeypatch):
    monkeypatch.setattr(doctor_checks, "huge_page_stock", lambda: HugePageStock(2 << 20, 8, 4))
    sizes = [f"cache.memory_bytes={16 << 20}", f"kvstore.memory_bytes={8 << 20}"]
    assert list(doctor_checks.check_huge_pages(load_config(assignments=sizes))) == []
    wishes = ["cache.huge_pages=always", "kvstore.huge_pages=always"]
    pool, store = doctor_checks.check_huge_pages(load_config(assignments=[*sizes, *wishes]))
    assert (pool.verdict, store.verdict) == ("failure", "ok")
    assert pool.text == "cache.huge_pages = always: 16 pages of 2048 kB are needed, 4 of 8 are free"
    (wish,) = doctor_checks.check_huge_pages(load_config(assignments=[*sizes, "cache.huge_pages=auto"]))
    assert wish.verdict == "warning"


def test_a_pool_in_huge_pages_counts_against_no_other_memory(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    monkeypatch.setattr(doctor_checks, "huge_page_stock", lambda: HugePageStock(2 << 20, 4096, 4096))
    settings = [f"cache.memory_bytes={2 << 30}", "cache.huge_pages=always"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "ok"


def test_a_collector_of_traces_is_looked_for_if_one_is_set(listener):
    assert list(doctor_checks.check_tracing(load_config())) == []
    library, found = doctor_checks.check_tracing(load_config(assignments=[f"tracing.endpoint=http://127.0.0.1:{listener}"]))
    assert (library.verdict, found.verdict) == ("ok", "ok")
    *_, missing = doctor_checks.check_tracing(load_config(assignments=["tracing.endpoint=http://127.0.0.1:9"]))
    assert missing.verdict == "warning"
