"""The settings of each router behind one port."""

from __future__ import annotations

import socket

import pytest

from core.config import load_config
from core.config_router import RouterSection
from core.errors import ConfigError
from kvferry import LocalCluster
from kvferry.listening import BindFailure
from kvferry.preflight import check_distinct, check_ports, check_process, check_shared_ports
from kvferry.router_plan import RouterPlan


def sections(**settings):
    plan = RouterPlan(RouterSection(**settings))
    return plan, [plan.section(name) for name in plan.names]


def test_one_process_has_the_settings_as_they_are():
    router = RouterSection(port=8000, max_requests=7)
    plan = RouterPlan(router)
    assert plan.names == ("router",)
    assert plan.section("router") is router


def test_processes_share_the_port_and_nothing_else_that_is_bound():
    plan, found = sections(processes=3, port=8000, worker_address="tcp://[::1]:5570", ops_port=9000)
    assert plan.names == ("router", "router-1", "router-2")
    assert {(section.port, section.shares_port, section.processes) for section in found} == {(8000, True, 1)}
    assert [section.worker_address for section in found] == [f"tcp://[::1]:{port}" for port in (5570, 5571, 5572)]
    assert [section.ops_port for section in found] == [9000, 9001, 9002]
    assert plan.worker_addresses == tuple(section.worker_address for section in found)


def test_each_process_knows_which_one_of_how_many_it_is():
    _, found = sections(processes=3)
    assert [(section.process_number, section.processes_at_port) for section in found] == [(0, 3), (1, 3), (2, 3)]
    assert sections()[1][0].processes_at_port == 1


def test_each_of_several_has_an_operations_port_also_if_none_is_set():
    assert [section.ops_port for section in sections(processes=2)[1]] == [0, 0]


def test_limits_of_all_are_divided_and_those_of_a_client_are_not():
    _, found = sections(processes=4, max_requests=10, max_connections=100, max_upload_bytes=40 << 20, max_requests_per_key=2)
    assert {(one.max_requests, one.max_connections, one.max_requests_per_key) for one in found} == {(3, 25, 2)}
    assert {one.max_upload_bytes for one in found} == {12 << 20}, "a body of the largest size still fits"


def test_ports_are_kept_once_they_are_known():
    plan, _ = sections(processes=2, port=0, worker_address="tcp://127.0.0.1:0")
    for number, name in enumerate(plan.names):
        addresses = {"worker_address": f"tcp://127.0.0.1:{7000 + number}", "ops_address": f"http://127.0.0.1:{9000 + number}"}
        plan.pin(name, {"http_address": "http://127.0.0.1:8123", **addresses})
    found = [plan.section(name) for name in plan.names]
    assert [section.port for section in found] == [8123, 8123]
    assert [section.ops_port for section in found] == [9000, 9001]
    assert plan.worker_addresses == ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001")


def test_workers_of_a_local_cluster_connect_to_every_router():
    assignments = ["router.processes=2", "router.worker_address=tcp://127.0.0.1:5590"]
    cluster = LocalCluster(load_config(assignments=assignments))
    addresses = ("tcp://127.0.0.1:5590", "tcp://127.0.0.1:5591")
    assert cluster._worker_config("decode-0").worker.router_addresses == addresses
    assert [cluster._config_of(name).router.worker_address for name in ("router", "router-1")] == list(addresses)


def test_every_port_of_the_processes_is_tried_before_the_start(monkeypatch):
    refusal = BindFailure("in use", is_in_use=True)
    monkeypatch.setattr("kvferry.preflight.why_not_free", lambda _setting, _host, port: refusal if port == 5571 else None)
    config = load_config(assignments=["router.processes=2"])
    with pytest.raises(ConfigError, match="5571"):
        check_process("router", config)


def test_a_router_that_needs_a_key_does_not_start_open(monkeypatch):
    monkeypatch.delenv("KVFERRY_API_KEY", raising=False)
    settings = ["router.requires_api_key=true", "router.port=0", "router.worker_address=tcp://127.0.0.1:0"]
    with pytest.raises(ConfigError, match=r"but there is no key: set \$KVFERRY_API_KEY"):
        check_process("router", load_config(assignments=settings))
    check_process("router", load_config(assignments=[*settings, "router.api_key=k"]))


@pytest.mark.parametrize("key", [" ", ",", " , "])
def test_a_key_of_blanks_ends_the_router_and_no_other_process(key, monkeypatch):
    monkeypatch.setenv("KVFERRY_API_KEY", key)
    config = load_config(assignments=["worker.ops_port=0"])
    with pytest.raises(ConfigError, match=r"router\.api_key has no key in it"):
        check_process("router", config)
    check_process("decode", config)


@pytest.mark.parametrize(
    ("role", "settings", "said"),
    [
        ("router", ["router.port=9100", "router.ops_port=9100"], "router.port and router.ops_port .* port 9100"),
        ("router", ["router.host=0.0.0.0", "router.port=5570"], "router.port and router.worker_address .* port 5570"),
        ("router", ["router.host=localhost", "router.ops_port=8000"], "router.port and router.ops_port .* port 8000"),
        ("router", ["router.host=", "router.ops_port=8000"], "router.port and router.ops_port .* port 8000"),
        (
            "router",
            ["router.host=0:0:0:0:0:0:0:1", "router.ops_host=::1", "router.ops_port=8000"],
            "router.port and router.ops_port .* port 8000",
        ),
        ("router", ["router.processes=2", "router.ops_port=5571"], "router.ops_port and router.worker_address .* port 5571"),
        ("prefill", ["worker.ops_port=9400", "worker.data_port=9400"], "worker.ops_port and worker.data_port .* port 9400"),
        (
            "prefill",
            ["worker.control_address=tcp://*:9400", "worker.data_port=9400"],
            "worker.data_port and worker.control_address .* port 9400",
        ),
    ],
)
def test_one_port_for_two_sockets_is_refused_with_both_settings(role, settings, said, monkeypatch):
    monkeypatch.setattr("kvferry.preflight.why_not_free", lambda *_: None)
    with pytest.raises(ConfigError, match=said) as refusal:
        check_process(role, load_config(assignments=["security.insecure=true", *settings]))
    assert ("router.processes" in refusal.value.message) == (role == "router")


@pytest.mark.parametrize("setting", ["worker.data_port=18998", "worker.control_address=tcp://127.0.0.1:18998"])
def test_ports_for_readers_are_none_of_a_worker_that_nobody_reads_from(setting):
    settings = [setting, "worker.ops_port=18998"]
    check_process("decode", load_config(assignments=settings))
    with pytest.raises(ConfigError, match=r"would both listen on port 18998"):
        check_process("decode", load_config(assignments=[*settings, "connector.peer_prefixes=true"]))


@pytest.mark.parametrize("role", ["router", "decode"])
def test_any_free_port_may_be_asked_for_twice_and_one_port_of_two_hosts(role):
    settings = ["router.port=0", "router.ops_port=0", "router.worker_address=tcp://127.0.0.1:0", "worker.ops_port=0"]
    check_process(role, load_config(assignments=settings))
    check_distinct([("a", ("127.0.0.1", 9100)), ("b", ("127.0.0.2", 9100))])


@pytest.mark.parametrize(
    ("role", "settings", "to_change"),
    [
        ("router", ["router.host=no-such-host.invalid"], "router.host"),
        ("router", ["router.ops_host=lo", "router.ops_port=0"], "router.ops_host"),
        ("prefill", ["worker.ops_host=lo"], "worker.ops_host"),
        ("prefill", ["worker.ops_host=ü..b"], "worker.ops_host"),
        ("prefill", ["worker.control_address=tcp://203.0.113.1:0", "worker.data_port=18998"], "worker.control_address"),
        ("kvstore", ["kvstore.bind_address=tcp://no-such-host.invalid:0"], "kvstore.bind_address"),
        ("kvstore", ["kvstore.bind_address=tcp://127.0.0.1:0", "kvstore.ops_host=[::1]"], "kvstore.ops_host"),
    ],
)
def test_a_host_at_which_nothing_can_listen_is_refused_by_its_own_setting(role, settings, to_change):
    free = ["router.port=0", "router.worker_address=tcp://127.0.0.1:0", "security.insecure=true"]
    with pytest.raises(ConfigError, match=rf"; set {to_change} to an address of this machine$") as refusal:
        check_process(role, load_config(assignments=[*free, *settings]))
    assert refusal.value.param == to_change


def test_a_host_that_no_worker_of_a_local_cluster_could_have_is_refused():
    with pytest.raises(ConfigError, match=r"set worker\.ops_host to an address of this machine$"):
        check_ports(load_config(assignments=["router.port=0", "worker.ops_host=lo"]), {})


def test_only_workers_that_have_kv_count_for_the_port_of_its_events():
    with socket.create_server(("127.0.0.1", 0)) as holder:
        events = f"worker.kv_events_address=tcp://127.0.0.1:{holder.getsockname()[1]}"
        config = load_config(assignments=["cache.kv_events=true", events])
        check_process("encode", config)
        with pytest.raises(ConfigError, match=r"worker\.kv_events_address = .* Address already in use"):
            check_process("decode", config)
    check_shared_ports(config, {"encode-0": ("encode", config), "aggregated-0": ("aggregated", config)})
    with pytest.raises(ConfigError, match="2 workers of this machine cannot share one port"):
        check_shared_ports(config, {"prefill-0": ("prefill", config), "decode-0": ("decode", config)})
