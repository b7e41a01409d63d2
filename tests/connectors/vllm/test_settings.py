from types import SimpleNamespace

import pytest

from connectors.vllm.peer_rules import PeerRules
from connectors.vllm.settings import read_keys, read_settings
from core.errors import ConfigError

KEY = "k" * 32


def test_keys_of_others_are_ignored():
    assert read_settings({"backends": ["UCX"], "kvferry.lease_s": 7.5}).lease_s == 7.5


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kvferry.transport": ["tcp"]}, "kvferry.transport: no such setting"),
        ({"kvferry.lease_s": "long"}, "kvferry.lease_s"),
        ({"kvferry.lease_s": 0}, "kvferry.lease_s"),
        ({"kvferry.port": 70000}, "kvferry.port"),
        ({"kvferry.kv_verify": "never"}, "kvferry.kv_verify: .* allowed: auto, identity, digest"),
        ({"kvferry.kv_cache_layout": "NHD"}, "kvferry.kv_cache_layout: .* allowed: BLHNC, LBHNC"),
        ({"kvferry.transports": ["tcp", "tpc"]}, r"kvferry.transports\[1\]: .* allowed: shm, nixl, tcp"),
        ({"kvferry.transports": []}, "kvferry.transports"),
        ({"kvferry.transports": ["tcp", "tcp"]}, "kvferry.transports: .* twice"),
        ({"kvferry.peers": ["10.0.0.0/33"]}, "kvferry.peers: '10.0.0.0/33'"),
        ({"kvferry.lease_s": float("inf")}, "kvferry.lease_s"),
        ({"kvferry.lease_max_s": 1e300}, "kvferry.lease_max_s"),
        ({"kvferry.lease_s": float("nan")}, "kvferry.lease_s"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(config, message):
    with pytest.raises(ConfigError, match=message):
        read_settings(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lease_s": 3}, "kvferry.lease_renew_interval_s = 5 must be below kvferry.lease_s = 3"),
        ({"lease_renew_interval_s": 60}, "kvferry.lease_renew_interval_s = 60 must be below kvferry.lease_s = 30"),
        ({"lease_max_s": 10}, "kvferry.lease_s = 30 must be at most kvferry.lease_max_s = 10"),
        ({"transport_retry_s": 100}, "kvferry.transport_retry_s = 100 must be at most kvferry.transport_retry_max_s = 60"),
    ],
)
def test_durations_that_contradict_each_other_are_refused_with_both_values(config, message):
    with pytest.raises(ConfigError, match=message):
        read_settings({f"kvferry.{name}": value for name, value in config.items()})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_a_host_that_stands_for_all_addresses_is_refused(host):
    with pytest.raises(ConfigError, match=r"kvferry\.host: peers cannot connect"):
        read_settings({"kvferry.host": host, "kvferry.insecure": True})


@pytest.mark.parametrize("host", ["[::1]", "node-1:7000", "127.0.0.1:7000", "10.0.0.1;evil.example", "tcp://node-1", "a b"])
def test_a_host_that_is_no_name_and_no_address_is_refused(host):
    with pytest.raises(ConfigError, match=r"kvferry\.host: .* neither a host name nor an IP address"):
        read_settings({"kvferry.host": host})


@pytest.mark.parametrize("host", ["node-1", "p-0.llm.svc", "10.1.2.3", "fd00::1", "fe80::1%eth0"])
def test_names_and_addresses_are_hosts(host):
    assert read_settings({"kvferry.host": host}).bind_host(has_key=True, own_address="") == host


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST"])
@pytest.mark.parametrize("peers", [{}, {"kvferry.peers": ["localhost"]}])
@pytest.mark.parametrize("has_key", [False, True])
def test_peers_allow_an_engine_on_localhost(host, peers, has_key):
    bound = read_settings({"kvferry.host": host}).bind_host(has_key, own_address="10.0.0.9")
    assert read_settings(peers).peer_rules(has_key).refusal(f"tcp://{bound}:7000") is None


@pytest.mark.parametrize("host", ["10.1.2.3", "127.evil.example"])
def test_without_a_key_only_loopback_is_bound(host):
    settings = read_settings({"kvferry.host": host})
    with pytest.raises(ConfigError, match=r"kvferry.host: .* cluster key"):
        settings.bind_host(has_key=False, own_address="10.0.0.9")
    assert settings.bind_host(has_key=True, own_address="10.0.0.9") == host


def test_ranks_and_engines_of_one_host_have_ports_of_their_own():
    """vLLM lets engines of a dense model be independent: each has rank 0, and only the index tells them apart."""
    settings = read_settings({"kvferry.port": 7000})
    engines = [SimpleNamespace(data_parallel_rank=0, data_parallel_index=index, tensor_parallel_size=2) for index in range(3)]
    assert [settings.port_of(rank, engine) for engine in engines for rank in range(2)] == list(range(7000, 7006))
    assert read_settings({}).port_of(1, engines[1]) == 0


def test_a_port_beyond_the_last_one_is_refused_by_the_setting():
    engine = SimpleNamespace(data_parallel_rank=0, data_parallel_index=1, tensor_parallel_size=2)
    assert read_settings({"kvferry.port": 65532}).port_of(1, engine) == 65535
    with pytest.raises(ConfigError, match=r"kvferry\.port: 65533 leaves no port for rank 1"):
        read_settings({"kvferry.port": 65533}).port_of(1, engine)


def test_without_a_host_a_key_decides():
    settings = read_settings({})
    assert settings.bind_host(has_key=False, own_address="10.0.0.9") == "127.0.0.1"
    assert settings.bind_host(has_key=True, own_address="10.0.0.9") == "10.0.0.9"


def test_insecure_must_be_said():
    assert read_settings({"kvferry.host": "10.1.2.3", "kvferry.insecure": True}).bind_host(False, "") == "10.1.2.3"


def test_the_key_comes_from_a_file_or_from_the_environment(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    from_file = read_keys(read_settings({"kvferry.cluster_key_file": str(path)}), {})
    assert from_file is not None
    assert from_file == read_keys(read_settings({}), {"KVFERRY_CLUSTER_KEY": KEY})
    assert from_file == read_keys(read_settings({}), {"KVFERRY_CLUSTER_KEY_FILE": str(path)})
    assert read_keys(read_settings({}), {}) is None


@pytest.mark.parametrize("content", [None, "", "short"])
def test_a_key_file_that_gives_no_key_is_refused(tmp_path, content):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"kvferry\.cluster_key_file"):
        read_keys(read_settings({"kvferry.cluster_key_file": str(path)}), {})


@pytest.mark.parametrize(
    ("allowed", "address", "is_allowed"),
    [
        (("10.0.0.0/8",), "tcp://10.2.3.4:7000", True),
        (("10.0.0.0/8",), "tcp://11.2.3.4:7000", False),
        (("10.0.0.0/8",), "tcp://[::ffff:10.2.3.4]:7000", False),
        (("10.2.3.4",), "tcp://10.2.3.4:7000", True),
        (("fd00::/8",), "tcp://[fd00::1]:7000", True),
        (("node-1",), "tcp://NODE-1:7000", True),
        (("node-1",), "tcp://node-11:7000", False),
        (("*.llm.svc",), "tcp://p-0.llm.svc:7000", True),
        (("*.llm.svc",), "tcp://llm.svc.evil.example:7000", False),
        (("*",), "tcp://anything.example:7000", True),
        (("*",), "ipc:///tmp/socket", False),
        (("*",), "tcp://host:0", False),
        (("*",), "tcp://host", False),
        ((), "tcp://127.0.0.1:7000", False),
    ],
)
def test_only_allowed_peers_are_connected_to(allowed, address, is_allowed):
    assert (PeerRules(allowed).refusal(address) is None) == is_allowed


def test_without_a_key_only_loopback_peers_are_allowed():
    rules = read_settings({}).peer_rules(has_key=False)
    assert rules.refusal("tcp://127.0.0.1:1234") is None
    assert "kvferry.peers" in str(rules.refusal("tcp://10.0.0.1:1234"))
    with_key = read_settings({}).peer_rules(has_key=True)
    assert with_key.refusal("tcp://10.0.0.1:1234") is None
    assert with_key.refusal("tcp://169.254.169.254:80") is not None
    assert with_key.refusal("tcp://8.8.8.8:80") is not None


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:" + 5000 * "9",
        "tcp://127.0.0.1:" + 5000 * "0",
        "tcp://[::1%lo]:0;[2001:db8::1]:80",
        "tcp://[::1%;2001:db8::1]:80",
        "tcp://10.0.0.1;a.example.org:80",
        "tcp://[::1%\0]:80",
        "tcp://127.0.0.1\n:80",
    ],
    ids=["long port", "many zeros", "source and peer", "source in a zone", "source and name", "zero byte", "line end"],
)
def test_what_zeromq_might_read_as_another_address_is_refused(address):
    assert PeerRules(["*"]).refusal(address) is not None
    assert PeerRules(["127.0.0.0/8", "::1/128", "*.example.org"]).refusal(address) is not None


@pytest.mark.parametrize("entry", ["", "10.0.0.0/99", "a*b"])
def test_an_entry_that_is_no_name_and_no_network_is_refused(entry):
    with pytest.raises(ConfigError, match=r"kvferry\.peers"):
        PeerRules((entry,))
