"""No process opens a socket of the cluster to other machines without protection, or starts with a port that is in use."""

import pytest
import typer

from core.config import load_config
from core.errors import ConfigError
from kvferry import cli
from kvferry.__main__ import PROCESSES
from kvferry.roles import check_exposure, run_agent, run_role

KEY = "security.cluster_key=0123456789abcdef0123456789abcdef"
EXPOSED = {
    "router": "router.worker_address=tcp://0.0.0.0:5570",
    "encode": "worker.control_address=tcp://0.0.0.0:5571",
    "prefill": "worker.control_address=tcp://*:5571",
    "kvstore": "kvstore.bind_address=tcp://10.0.0.1:5580",
}


@pytest.fixture(autouse=True)
def no_key_of_this_machine(monkeypatch):
    monkeypatch.delenv("KVFERRY_CLUSTER_KEY", raising=False)


@pytest.mark.parametrize(("role", "setting"), EXPOSED.items())
def test_refuses_to_be_reached_by_others_without_a_key(role, setting):
    with pytest.raises(ConfigError, match=r"can be reached from other machines.*keygen.*--insecure") as caught:
        check_exposure(role, load_config(assignments=[setting]))
    assert caught.value.param == setting.partition("=")[0]


@pytest.mark.parametrize(("role", "setting"), EXPOSED.items())
@pytest.mark.parametrize("permission", [KEY, "security.insecure=true"])
def test_a_key_or_the_word_for_it_permits_it(role, setting, permission):
    check_exposure(role, load_config(assignments=[setting, permission]))


@pytest.mark.parametrize("role", ["router", "encode", "prefill", "decode", "aggregated", "kvstore"])
def test_defaults_are_for_this_machine(role):
    check_exposure(role, load_config())


@pytest.mark.parametrize("role", ["router", "decode", "aggregated"])
def test_what_a_role_does_not_bind_is_no_concern_of_it(role):
    check_exposure(role, load_config(assignments=[EXPOSED["prefill"]]))


@pytest.mark.parametrize("setting", ["worker.kv_events_address", "worker.kv_events_replay_address"])
def test_no_key_protects_the_stream_of_kv_events(setting):
    settings = [KEY, "cache.kv_events=true", f"{setting}=tcp://*:5590"]
    with pytest.raises(ConfigError, match=rf"{setting}.*no authentication"):
        check_exposure("decode", load_config(assignments=settings))
    check_exposure("decode", load_config(assignments=[*settings, "security.insecure=true"]))
    check_exposure("decode", load_config(assignments=[settings[0], settings[2]]))  # off


@pytest.mark.parametrize("permission", [KEY, "security.insecure=true", "connector.transports=shm,tcp"])
def test_decode_worker_does_not_open_ucx_to_other_machines_unasked(permission):
    settings = ["connector.transports=nixl,tcp", "worker.router_addresses=tcp://router:5570"]
    with pytest.raises(ConfigError, match=r"worker\.router_addresses.*nixl.*--insecure"):
        check_exposure("decode", load_config(assignments=settings))
    check_exposure("decode", load_config(assignments=[*settings, permission]))
    check_exposure("decode", load_config(assignments=settings[:1]))


@pytest.mark.parametrize("setting", ["connector.peer_prefixes=true", "worker.can_switch_role=true"])
@pytest.mark.parametrize("role", ["decode", "aggregated"])
def test_a_worker_that_others_read_from_is_protected_whatever_its_role(role, setting):
    settings = [setting, EXPOSED["prefill"]]
    with pytest.raises(ConfigError, match=r"can be reached from other machines"):
        check_exposure(role, load_config(assignments=settings))
    check_exposure(role, load_config(assignments=[*settings, KEY]))


def test_every_process_of_a_cluster_leaves_at_a_signal_from_its_first_line():
    commands = typer.main.get_command(cli.app).commands
    children = {name for name, command in commands.items() if any(each.name == "ready_fd" for each in command.params)}
    assert children | {"serve"} == set(PROCESSES)


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "127.0.0.1:8000", "http://h:99999", " http://h:1"])
def test_agent_refuses_what_is_no_address_of_a_server(url):
    with pytest.raises(ConfigError, match=r"^agent\.engine = .*; give http://HOST:PORT$"):
        run_agent("decode", load_config(assignments=[f"agent.engine={url}"]), None, None)


@pytest.mark.parametrize(
    ("role", "setting", "value"),
    [
        ("kvstore", "kvstore.bind_address", "tcp://127.0.0.1:{}"),
        ("kvstore", "kvstore.ops_port", "{}"),
        ("agent", "worker.ops_port", "{}"),
    ],
)
def test_a_port_in_use_is_refused_by_its_setting_with_the_fix(role, setting, value, listener):
    config = load_config(assignments=["kvstore.bind_address=tcp://127.0.0.1:0", f"{setting}={value.format(listener)}"])
    said = rf"^{setting} = {listener}: cannot listen on .*: Address already in use; stop what listens there, or choose another"
    run, started_as = (run_agent, "decode") if role == "agent" else (run_role, role)
    with pytest.raises(ConfigError, match=said):
        run(started_as, config, None, None)
