"""The doctor finds what is wrong, says what to do, and leaves with the right exit code."""

import json
import socket
import struct

import pytest
from typer.testing import CliRunner

from core.config import load_config
from core.errors import ConfigError
from core.memory_file import HugePageStock
from kvferry import cli, doctor_checks, doctor_transports, preflight, reserved_memory
from kvferry.doctor import findings_of
from kvferry.doctor_transports import check_transports
from tests.support.certificates import self_signed

OF_ANY_PROCESS = "worker.router_addresses=tcp://router:5570"  # not for serve, and of no worker that is known by its name


def verdicts(check, *settings):
    return {finding.subject: finding for finding in check(load_config(assignments=settings))}


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found.getsockname()[1]


def test_missing_compiled_code_is_slow_and_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(doctor_checks, "missing_libraries", lambda: ["_hash_chain", "attention._paged_decode"])
    found = verdicts(doctor_checks.check_compiled_code)["compiled code"]
    assert (found.verdict, found.fix) == ("warning", "install gcc, then kvferry again")
    assert "_hash_chain, attention._paged_decode" in found.text
    monkeypatch.setattr(doctor_checks, "missing_libraries", list)
    assert verdicts(doctor_checks.check_compiled_code)["compiled code"].verdict == "ok"


def test_model_that_is_not_fetched_comes_with_the_command_to_fetch_it(tmp_path):
    found = verdicts(doctor_checks.check_model, f"model.cache_dir={tmp_path}")["model"]
    assert (found.verdict, found.fix) == ("warning", "kvferry models smollm2-135m")


TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    (folder / "tokenizer.json").touch()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


def test_model_in_a_folder_is_found(model_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(model_folder.parent))
    names = [f"model.name={model_folder}", "model.name=~/m"]
    assert [verdicts(doctor_checks.check_model, name)["model"].verdict for name in names] == ["ok", "ok"]
    (model_folder / "config.json").unlink()
    found = [verdicts(doctor_checks.check_model, name)["model"] for name in names]
    assert [(one.verdict, one.text.endswith("m holds no config.json")) for one in found] == [("failure", True)] * 2


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("config.json", b"{}", "model_type"),
        ("tokenizer.json", None, "holds no tokenizer.json"),
        ("model.safetensors", None, "lacks safetensors weights"),
        ("model.safetensors", b"cut", "cannot be read as a safetensors file"),
    ],
)
def test_model_that_a_worker_would_refuse_is_a_failure_except_for_other_processes(name, content, text, model_folder):
    (model_folder / name).unlink() if content is None else (model_folder / name).write_bytes(content)
    found = verdicts(doctor_checks.check_model, f"model.name={model_folder}")["model"]
    assert (found.verdict, text in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_model, f"model.name={model_folder}", OF_ANY_PROCESS)["model"].verdict == "warning"


def test_settings_that_do_not_fit_the_model_are_a_failure(model_folder):
    found = verdicts(doctor_checks.check_model, f"model.name={model_folder}", "model.max_model_len=65")["model"]
    assert (found.verdict, "model.max_model_len = 65" in found.text) == ("failure", True)


def test_model_of_vllm_is_not_compared_with_what_our_engine_computes(model_folder):
    (model_folder / "config.json").write_text('{"model_type": "other"}')
    settings = [f"model.name={model_folder}", "local.engine=vllm"]
    assert verdicts(doctor_checks.check_model, *settings)["model"].verdict == "ok"


def test_model_of_no_kind_is_refused_as_serve_refuses_it():
    found = verdicts(doctor_checks.check_model, "model.name=llama")["model"]
    assert (found.verdict, "is no alias" in found.text) == ("failure", True)


@pytest.mark.parametrize("name", ["acme/tiny", "acme/tiny@main", "acme/tiny@v1"])
def test_model_of_the_hub_is_found_where_it_is_stored(name, tmp_path):
    names = [f"model.cache_dir={tmp_path}", f"model.name={name}"]
    snapshot = hub_snapshot(tmp_path, name.partition("@")[2] or "main")
    assert verdicts(doctor_checks.check_model, *names)["model"].verdict == "warning", "it has no weights yet"
    (snapshot / "model.safetensors").touch()
    assert verdicts(doctor_checks.check_model, *names)["model"].verdict == "ok"
    assert verdicts(doctor_checks.check_model, *names, "model.name=acme/tiny@v2")["model"].verdict == "warning"


def hub_snapshot(cache, revision):
    """Make a folder of the hub's library for one revision of a model, as it is without weights."""
    folder, commit = cache / "huggingface" / "models--acme--tiny", "0123456789abcdef0123456789abcdef01234567"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / revision).write_text(commit)
    return snapshot


def test_pool_larger_than_the_memory_limit_is_a_failure(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 1 << 30)
    first = next(doctor_checks.check_memory(load_config(assignments=[f"cache.memory_bytes={2 << 30}"])))
    text = "2 KV pools of 2 GiB: 4 GiB, kernels: up to 128 MiB; 1 GiB of memory"
    assert (first.verdict, first.text) == ("failure", text)


def test_pools_of_all_workers_of_a_host_count(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 30)
    settings = [f"cache.memory_bytes={1 << 30}", "worker.workers_on_host=4"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"


def test_both_pools_of_a_served_cluster_count_and_one_of_a_single_worker(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 3 << 29)
    served, single = load_config(), load_config(assignments=["worker.engine_id=p0"])
    assert next(doctor_checks.check_memory(served)).verdict == "failure"
    text = "1 KV pool of 1 GiB: 1 GiB, kernels: up to 64 MiB; 1.5 GiB of memory"
    assert next(doctor_checks.check_memory(single)).text == text


def test_kernels_that_every_worker_on_a_processor_may_keep_count_too(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 4 << 30)
    settings = [f"cache.memory_bytes={1 << 30}", "worker.workers_on_host=3", "worker.kernel_cache_entries=400"]
    assert next(doctor_checks.check_memory(load_config(assignments=settings))).verdict == "failure"
    found = next(doctor_checks.check_memory(load_config(assignments=[*settings, "model.device=cuda"])))
    assert (found.verdict, found.text) == ("ok", "nothing beside the model; 4 GiB of memory")


def test_stores_of_workers_count_as_serve_counts_them(monkeypatch):
    monkeypatch.setattr(doctor_checks, "memory_limit_bytes", lambda: 8 << 30)
    found = next(doctor_checks.check_memory(load_config(assignments=["connector.name=store", "kvstore.memory_bytes=4GiB"])))
    assert (found.verdict, "kvstore.memory_bytes: 8 GiB" in found.text) == ("failure", True)


def test_router_that_serve_would_start_itself_is_not_missed():
    assert list(doctor_checks.check_peers(load_config())) == []


def test_port_in_use_is_named_with_its_setting(listener):
    found = list(doctor_checks.check_ports(load_config(assignments=[f"router.port={listener}"])))
    assert found[0].verdict == "warning"
    assert f"router.port 127.0.0.1:{listener} cannot be bound" in found[0].text


def test_every_address_that_serve_would_try_is_tried(monkeypatch):
    monkeypatch.setattr(doctor_checks, "why_not_bindable", lambda _host, port: None if port else "no such host")
    settings = ["router.processes=3", "router.ops_port=9100", "kvstore.ops_port=9200", "kvstore.bind_address=tcp://*:9201"]
    events = ["cache.kv_events=true", "worker.kv_events_address=tcp://*:9301", "worker.kv_events_replay_address=tcp://*:9302"]
    found = list(doctor_checks.check_ports(load_config(assignments=[*settings, *events])))
    free = [int(one.text.removesuffix(" is free").rpartition(":")[2]) for one in found if one.verdict == "ok"]
    assert sorted(free) == [5570, 5571, 5572, 8000, 9100, 9101, 9102, 9200, 9201, 9301, 9302]
    assert [one.text for one in found if one.verdict == "warning"][-1].endswith("cannot be bound: no such host")


def test_a_port_that_several_workers_would_share_is_refused_as_serve_refuses_it():
    first = next(doctor_checks.check_ports(load_config(assignments=["worker.data_port=9400", "local.num_prefill=2"])))
    assert (first.verdict, "2 workers of this machine cannot share one port" in first.text) == ("failure", True)


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "ok"),
        (["connector.name=nosuch"], "failure"),
        (["connector.name=nowhere:make"], "failure"),
        (["connector.name=nowhere:make", "worker.engine_id=p0"], "failure"),
        (["connector.name=nowhere:make", OF_ANY_PROCESS], "warning"),
        (["ec_connector.name=nosuch"], "failure"),
    ],
)
def test_connectors_are_looked_for(settings, verdict):
    assert verdicts(doctor_checks.check_connector, *settings)["connector"].verdict == verdict


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["connector.name=nosuch"], "vLLM engines hand off by p2p"),
        (["local.vllm_command=/nowhere/vllm"], "no such command"),
        (["local.vllm_command=sh", "local.vllm_arguments=--port 1"], "a local cluster chooses it"),
    ],
)
def test_what_is_wrong_for_vllm_is_told_as_serve_tells_it(settings, text):
    settings = ["local.engine=vllm", *settings]
    found = verdicts(doctor_checks.check_engine, *settings)["engine"]
    assert (found.verdict, text in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_connector, *settings) == {}


def test_gpu_that_is_required_is_looked_for(monkeypatch):
    monkeypatch.setattr(preflight, "why_no_cuda", lambda: "there is no driver")
    assert verdicts(doctor_checks.check_engine)["engine"].verdict == "ok"
    found = verdicts(doctor_checks.check_engine, "model.device=cuda")["engine"]
    assert (found.verdict, "there is no driver" in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_engine, "model.device=cuda", OF_ANY_PROCESS)["engine"].verdict == "warning"


def test_folder_of_the_disk_tier_is_tried_and_not_made(tmp_path):
    (tmp_path / "file").touch()
    store = ["connector.name=store", "local.kvstore=true"]
    assert verdicts(doctor_checks.check_disk, *store, f"kvstore.disk_path={tmp_path / 'a' / 'b'}") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    wrong = [*store, f"kvstore.disk_path={tmp_path / 'file' / 'b'}"]
    assert verdicts(doctor_checks.check_disk, *wrong)["disk"].verdict == "failure"
    assert verdicts(doctor_checks.check_disk, *wrong, OF_ANY_PROCESS)["disk"].verdict == "warning"


def test_folder_that_stores_of_several_workers_would_share_is_refused(tmp_path):
    found = verdicts(doctor_checks.check_disk, "connector.name=store", f"kvstore.disk_path={tmp_path}")["disk"]
    assert (found.verdict, "2 workers have a store each" in found.text) == ("failure", True)


def test_certificate_of_the_router_is_loaded(tmp_path):
    assert verdicts(doctor_checks.check_certificate) == {}
    cert, key = self_signed(tmp_path)
    settings = [f"router.tls_cert={cert}", f"router.tls_key={key}"]
    assert verdicts(doctor_checks.check_certificate, *settings)["certificate"].verdict == "ok"
    cert.unlink()
    found = verdicts(doctor_checks.check_certificate, *settings)["certificate"]
    assert (found.verdict, "cannot be loaded" in found.text) == ("failure", True)
    assert verdicts(doctor_checks.check_certificate, *settings, OF_ANY_PROCESS)["certificate"].verdict == "warning"


@pytest.mark.parametrize("flag", ["--url", "--engine"])
@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "127.0.0.1:8000", "http://[::1"])
def test_what_is_no_address_is_refused(flag, url):
    result = CliRunner().invoke(cli.app, ["doctor", flag, url])
    assert isinstance(result.exception, ConfigError)
    assert result.exception.message.startswith(f"{flag} = {url!r}: ")


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


def test_every_transport_in_use_is_looked_at():
    assert set(verdicts(check_transports, "connector.transports=shm,nixl,tcp")) == {
        "transport shm",
        "transport nixl",
        "transport tcp",
    }
    assert verdicts(check_transports, "connector.name=store", "connector.transports=nixl") == {}
    assert set(verdicts(check_transports, "connector.name=store", "ec_connector.name=p2p", "ec_connector.transports=tcp")) == {
        "transport tcp"
    }


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        (["connector.transports=nixl"], "failure"),
        (["connector.transports=nixl,tcp"], "warning"),
        (["connector.transports=shm,nixl"], "failure"),
        (["connector.transports=nixl,tcp", "ec_connector.name=p2p", "ec_connector.transports=nixl"], "failure"),
    ],
)
def test_transport_that_does_not_work_is_a_failure_where_none_is_left(settings, verdict, monkeypatch):
    monkeypatch.setattr(doctor_transports, "installed_module", lambda: None)
    monkeypatch.setattr(doctor_transports.ShmTransport, "unavailable_reason", lambda _: "/proc is not mounted")
    assert verdicts(check_transports, *settings)["transport nixl"].verdict == verdict


def test_memory_of_another_process_can_be_read_or_the_reason_is_reported():
    reason = doctor_transports.why_memory_of_others_cannot_be_read()
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


def test_a_collector_of_traces_is_looked_for_if_one_is_set(listener):
    assert list(doctor_checks.check_tracing(load_config())) == []
    library, found = doctor_checks.check_tracing(load_config(assignments=[f"tracing.endpoint=http://127.0.0.1:{listener}"]))
    assert (library.verdict, found.verdict) == ("ok", "ok")
    *_, missing = doctor_checks.check_tracing(load_config(assignments=["tracing.endpoint=http://127.0.0.1:9"]))
    assert missing.verdict == "warning"
