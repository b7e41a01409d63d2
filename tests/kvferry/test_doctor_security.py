"""The doctor reports sockets that others can reach, and what protects them."""

from __future__ import annotations

import pytest

from kvferry import doctor_checks
from tests.kvferry.findings import OF_ANY_PROCESS, verdicts


@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "ok"),
        (["worker.control_address=tcp://*:5571"], "failure"),
        (["worker.control_address=tcp://*:5571", "security.insecure=true"], "warning"),
        (["worker.control_address=tcp://*:5571", "security.cluster_key=0123456789abcdef0123456789abcdef"], "ok"),
        (["router.worker_address=tcp://*:5570"], "failure"),
        (["kvstore.bind_address=tcp://*:5572"], "failure"),
        (["kvstore.bind_address=tcp://*:5572", "security.insecure=true"], "warning"),
        (["security.cluster_key=short"], "failure"),
    ],
)
def test_open_sockets_need_a_key(settings, verdict, monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    assert verdicts(doctor_checks.check_security, *settings)["security"].verdict == verdict


@pytest.mark.parametrize("key", ["router.requires_api_key=true", "router.api_key=,"])
@pytest.mark.parametrize(("others", "verdict"), [([], "failure"), ([OF_ANY_PROCESS], "warning")])
def test_an_api_without_the_key_that_it_needs_is_reported(key, others, verdict, monkeypatch):
    monkeypatch.delenv("KVFERRY_API_KEY", raising=False)
    assert verdicts(doctor_checks.check_security, key, *others)["security of the API"].verdict == verdict
    assert "security of the API" not in verdicts(doctor_checks.check_security, *others)


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


@pytest.mark.parametrize("setting", ["kv_events_address", "kv_events_replay_address"])
@pytest.mark.parametrize(
    ("settings", "verdict"),
    [
        ([], "failure"),
        (["security.cluster_key=0123456789abcdef0123456789abcdef"], "failure"),
        (["security.insecure=true"], "warning"),
        ([OF_ANY_PROCESS], "warning"),
    ],
)
def test_kv_events_for_strangers_are_reported_whatever_key_there_is(setting, settings, verdict, monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)
    exposed = [f"worker.{setting}=tcp://*:5557", *settings]
    assert "security of KV events" not in verdicts(doctor_checks.check_security, *exposed), "there are none"
    found = verdicts(doctor_checks.check_security, "cache.kv_events=true", *exposed)["security of KV events"]
    assert (found.verdict, f"worker.{setting}" in found.text) == (verdict, True)


def test_kv_events_on_this_machine_are_not_reported():
    assert "security of KV events" not in verdicts(doctor_checks.check_security, "cache.kv_events=true")
