"""Encode workers in the chart: configured with their connector, reached by the readers, and left out by default."""

import pytest
import yaml

from router.images.hosts import HostRules

pytestmark = pytest.mark.slow

PRESET = "vision"
CONTROL, DATA = 5571, 5572


def config_of(find, role, *sets):
    return yaml.safe_load(find(PRESET, "ConfigMap", role, *sets)["data"]["config.yaml"])


def container_of(find, role, *sets):
    (container,) = find(PRESET, "Deployment", role, *sets)["spec"]["template"]["spec"]["containers"]
    return container


def test_there_is_none_by_default(helm):
    manifests = helm.manifests("cpu-minimal")
    assert "kvferry-encode" not in {item["metadata"]["name"] for item in manifests}
    configs = [item["data"]["config.yaml"] for item in manifests if item["kind"] == "ConfigMap"]
    assert not any("ec_connector" in config for config in configs)


@pytest.mark.parametrize("role", ["encode", "prefill", "decode"])
def test_all_workers_speak_the_same_connector(find, role):
    assert config_of(find, role)["ec_connector"] == {"name": "p2p", "transports": ["tcp"]}
    assert config_of(find, role, "config.ec_connector.lease_s=30")["ec_connector"]["lease_s"] == 30


def test_its_process_is_an_encode_worker_that_readers_reach(find):
    container = container_of(find, "encode")
    assert container["args"][0] == "encode"
    assert container["args"][-4:] == ["--engine-id", "$(POD_NAME)", "--advertise-host", "$(POD_IP)"]
    assert {port["containerPort"] for port in container["ports"]} == {CONTROL, DATA, 9400}
    assert container["startupProbe"]["httpGet"]["path"] == "/started"
    assert container["lifecycle"]["preStop"]["exec"]["command"][:2] == ["kvferry", "drain"]


def test_it_is_given_time_for_its_last_readers(find):
    spec = find(PRESET, "Deployment", "encode", "config.ec_connector.lease_s=90")["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 60 + 90 + 20


@pytest.mark.parametrize("reader", ["prefill", "decode"])
def test_only_readers_reach_its_ports(find, reader):
    ingress = find(PRESET, "NetworkPolicy", "encode")["spec"]["ingress"]
    (peers,) = [rule["from"] for rule in ingress if {"protocol": "TCP", "port": CONTROL} in rule["ports"]]
    assert [peer["podSelector"]["matchExpressions"][0]["values"] for peer in peers] == [["prefill", "decode"]]
    egress = find(PRESET, "NetworkPolicy", reader)["spec"]["egress"]
    targets = [
        peer["podSelector"]["matchExpressions"][0]["values"]
        for rule in egress
        if {"protocol": "TCP", "port": DATA} in rule["ports"]
        for peer in rule["to"]
    ]
    assert ["encode"] in targets


def test_the_router_reaches_hosts_of_images_only_if_some_are_listed(find):
    def ports(preset):
        claim = ("modelCache.kind=existingClaim", "modelCache.existingClaim=models", "modelCache.fetch=false")
        egress = find(preset, "NetworkPolicy", "router", *claim)["spec"]["egress"]
        return {entry["port"] for rule in egress for entry in rule["ports"]}

    assert {80, 443} <= ports(PRESET)
    assert not {80, 443} & ports("cpu-minimal")


def test_a_port_that_the_list_of_image_hosts_names_is_open(find):
    hosts = "config.router.images.allowed_hosts={a.example:8443,b.example:443,10.0.0.0/8,2001:db8::1,c.example:8443}"
    egress = find("cpu-minimal", "NetworkPolicy", "router", hosts)["spec"]["egress"]
    ports = [[entry["port"] for entry in rule.get("ports", ())] for rule in egress]
    assert [each for each in ports if 80 in each] == [[80, 443, 8443]]


def test_addresses_and_networks_of_images_are_open_at_all_ports(find):
    def networks(*sets):
        hosts = "config.router.images.allowed_hosts={203.0.113.7,10.0.0.0/8,[2001:db8::1],2001:db8::/32,a.example:8443}"
        egress = find("cpu-minimal", "NetworkPolicy", "router", hosts, *sets)["spec"]["egress"]
        return [peer["ipBlock"]["cidr"] for rule in egress if "ports" not in rule for peer in rule["to"]]

    assert networks() == ["203.0.113.7/32", "10.0.0.0/8", "2001:db8::1/128", "2001:db8::/32"]
    assert networks("networkPolicy.imageSources=null") == [], "closed"


def test_every_form_of_an_ipv6_address_of_images_is_open(find):
    entries = ("::", "1::", "::1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8", "::ffff:192.0.2.1", "1:2:3:4:5:6:192.0.2.1", "2001:DB8::/32")
    names = ("300.1.1.1", "010.0.0.1", "300.1.1.1:8443")  # to the router, which knows them for no addresses
    HostRules((*entries, *names), "")
    hosts = f"config.router.images.allowed_hosts={{{','.join((*entries, *names))}}}"
    egress = find("cpu-minimal", "NetworkPolicy", "router", hosts)["spec"]["egress"]
    networks = [peer["ipBlock"]["cidr"] for rule in egress if "ports" not in rule for peer in rule["to"]]
    assert networks == [entry if "/" in entry else f"{entry}/128" for entry in entries]


def test_a_store_that_is_shared_is_told_to_all(find):
    sets = ("config.ec_connector.name=shared", "kvstore.enabled=true")
    for role in ("encode", "prefill", "decode"):
        assert config_of(find, role, *sets)["kvstore"]["address"].startswith("tcp://kvferry-kvstore.")
    assert config_of(find, "encode", *sets, "config.ec_connector.transports={nixl}"), "which it does not use"


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("encode.enabled=true", "config.ec_connector.name=none"), "no worker could read"),
        (("encode.enabled=true", "config.ec_connector.name=shared"), "kvstore.enabled"),
        (("encode.enabled=true", "config.ec_connector.transports={shm}"), "shm works between processes of one pod only"),
        (("encode.enabled=true", "config.ec_connector.transports={nixl,tcp}"), "encode pods open no ports for UCX and get no"),
        (("encode.enabled=true", "decode.config.ec_connector.transports={nixl}"), "decode.config.ec_connector.transports: nix"),
        (("encode.enabled=true", "prefill.enabled=false", "decode.enabled=false"), "no worker is enabled"),
    ],
)
def test_what_cannot_work_is_refused(helm, sets, why):
    assert why in helm.refusal(*sets)
