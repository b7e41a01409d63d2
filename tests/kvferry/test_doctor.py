"""The doctor finds what is wrong, says what to do, and leaves with the right exit code."""

import pytest
from typer.testing import CliRunner

from core.config import load_config
from core.errors import ConfigError
from kvferry import cli, doctor_checks, doctor_transports, preflight
from kvferry.doctor import findings_of
from kvferry.doctor_transports import check_transports
from kvferry.listening import BindFailure
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts
from tests.support.certificates import self_signed

ONE_PORT_OF_EVERY_WORKER = ["worker.ops_port=9400", "cache.kv_events=true", "worker.kv_events_address=tcp://127.0.0.1:9400"]


def test_missing_compiled_code_is_slow_and_the_fix_is_named(monkeypatch):
    monkeypatch.setattr(doctor_checks, "missing_libraries", lambda: ["_hash_chain", "attention._paged_decode"])
    found = verdicts(doctor_checks.check_compiled_code)["compiled code"]
    assert (found.verdict, found.fix) == ("warning", "install gcc, then kvferry again")
    assert "missing or older than their sources: _hash_chain, attention._paged_decode" in found.text
    monkeypatch.setattr(doctor_checks, "missing_libraries", list)
    assert verdicts(doctor_checks.check_compiled_code)["compiled code"].verdict == "ok"


def test_router_that_serve_would_start_itself_is_not_missed():
    assert list(doctor_checks.check_peers(load_config())) == []


def test_every_address_that_serve_would_try_is_tried(monkeypatch):
    refusal = BindFailure("no such host", is_of_host=True)
    monkeypatch.setattr(doctor_checks, "why_not_free", lambda _setting, _host, port: None if port else refusal)
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
        (["router.ops_port=8000"], "failure"),
        (["router.ops_port=8000", OF_ANY_PROCESS], "warning"),
        (["worker.ops_port=9400", "worker.data_port=9400", "worker.engine_id=p0"], "warning"),
        ([*ONE_PORT_OF_EVERY_WORKER, "worker.engine_id=p0"], "failure"),
        ([*ONE_PORT_OF_EVERY_WORKER, OF_ANY_PROCESS], "warning"),
    ],
)
def test_a_port_that_two_sockets_of_a_process_would_share_is_no_free_one(settings, verdict):
    found = list(doctor_checks.check_ports(load_config(assignments=settings)))
    assert [one.verdict for one in found if "would both listen on port" in one.text] == [verdict]
    assert len({one.text for one in found}) == len(found)


def test_a_port_that_processes_of_two_machines_share_is_no_mistake():
    settings = ["router.ops_port=9400", "worker.ops_port=9400", "kvstore.ops_port=9400"]
    found = doctor_checks.check_ports(load_config(assignments=settings))
    assert not [one for one in found if "would both" in one.text]


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "ok"),
        (["connector.name=nosuch"], "failure"),
        (["connector.transports=[]"], "failure"),
        (["connector.transports=[]", "local.aggregated=true"], "ok"),
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


@pytest.mark.parametrize(
    ("check", "setting", "said"),
    [
        (doctor_checks.check_peers, "kvstore.address=tcp://a..b:5580", "correct the host"),
        (doctor_checks.check_peers, "worker.router_addresses=tcp://ü..b:5570", "correct the host"),
        (doctor_checks.check_tracing, "tracing.endpoint=http://a..b:4318", "correct the host"),
        (doctor_checks.check_ports, "router.host=ü..b", "set router.host to an address of this machine"),
        (doctor_checks.check_ports, "worker.ops_host=" + "ü" * 60, "set worker.ops_host to an address of this machine"),
        (
            doctor_checks.check_ports,
            "worker.control_address=tcp://ü..b:5571",
            "set worker.control_address to an address of this",
        ),
    ],
)
def test_a_name_that_no_machine_can_have_is_told_like_any_other(check, setting, said):
    found = [one for one in check(load_config(assignments=[setting])) if one.verdict == "warning" and said in one.fix]
    assert len(found) == 1


NIXL_EMBEDDINGS = ("ec_connector.name=p2p", "ec_connector.transports=nixl")


def test_every_transport_in_use_is_looked_at():
    assert set(verdicts(check_transports, "connector.transports=shm,nixl,tcp")) == {
        "transport shm",
        "transport nixl",
        "transport tcp",
    }
    assert verdicts(check_transports, "connector.name=store", "connector.transports=nixl") == {}
    embeddings = ["ec_connector.name=p2p", "ec_connector.transports=tcp"]
    for settings in (["local.num_encode=1"], [OF_ANY_PROCESS]):
        found = verdicts(check_transports, "connector.name=store", *embeddings, *settings)
        assert set(found) == {"transport tcp"}


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        (["connector.transports=nixl"], "failure"),
        (["connector.transports=nixl,tcp"], "warning"),
        (["connector.transports=shm,nixl"], "failure"),
        (["connector.transports=nixl,tcp", *NIXL_EMBEDDINGS, "local.num_encode=1"], "failure"),
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


def test_a_collector_of_traces_is_looked_for_if_one_is_set(listener):
    assert list(doctor_checks.check_tracing(load_config())) == []
    library, found = doctor_checks.check_tracing(load_config(assignments=[f"tracing.endpoint=http://127.0.0.1:{listener}"]))
    assert (library.verdict, found.verdict) == ("ok", "ok")
    *_, missing = doctor_checks.check_tracing(load_config(assignments=["tracing.endpoint=http://127.0.0.1:9"]))
    assert missing.verdict == "warning"
