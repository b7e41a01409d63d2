"""The network policies let through what the planes need and nothing else."""

import pytest
import yaml

PORTS = {"http": 8000, "workers": 5570, "control": 5571, "data": 5572, "ops": 9400, "store": 5580}
CLUSTER = ("router", "prefill", "decode", "aggregated", "kvstore", "test")


def selects(selector, role):
    labels = {"app.kubernetes.io/name": "kvferry", "app.kubernetes.io/instance": "kvferry", "app.kubernetes.io/component": role}
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    return all(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ()))


def passes(rules, direction, role, port):
    """Say whether a rule lets a pod of the cluster through at a port."""
    for rule in rules:
        peers = rule.get(direction)
        is_peer = peers is None or any(
            "namespaceSelector" not in p and selects(p.get("podSelector", {"matchLabels": {"": ""}}), role) for p in peers
        )
        if is_peer and any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"]):
            return True
    return False


@pytest.fixture(scope="module")
def may_talk(find):
    def check(preset, source, target, port):
        policies = {role: find(preset, "NetworkPolicy", role)["spec"] for role in (source, target) if role != "test"}
        leaves = source == "test" or passes(policies[source]["egress"], "to", target, port)
        return leaves and passes(policies[target]["ingress"], "from", source, port)

    return check


ALLOWED = {
    ("prefill", "router", "workers"),
    ("decode", "router", "workers"),
    ("decode", "prefill", "control"),
    ("decode", "prefill", "data"),
    ("prefill", "kvstore", "store"),
    ("decode", "kvstore", "store"),
}


@pytest.mark.parametrize("target", ["router", "prefill", "decode", "kvstore"])
@pytest.mark.parametrize("source", ["router", "prefill", "decode", "kvstore"])
def test_exactly_the_planes_connect(may_talk, source, target):
    open_ports = {name for name, port in PORTS.items() if may_talk("external-redis", source, target, port)}
    assert open_ports == {name for left, right, name in ALLOWED if (left, right) == (source, target)}


def test_a_store_in_the_workers_pods_is_reached_by_these_workers_only(find):
    for role in ("prefill", "decode"):
        policy = find("store-sidecar", "NetworkPolicy", role)["spec"]
        ports = {entry["port"] for rule in (*policy["ingress"], *policy["egress"]) for entry in rule["ports"]}
        assert PORTS["store"] not in ports
        (metrics,) = (rule for rule in policy["ingress"] if {"protocol": "TCP", "port": PORTS["ops"]} in rule["ports"])
        assert {"protocol": "TCP", "port": 9401} in metrics["ports"]
        (redis,) = (rule for rule in policy["egress"] if rule["ports"][0]["port"] == 6379)
        assert redis["to"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "redis"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("http://otel.observability.svc:4318", 4318),
        ("https://traces.example.org/otlp/v1/traces", 443),
        ("http://[fd00::1]", 80),
        ("http://otel.observability.svc:04318", 4318),
    ],
)
def test_traces_reach_their_collector_and_nothing_is_open_without_them(find, endpoint, port):
    peer = "networkPolicy.collector[0].namespaceSelector.matchLabels.name=observability"

    def outside(role, *sets):
        egress = find("gpu-rdma", "NetworkPolicy", role, *sets)["spec"]["egress"]
        return [rule for rule in egress if rule["ports"] == [{"protocol": "TCP", "port": port}]]

    for role in ("router", "prefill", "decode"):
        (rule,) = outside(role, f"config.tracing.endpoint={endpoint}", peer)
        assert rule["to"] == [{"namespaceSelector": {"matchLabels": {"name": "observability"}}}]
        assert outside(role, peer) == []


@pytest.mark.slow
def test_ucx_ports_are_open_from_decode_to_prefill_only_and_only_if_nixl_is_used(may_talk):
    for port in (20000, 20127):
        assert may_talk("gpu-rdma", "decode", "prefill", port)
        assert not may_talk("gpu-rdma", "prefill", "decode", port)
        assert not may_talk("gpu-rdma", "router", "prefill", port)
        assert not may_talk("cpu-minimal", "decode", "prefill", port)
    assert not may_talk("gpu-rdma", "decode", "prefill", 20128)


def test_ucx_is_told_the_ports_that_are_open(find):
    container = find("gpu-rdma", "Deployment", "prefill")["spec"]["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert environment["UCX_TCP_PORT_RANGE"] == "20000-20127"


def test_clients_can_be_named_and_the_test_stays_one_of_them(may_talk, find):
    assert may_talk("ha", "test", "router", 8000)
    assert not may_talk("ha", "decode", "router", 8000)
    (rule,) = (rule for rule in find("ha", "NetworkPolicy", "router")["spec"]["ingress"] if rule["ports"][0]["port"] == 8000)
    assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}} in rule["from"]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_everything_else_that_may_be_reached_is_listed(find, role):
    egress = find("gpu-rdma", "NetworkPolicy", role)["spec"]["egress"]
    outside = [
        rule
        for rule in egress
        if not any("podSelector" in peer and "namespaceSelector" not in peer for peer in rule.get("to", [{}]))
    ]
    assert [sorted({entry["port"] for entry in rule["ports"]}) for rule in outside] == [[53]]


@pytest.mark.parametrize(
    ("preset", "values", "is_open"),
    [
        ("cpu-minimal", [], True),
        ("cpu-minimal", ["modelCache.fetch=false"], True),
        ("cpu-minimal", ["modelCache.fetch=false", "config.model.name=/models/m"], False),
        ("cpu-minimal", ["modelCache.kind=existingClaim", "modelCache.existingClaim=m"], True),
        ("cpu-minimal", ["modelCache.kind=existingClaim", "modelCache.existingClaim=m", "modelCache.fetch=false"], False),
        ("vllm-1p1d", ["modelCache.kind=emptyDir", "modelCache.fetch=false"], True),
    ],
)
def test_a_model_that_is_not_on_a_volume_can_be_fetched(find, preset, values, is_open):
    for role in ("router", "prefill"):
        egress = find(preset, "NetworkPolicy", role, *values)["spec"]["egress"]
        assert any(rule.get("ports", [{}])[0].get("port") == 443 for rule in egress) == is_open


def test_models_are_fetched_from_outside_the_private_networks(find):
    egress = find("cpu-minimal", "NetworkPolicy", "decode")["spec"]["egress"]
    (rule,) = (rule for rule in egress if rule["ports"][0]["port"] == 443)
    assert "10.0.0.0/8" in rule["to"][0]["ipBlock"]["except"]


def test_metrics_are_for_prometheus(find):
    ingress = find("cpu-minimal", "NetworkPolicy", "decode")["spec"]["ingress"]
    assert [rule["from"] for rule in ingress if rule["ports"][0]["port"] == 9400] == [
        [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    ]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_metrics_are_closed_if_no_peer_is_named(find, role):
    ingress = find("cpu-minimal", "NetworkPolicy", role, "networkPolicy.prometheus=null")["spec"]["ingress"] or []
    assert not [rule for rule in ingress if {"protocol": "TCP", "port": PORTS["ops"]} in rule["ports"]]
    assert all(rule.get("from") for rule in ingress if rule["ports"][0]["port"] != PORTS["http"])


def test_metrics_of_the_router_are_apart_from_its_clients(find):
    ingress = find("ha", "NetworkPolicy", "router")["spec"]["ingress"]
    (metrics,) = (rule for rule in ingress if rule["ports"][0]["port"] == PORTS["ops"])
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    (monitor,) = find("ha", "ServiceMonitor", "router")["spec"]["endpoints"]
    assert monitor["port"] == "ops"
    assert "ops" not in {port["name"] for port in find("ha", "Service", "router")["spec"]["ports"]}
    assert "ops" in {port["name"] for port in find("ha", "Service", "router-workers")["spec"]["ports"]}


def test_models_are_fetched_over_both_families(find):
    egress = find("cpu-minimal", "NetworkPolicy", "decode")["spec"]["egress"]
    (rule,) = (rule for rule in egress if rule["ports"][0]["port"] == 443)
    assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == ["0.0.0.0/0", "::/0"]
    assert "fc00::/7" in rule["to"][1]["ipBlock"]["except"]


def test_routers_speak_tls_with_the_certificate_of_a_secret(find, helm):
    sets = ("security.tls.existingSecret=kvferry-tls",)
    pod = find("cpu-minimal", "Deployment", "router", *sets)["spec"]["template"]["spec"]
    assert {"name": "tls", "secret": {"secretName": "kvferry-tls", "defaultMode": 0o440}} in pod["volumes"]
    (container,) = pod["containers"]
    assert {"name": "tls", "mountPath": "/etc/kvferry-tls", "readOnly": True} in container["volumeMounts"]
    assert all(container[probe]["httpGet"]["port"] == "ops" for probe in ("readinessProbe", "livenessProbe"))
    rendered = helm.template("cpu-minimal", sets=sets)
    assert rendered.count("tls_cert: /etc/kvferry-tls/tls.crt") == 1
    assert rendered.count("https://kvferry-router") == 1
    assert "kvferry-tls" not in str(find("cpu-minimal", "Deployment", "prefill", *sets))


SWITCHING = "config.worker.can_switch_role=true"
SHARING = "config.connector.peer_prefixes=true"


@pytest.mark.parametrize("setting", [SWITCHING, SHARING])
@pytest.mark.parametrize(
    ("source", "target"), [("decode", "prefill"), ("prefill", "decode"), ("decode", "decode"), ("prefill", "prefill")]
)
def test_workers_that_can_switch_or_share_prefixes_read_from_each_other(find, source, target, setting):
    policies = {role: find("external-redis", "NetworkPolicy", role, setting)["spec"] for role in (source, target)}
    for port in (PORTS["control"], PORTS["data"]):
        assert passes(policies[source]["egress"], "to", target, port)
        assert passes(policies[target]["ingress"], "from", source, port)


@pytest.mark.slow
def test_aggregated_workers_that_share_prefixes_read_from_each_other(find):
    nixl = ("config.connector.transports[0]=nixl", "config.connector.transports[1]=tcp")
    sets = ("prefill.enabled=false", "decode.enabled=false", "aggregated.enabled=true")
    alone = find("cpu-minimal", "NetworkPolicy", "aggregated", *sets, *nixl)["spec"]
    policy = find("cpu-minimal", "NetworkPolicy", "aggregated", *sets, *nixl, SHARING)["spec"]
    for port in (PORTS["control"], PORTS["data"], 20000):
        for direction, rules in (("to", "egress"), ("from", "ingress")):
            assert passes(policy[rules], direction, "aggregated", port)
            assert not passes(alone[rules], direction, "aggregated", port)
    pod = find("cpu-minimal", "Deployment", "aggregated", *sets, *nixl, SHARING)["spec"]["template"]["spec"]
    environment = {entry["name"]: entry for entry in pod["containers"][0]["env"]}
    assert environment["UCX_TCP_PORT_RANGE"]["value"] == "20000-20127"
    assert "KVFERRY_CLUSTER_KEY" in environment


def test_workers_that_share_prefixes_are_told_so_by_their_configuration(find):
    for role in ("prefill", "decode"):
        config = yaml.safe_load(find("cpu-minimal", "ConfigMap", role, SHARING)["data"]["config.yaml"])
        assert config["connector"]["peer_prefixes"] is True
        assert config["worker"]["control_address"] == f"tcp://0.0.0.0:{PORTS['control']}"


@pytest.mark.parametrize("setting", [SWITCHING, SHARING])
def test_only_workers_that_exchange_blocks_serve_readers_as_decode_workers(find, setting):
    def ports(*sets):
        (container,) = find("cpu-minimal", "Deployment", "decode", *sets)["spec"]["template"]["spec"]["containers"]
        return {port["name"] for port in container["ports"]}, "--advertise-host" in container["args"]

    assert ports() == ({"ops"}, False)
    assert ports(setting) == ({"ops", "control", "data"}, True)


SOURCES = {"modelSources": ("decode", 443), "imageSources": ("router", 80), "dns": ("decode", 53)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_sources_that_are_emptied_are_closed_not_open_to_everyone(find, name):
    role, port = SOURCES[name]

    def rules(*sets):
        sets = ("config.router.images.allowed_hosts={example.org}", *sets)
        return [rule for rule in find("cpu-minimal", "NetworkPolicy", role, *sets)["spec"]["egress"] if reaches(rule)]

    def reaches(rule):
        return any(entry["port"] == port for entry in rule["ports"])

    assert len(rules()) == 1
    assert rules(f"networkPolicy.{name}=null") == []
