"""Engine vllm in the chart: what runs in a pod, in which order it starts and leaves, who reaches it, and what is refused."""

import io
import json
import re
from pathlib import Path
from unittest import mock

import pytest

from connectors.vllm.settings import PluginSettings
from core.config import load_config

pytestmark = pytest.mark.slow

CHART = Path(__file__).parents[2] / "helm/kvferry"
OURS, LLMD = "vllm-1p1d", "vllm-llm-d"
AGGREGATED = ("prefill.enabled=false", "decode.enabled=false", "aggregated.enabled=true")
PROBES = ("startupProbe", "livenessProbe")
NODES = ("prefill.vllm.nodes=2", "prefill.vllm.tensorParallelSize=4")


def pod(find, preset, role, *sets):
    return find(preset, "Deployment", role, *sets)["spec"]["template"]["spec"]


def by_name(containers):
    return {container["name"]: container for container in containers}


def option(command, flag):
    return command[command.index(flag) + 1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_is_up_before_the_agent_and_gone_after_it(find, role):
    spec = pod(find, OURS, role)
    (agent,) = spec["containers"]
    vllm = by_name(spec["initContainers"])["vllm"]
    assert vllm["restartPolicy"] == "Always", "a native sidecar"
    assert agent["args"][:5] == ["agent", "--role", role, "--engine", f"http://127.0.0.1:{option(vllm['command'], '--port')}"]
    drain = agent["lifecycle"]["preStop"]["exec"]["command"]
    assert drain[:2] == ["kvferry", "drain"]
    assert int(drain[-1]) <= spec["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_vllm_publishes_kv_events_to_the_agent_of_its_pod(find, role):
    spec = pod(find, OURS, role)
    events = json.loads(option(by_name(spec["initContainers"])["vllm"]["command"], "--kv-events-config"))
    arguments = spec["containers"][0]["args"]
    assert f"agent.kv_events_address={events['endpoint']}" in arguments
    assert f"agent.kv_events_replay_address={events['replay_endpoint']}" in arguments
    assert events["endpoint"] == "ipc://@kv-events-$(POD_NAME)", "a name of the pod, also in the node's network"
    assert any(variable["name"] == "POD_NAME" for variable in by_name(spec["initContainers"])["vllm"]["env"])


@pytest.mark.parametrize(
    "setting",
    ["config.router.routing=least_loaded", "vllm.arguments={--kv-events-config=x}", "prefill.vllm.dataParallelSize=1"],
)
def test_events_that_nobody_uses_or_the_operator_chose_are_not_set_up(find, setting):
    spec = pod(find, OURS, "prefill", setting)
    assert not any("kv_events" in argument for argument in spec["containers"][0]["args"])
    assert "--kv-events-config" not in by_name(spec["initContainers"])["vllm"]["command"]


def test_a_server_that_hangs_is_started_again_by_the_platform(find):
    vllm = by_name(pod(find, OURS, "decode")["initContainers"])["vllm"]
    for probe in PROBES:
        program = vllm[probe]["exec"]["command"][-1]
        assert f"http://127.0.0.1:{option(vllm['command'], '--port')}/health" in program
        compile(program, probe, "exec")
    assert "readinessProbe" not in vllm, "the agent says whether requests may come"


def test_the_server_of_an_agent_has_the_timings_of_the_role_s_probes(find):
    sets = ("decode.probes.startup.failureThreshold=900", "decode.probes.liveness.periodSeconds=30")
    vllm = by_name(pod(find, OURS, "decode", *sets)["initContainers"])["vllm"]
    timings = {name: {key: value for key, value in vllm[name].items() if key != "exec"} for name in PROBES}
    assert not any("timeout" in str(vllm[name]["exec"]) for name in PROBES), "the kubelet ends the look"
    common = {"timeoutSeconds": 5, "terminationGracePeriodSeconds": 15}
    assert timings == {
        "startupProbe": {"periodSeconds": 5, "failureThreshold": 900, **common},
        "livenessProbe": {"periodSeconds": 30, "failureThreshold": 6, **common},
    }


@pytest.mark.parametrize(("length", "said"), [("1000000", "1000000"), ("1Mi", "1048576"), ("10M", "10000000")])
def test_longest_request_is_told_in_plain_digits(find, length, said):
    vllm = by_name(pod(find, OURS, "prefill", f"config.model.max_model_len={length}")["initContainers"])["vllm"]
    assert option(vllm["command"], "--max-model-len") == said


def test_vllm_has_the_gpus_the_model_and_the_plugin_and_the_agent_has_none(find):
    spec = pod(find, OURS, "prefill")
    containers = by_name(spec["initContainers"])
    vllm, agent = containers["vllm"], spec["containers"][0]
    assert vllm["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert option(vllm["command"], "--tensor-parallel-size") == "2"
    assert "nvidia.com/gpu" not in agent["resources"]["limits"]
    (plugin,) = (mount for mount in vllm["volumeMounts"] if mount["name"] == "plugin")
    environment = {entry["name"]: entry.get("value") for entry in vllm["env"]}
    assert environment["PYTHONPATH"] == plugin["mountPath"] == containers["plugin"]["command"][-1]
    assert "fetch-model" not in containers, "vLLM fetches its model itself"


def test_nothing_outside_the_pod_reaches_the_api_of_an_engine(find):
    command = by_name(pod(find, OURS, "decode")["initContainers"])["vllm"]["command"]
    assert option(command, "--host") == "127.0.0.1"
    policy = find(OURS, "NetworkPolicy", "decode")["spec"]["ingress"]
    assert [[port["port"] for port in rule["ports"]] for rule in policy] == [[9400]], "only metrics"


def test_the_plugin_has_the_settings_of_the_connector(find):
    sets = ("config.connector.lease_s=40", "vllm.settings.peers={10.0.0.0/8}", "config.connector.kv_load_failure_policy=fail")
    command = by_name(pod(find, OURS, "decode", *sets)["initContainers"])["vllm"]["command"]
    transfer = json.loads(option(command, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("KvferryConnector", "kv_both")
    assert transfer["kv_load_failure_policy"] == "fail"
    assert transfer["kv_connector_extra_config"] == {
        "kvferry.host": "$(POD_IP)",
        "kvferry.port": 5571,
        "kvferry.transports": ["nixl", "tcp"],
        "kvferry.lease_s": 40,
        "kvferry.peers": ["10.0.0.0/8"],
    }


def test_every_setting_of_the_plugin_is_known_to_the_chart():
    template = (CHART / "templates/_validate_vllm.tpl").read_text()
    lists = re.findall(r'\(?list ((?:"[a-z_]+" ?)+)', template)
    known = {name for found in lists for name in re.findall(r'"([a-z_]+)"', found)}
    assert set(PluginSettings.__struct_fields__) <= known


def test_replicas_of_an_engine_in_one_pod_share_its_gpus(find):
    sets = ("prefill.vllm.tensorParallelSize=1", "prefill.vllm.dataParallelSize=2")
    command = by_name(pod(find, OURS, "prefill", *sets)["initContainers"])["vllm"]["command"]
    assert (option(command, "--tensor-parallel-size"), option(command, "--data-parallel-size")) == ("1", "2")


def test_engines_that_serve_alone_need_no_plugin(find):
    sets = (*AGGREGATED, "aggregated.vllm.tensorParallelSize=1", "aggregated.gpu.count=1")
    spec = pod(find, OURS, "aggregated", *sets)
    assert set(by_name(spec["initContainers"])) == {"vllm"}
    assert "--kv-transfer-config" not in by_name(spec["initContainers"])["vllm"]["command"]
    assert "--enable-scale-out" in by_name(spec["initContainers"])["vllm"]["command"]


def test_the_agents_settings_are_settings(find, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(find(OURS, "ConfigMap", "prefill")["data"]["config.yaml"])
    config = load_config(path)
    assert config.model.name == "Qwen/Qwen3-8B"
    assert config.scheduler.max_num_seqs == 256


# ---- several nodes ---------------------------------------------------------------------------------------------------


def test_an_engine_of_several_nodes_has_one_agent(helm, check_kubernetes):
    (found,) = (item for item in helm.manifests(OURS, *NODES) if item["kind"] == "LeaderWorkerSet")
    group = found["spec"]["leaderWorkerTemplate"]
    leader, worker = group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]
    assert (group["size"], leader["containers"][0]["args"][0]) == (2, "agent")
    assert "vllm" not in by_name(worker["initContainers"])
    commands = [by_name(leader["initContainers"])["vllm"]["command"], worker["containers"][0]["command"]]
    for command in commands:
        assert option(command, "--nnodes") == "2"
        assert option(command, "--node-rank") == "$(LWS_WORKER_INDEX)"
        assert option(command, "--tensor-parallel-size") == "4"
    assert ["--headless" in command for command in commands] == [False, True]
    assert "lifecycle" not in worker["containers"][0]
    for template in (group["leaderTemplate"], group["workerTemplate"]):
        check_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}, "1.33")


def test_engines_of_several_nodes_are_replaced_as_the_values_say(helm):
    (found,) = (item for item in helm.manifests(OURS, *NODES) if item["kind"] == "LeaderWorkerSet")
    expected = {"maxUnavailable": 1, "maxSurge": 0}
    assert found["spec"]["rolloutStrategy"] == {"type": "RollingUpdate", "rollingUpdateConfiguration": expected}


def test_nodes_of_one_engine_reach_each_other(find):
    policy = find(OURS, "NetworkPolicy", "prefill", *NODES)["spec"]
    own = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert own[0]["from"][0]["podSelector"]["matchExpressions"][0]["values"] == ["prefill"]
    assert any("ports" not in rule for rule in policy["egress"])


# ---- llm-d -----------------------------------------------------------------------------------------------------------


def test_with_llm_d_nothing_of_ours_runs_but_the_plugin(helm, find):
    kinds = {item["kind"] for item in helm.manifests(LLMD)}
    assert "Service" not in kinds
    images = {
        container["image"]
        for role in ("prefill", "decode")
        for part in ("initContainers", "containers")
        for container in pod(find, LLMD, role)[part]
    }
    assert {image.partition(":")[0] for image in images} == {
        "vllm/vllm-openai",
        "kvferry/kvferry-vllm",
        "ghcr.io/llm-d/llm-d-routing-sidecar",
    }


def test_llm_d_finds_both_roles_at_one_port_and_the_proxy_hides_a_decode_engine(find):
    prefill, decode = pod(find, LLMD, "prefill"), pod(find, LLMD, "decode")
    assert option(prefill["containers"][0]["command"], "--host") == "0.0.0.0"
    assert option(decode["containers"][0]["command"], "--host") == "127.0.0.1"
    assert prefill["containers"][0]["ports"][0] == {"name": "http", "containerPort": 8000}
    assert by_name(decode["initContainers"])["proxy"]["ports"] == [{"name": "http", "containerPort": 8000}]
    labels = find(LLMD, "Deployment", "decode")["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/role"] == "decode"


def test_llm_d_reaches_engines_over_ipv6_as_well(find):
    command = pod(find, LLMD, "prefill", "network.ipFamily=IPv6")["containers"][0]["command"]
    assert option(command, "--host") == "::"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_named_clients_everyone_reaches_the_engines_as_llm_d_does(find, role):
    def peers(*sets):
        ingress = find(LLMD, "NetworkPolicy", role, *sets)["spec"]["ingress"]
        (rule,) = (rule for rule in ingress if rule.get("ports") == [{"protocol": "TCP", "port": 8000}])
        return rule.get("from")

    assert peers("networkPolicy.clients=null") is None
    (proxy, gateway) = peers()
    assert proxy["podSelector"]["matchExpressions"][0]["values"] == ["decode"]
    assert gateway["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "gateway"}


DELAY_S, IDLE_S = 5, 10


def leave(find, answer_at, *sets, role="prefill"):
    """Run the script by which a pod without agent leaves, and return after how many seconds, and when it first looked."""
    (vllm,) = pod(find, LLMD, role, *sets)["containers"]
    now, looks = [0.0], []

    def urlopen(url, timeout):
        looks.append(now[0])
        answer = answer_at(now[0])
        if answer is None:
            now[0] += timeout
            raise TimeoutError
        return io.BytesIO(answer)

    def sleep(seconds):
        now[0] += seconds

    def monotonic():
        return now[0]

    with (
        mock.patch("urllib.request.urlopen", urlopen),
        mock.patch("time.sleep", sleep),
        mock.patch("time.monotonic", monotonic),
    ):
        exec(vllm["lifecycle"]["preStop"]["exec"]["command"][-1], {})
    return now[0], looks[0]


def held_blocks(number):
    return f'vllm:num_requests_running{{engine="0"}} 0.0\nvllm:kvferry_held_blocks{{engine="0"}} {number}.0\n'.encode()


def test_an_idle_pod_without_agent_serves_until_gateways_know_and_its_proxy_is_done(find):
    assert leave(find, lambda now: held_blocks(0), role="decode") == (DELAY_S + IDLE_S, DELAY_S)
    sets = ("vllm.endpointDelaySeconds=8", "vllm.idleSeconds=20")
    assert leave(find, lambda now: held_blocks(0), *sets, role="decode") == (28, 8)


def test_a_pod_without_agent_waits_for_readers_before_it_leaves(find):
    left, _ = leave(find, lambda now: held_blocks(3 if 12 <= now < 30 else 0))
    assert 30 + IDLE_S - 2 <= left <= 30 + IDLE_S


def test_slow_answers_do_not_end_the_wait_for_readers(find):
    left, _ = leave(find, lambda now: None if now < 40 else held_blocks(0))
    assert 40 + IDLE_S - 6 <= left <= 40 + IDLE_S + 6


def test_a_pod_without_agent_leaves_within_its_grace_period(find):
    left, _ = leave(find, lambda now: held_blocks(3))
    assert 60 + 30 + DELAY_S + IDLE_S <= left < pod(find, LLMD, "prefill")["terminationGracePeriodSeconds"]


# ---- refusals --------------------------------------------------------------------------------------------------------

VLLM = ("engine=vllm", "config.model.name=Qwen/Qwen3-8B", "prefill.gpu.count=1", "decode.gpu.count=1")
LLMD_ROUTES = (*VLLM, "vllm.agent.enabled=false", "router.enabled=false", "vllm.proxy.image.tag=v0.4.0")
SCALED = tuple(
    f"prefill.autoscaling.{part}" for part in ("type=hpa", "min=1", "max=2", "metrics.kvferry_num_requests_waiting=4")
)
CASES = {
    "more ranks than GPUs": ((*VLLM, "prefill.vllm.tensorParallelSize=2"), "tensorParallelSize = 2, but its pods have 1 GPUs"),
    "ranks without a GPU": (("engine=vllm", "prefill.vllm.tensorParallelSize=2"), "but its pods have no GPU: set prefill.gpu"),
    "replicas over the GPUs": (
        (*VLLM, "prefill.vllm.dataParallelSize=2"),
        "prefill.vllm.tensorParallelSize times dataParallelSize = 2, but its pods have 1 GPUs",
    ),
    "replicas as a flag": ((*VLLM, "vllm.arguments={-dp=2}"), "-dp is the chart's business; remove it and set vllm.dataPar"),
    "a setting that the plug-in has not": ((*VLLM, "vllm.settings.peer=x"), "vllm.settings.peer: the plug-in has no such"),
    "replicas of several nodes": (
        (*VLLM, "prefill.vllm.nodes=2", "prefill.vllm.dataParallelSize=2"),
        "prefill.vllm.dataParallelSize: an engine of several nodes is one",
    ),
    "GPUs that idle": ((*VLLM, "decode.gpu.count=2"), "decode.gpu.count: the engine has 2 GPUs, but"),
    "plug-in settings without vLLM": (("vllm.settings.lease_s=3",), "vllm.settings: they are of the plug-in for vLLM"),
    "a role's vLLM without vLLM": (("prefill.vllm.tensorParallelSize=2",), "prefill.vllm: it is for vLLM engines"),
    "another model": ((*VLLM, "decode.config.model.name=a/b"), 'decode.config.model.name = "a/b", but prefill'),
    "another name": ((*VLLM, "decode.config.model.served_name=x"), 'decode.config.model.served_name = "x", but prefill'),
    "shared memory": ((*VLLM, "config.connector.transports={shm}"), "shm works between processes of one pod only"),
    "another connector": ((*VLLM, "config.connector.name=offload"), "vLLM engines hand KV over by p2p"),
    "our store": ((*VLLM, "kvstore.enabled=true"), "kvstore.enabled: vLLM engines do not use our store"),
    "prefixes": ((*VLLM, "config.connector.peer_prefixes=true"), "vLLM engines do not share their prefix caches"),
    "LMCache": ((*VLLM, "lmcache.mode=external", "lmcache.host=x"), "lmcache.mode: vLLM has a connector of its own"),
    "encode workers": ((*VLLM, "encode.enabled=true"), "encode.enabled: vLLM engines compute embeddings"),
    "a flag of the chart": ((*VLLM, "vllm.arguments={--port=9}"), "--port is the chart's business"),
    "GPUs that idle beside another flag": (
        (*VLLM, "decode.gpu.count=2", "decode.vllm.arguments={--max-parallel-loading-workers=2}"),
        "decode.gpu.count: the engine has 2 GPUs, but",
    ),
    "a transport past the connector's": ((*VLLM, "vllm.settings.transports={shm}"), "vllm.settings.transports: the chart sets"),
    "another port of the plug-in": ((*VLLM, "vllm.settings.port=1"), "vllm.settings.port: the chart sets it"),
    "a flag with underscores": ((*VLLM, "vllm.arguments={--kv_transfer_config=x}"), "--kv-transfer-config is the chart's"),
    "ranks as a flag": (
        (*VLLM, "prefill.vllm.arguments={--tensor-parallel-size=2}"),
        "set vllm.tensorParallelSize of the role",
    ),
    "agents without a router": ((*VLLM, "router.enabled=false"), "our router reaches vLLM engines by agents"),
    "a router without agents": ((*VLLM, "vllm.agent.enabled=false"), "our router reaches vLLM engines by agents"),
    "no version of the proxy": ((*VLLM, "vllm.agent.enabled=false", "router.enabled=false"), "vllm.proxy.image.tag: give"),
    "a route to llm-d": ((*LLMD_ROUTES, "httpRoute.enabled=true"), "httpRoute.enabled: without our router there is nothing"),
    "a pool of llm-d": ((*LLMD_ROUTES, "inferencePool.enabled=true"), "inferencePool.enabled: without our router there is"),
    "a moving tag": ((*VLLM, "vllm.image.tag=latest"), 'vllm.image.tag: "latest" names another image every day'),
    "our alias of a model": ((*VLLM, "config.model.name=smollm2-135m"), 'config.model.name = "smollm2-135m": vLLM knows none'),
    "ranks without shared memory": (
        (*VLLM, "prefill.gpu.count=2", "prefill.vllm.tensorParallelSize=2"),
        "shm.size = 64Mi: the ranks of prefill's engine exchange messages in /dev/shm; give at least 1Gi",
    ),
    "the port of metrics": ((*VLLM, "vllm.port=9400"), "vllm.port and ports.ops are both 9400 in the pods of prefill workers"),
    "no time for gateways to learn": (
        (*LLMD_ROUTES, "prefill.terminationGracePeriodSeconds=100"),
        "give at least 110, or shorten the drain time, connector.lease_s, vllm.endpointDelaySeconds and vllm.idleSeconds",
    ),
    "the port of llm-d's proxy": ((*LLMD_ROUTES, "vllm.port=8000"), "vllm.port and ports.http are both 8000"),
    "a port of UCX": ((*VLLM, "vllm.port=20001"), "vllm.port = 20001 lies in ports.ucx"),
    "nodes of a StatefulSet": (
        (*VLLM, "prefill.vllm.nodes=2", "prefill.vllm.tensorParallelSize=2", "prefill.kind=StatefulSet", "shm.size=1Gi"),
        "prefill.kind = StatefulSet: an engine of several nodes is a LeaderWorkerSet",
    ),
    "scaled nodes": (
        (*VLLM, "prefill.vllm.nodes=2", "prefill.vllm.tensorParallelSize=2", *SCALED),
        "an engine of several nodes is a LeaderWorkerSet",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_work_is_refused_with_the_fix(helm, case):
    sets, said = CASES[case]
    assert said in helm.refusal(*sets)


def test_the_least_values_are_accepted(helm):
    with pytest.raises(AssertionError, match="was accepted"):
        helm.refusal(*VLLM, "security.clusterKey.generate=true")


def test_a_port_that_no_container_of_a_pod_listens_on_may_be_any(helm):
    """vLLM alone listens on ports.http."""
    alone = ("prefill.enabled=false", "decode.enabled=false", "aggregated.enabled=true", "aggregated.gpu.count=1")
    assert helm.manifests(LLMD, *alone, "rdma.enabled=false", "vllm.port=8000")
    assert helm.manifests(OURS, "vllm.port=7070", "ports.store=7070"), "there is no store"
