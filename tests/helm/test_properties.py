"""Properties that operators rely on: least privilege, closed networks, probes, drain, scaling, and valid settings."""

import base64
import json
import re

import pytest
import yaml

from core.config import load_config
from router.planner.loads import PLANNED_ROLES

pytestmark = pytest.mark.slow

WORKLOADS = ("Deployment", "StatefulSet")
PRESETS = (
    "cpu-minimal",
    "gpu-single-node",
    "gpu-rdma",
    "lmcache-server",
    "external-redis",
    "store-sidecar",
    "ha",
    "vision",
    "vllm-1p1d",
)


def pods(helm, preset, *sets):
    """Return (role, pod spec) of every workload and of the test."""
    found = []
    for item in helm.manifests(preset, *sets):
        if item["kind"] in WORKLOADS:
            found.append((item["metadata"]["labels"]["app.kubernetes.io/component"], item["spec"]["template"]["spec"]))
        elif item["kind"] == "Pod":
            found.append(("test", item["spec"]))
    return found


def containers(pod):
    return [*pod.get("initContainers", ()), *pod["containers"]]


def main(find, preset, role, *sets, kind="Deployment"):
    return find(preset, kind, role, *sets)["spec"]["template"]["spec"]


def environment(container):
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def config_of(find, preset, role, *sets):
    return yaml.safe_load(find(preset, "ConfigMap", role, *sets)["data"]["config.yaml"])


# ---- privileges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_every_pod_is_restricted(helm, preset):
    for _, pod in pods(helm, preset):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostIPC", "hostPID", "hostNetwork"} & pod.keys()
        assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
        for container in containers(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert "add" not in security["capabilities"]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_image_floats_and_no_role_is_bound(helm, preset):
    for item in helm.manifests(preset):
        assert item["kind"] not in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    for _, pod in pods(helm, preset):
        for container in containers(pod):
            assert re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", container["image"])
            assert not container["image"].endswith(":latest")


def test_devices_are_for_the_workers_that_use_them(find):
    decode = main(find, "gpu-rdma", "decode")["containers"][0]
    assert decode["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1, "rdma/hca_shared_devices_a": 1}
    assert decode["resources"]["requests"]["rdma/hca_shared_devices_a"] == 1
    assert environment(decode)["UCX_NET_DEVICES"] == "mlx5_0:1"
    router = main(find, "gpu-rdma", "router")["containers"][0]
    assert "rdma/hca_shared_devices_a" not in router["resources"]["limits"]
    assert not [name for name in environment(router) if name.startswith("UCX")]


@pytest.mark.parametrize("setting", ["connector.peer_prefixes", "worker.can_switch_role"])
@pytest.mark.parametrize("is_alone", [False, True])
def test_every_worker_that_is_told_to_use_rdma_has_the_device(helm, setting, is_alone):
    sets = [
        "aggregated.enabled=true",
        "aggregated.gpu.count=1",
        "rdma.tls=rc",
        f"config.{setting}=true",
        "rdma.podAnnotations.net=b",
    ]
    sets += ["prefill.enabled=false", "decode.enabled=false"] * is_alone
    told = {}
    for name, pod in pods(helm, "gpu-rdma", *sets):
        for container in pod["containers"]:
            if "UCX_TLS" in environment(container):
                told[name] = container["resources"]["limits"].get("rdma/hca_shared_devices_a")
    assert told == dict.fromkeys(["aggregated"] if is_alone else ["prefill", "decode", "aggregated"], 1)
    workloads = [item for item in helm.manifests("gpu-rdma", *sets) if item["kind"] in WORKLOADS]
    annotations = [item["spec"]["template"]["metadata"]["annotations"].get("net") for item in workloads]
    assert annotations.count("b") == len(told)


def test_aggregated_workers_that_read_by_tcp_get_no_rdma_device(helm):
    sets = ["config.connector.peer_prefixes=true", "aggregated.config.connector.transports={tcp}"]
    found = dict(pods(helm, "gpu-rdma", "aggregated.enabled=true", "aggregated.gpu.count=1", *sets))
    (container,) = found["aggregated"]["containers"]
    assert "rdma/hca_shared_devices_a" not in container["resources"]["limits"]
    assert not {"UCX_TLS", "UCX_NET_DEVICES", "UCX_IB_GID_INDEX"} & set(environment(container))
    for name in ("prefill", "decode"):
        (container,) = found[name]["containers"]
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == 1
        assert environment(container)["UCX_TLS"] == "rc,cuda_copy,tcp"


def test_digest_wins_over_the_tag(find):
    digest = "sha256:" + "0" * 64
    container = main(find, "cpu-minimal", "router", f"image.digest={digest}", "image.tag=v7")["containers"][0]
    assert container["image"] == f"kvferry/kvferry@{digest}"


# ---- probes and leaving ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_liveness_and_start_ask_the_process_alone_and_only_readiness_its_peers(find, role):
    container = main(find, "cpu-minimal", role)["containers"][0]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/started", "readiness": "/ready", "liveness": "/health"}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_container_that_hangs_gets_no_time_to_drain(helm, preset):
    for _, pod in pods(helm, preset):
        for container in containers(pod):
            if "livenessProbe" in container:
                assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 15
                assert "terminationGracePeriodSeconds" not in container.get("readinessProbe", ())


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("drain_s", "lease_s"), [(60, 30), (20, 90)])
def test_pod_may_take_as_long_to_leave_as_its_requests_and_leases(find, role, drain_s, lease_s):
    sets = (f"config.worker.drain_timeout_s={drain_s}", f"config.connector.lease_s={lease_s}")
    pod = main(find, "cpu-minimal", role, *sets)
    assert pod["terminationGracePeriodSeconds"] == drain_s + lease_s + 20
    command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["kvferry", "drain", "--ops-port", "9400", "--timeout", str(drain_s + lease_s + 10)]


def test_router_without_workers_can_be_found_by_them(find):
    service = find("cpu-minimal", "Service", "router-workers")["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    (address,) = config_of(find, "cpu-minimal", "decode")["worker"]["router_addresses"]
    assert address == "tcp://kvferry-router-workers.llm.svc.cluster.local:5570"


def test_store_that_is_not_ready_can_be_found_by_a_client_that_fits(find):
    assert find("external-redis", "Service", "kvstore")["spec"]["publishNotReadyAddresses"] is True
    set_of_workers = find("external-redis", "Service", "decode", "decode.kind=StatefulSet")["spec"]
    assert "publishNotReadyAddresses" not in set_of_workers


@pytest.mark.parametrize("preset", PRESETS)
def test_every_role_has_a_disruption_budget(helm, preset):
    roles = {role for role, _ in pods(helm, preset)} - {"test"}
    budgets = {
        item["spec"]["selector"]["matchLabels"]["app.kubernetes.io/component"]
        for item in helm.manifests(preset)
        if item["kind"] == "PodDisruptionBudget"
    }
    assert budgets == roles


def test_change_of_settings_rolls_the_pods(find):
    def checksum(*sets):
        annotations = find("cpu-minimal", "Deployment", "decode", *sets)["spec"]["template"]["metadata"]["annotations"]
        return annotations["kvferry/config-checksum"]

    assert checksum() == checksum("router.replicas=2")
    assert checksum() != checksum("config.cache.block_size=16")


# ---- settings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_kvferry_accepts_the_settings_of_every_role(helm, preset, tmp_path):
    for item in helm.manifests(preset):
        if item["kind"] == "ConfigMap" and "config.yaml" in item["data"]:
            for name, text in item["data"].items():
                path = tmp_path / name
                path.write_text(text)
                load_config(path)


def test_role_overrides_the_common_settings(find):
    sets = ("config.cache.block_size=32", "decode.config.cache.block_size=64")
    assert config_of(find, "cpu-minimal", "prefill", *sets)["cache"]["block_size"] == 32
    assert config_of(find, "cpu-minimal", "decode", *sets)["cache"]["block_size"] == 64


def test_worker_takes_as_many_threads_as_it_is_promised_cores(find):
    def threads(*sets):
        return config_of(find, "cpu-minimal", "prefill", *sets)["worker"].get("cpu_threads")

    assert threads() == 2
    assert threads("prefill.resources.limits.cpu=6") == 6
    for cpu, num_threads in {"2000m": 2, "1500m": 1, "2.9": 2, "500m": 1, "0.5": 1, "16": 16}.items():
        assert threads(f"prefill.resources.requests.cpu={cpu}") == num_threads
    assert threads("prefill.resources.requests.cpu=null") is None
    assert threads("config.worker.cpu_threads=5") == 5


def test_secrets_are_in_no_config_map_and_no_command(helm):
    key = "0123456789abcdef0123456789abcdef"
    for item in helm.manifests("cpu-minimal", f"security.clusterKey.value={key}"):
        assert (key in json.dumps(item)) is False
    secret = next(
        item for item in helm.manifests("cpu-minimal", f"security.clusterKey.value={key}") if item["kind"] == "Secret"
    )
    assert base64.b64decode(secret["data"]["cluster-key"]).decode() == key


def test_without_a_key_the_chart_makes_one_of_32_random_bytes(helm):
    def made():
        (secret,) = (
            item
            for item in yaml.load_all(
                helm.template("cpu-minimal", sets=("security.clusterKey.value=", "security.clusterKey.generate=true")),
                Loader=yaml.CSafeLoader,
            )
            if item and item["kind"] == "Secret"
        )
        return base64.b64decode(secret["data"]["cluster-key"])

    first, second = made(), made()
    assert len(base64.b64decode(first)) == 32
    assert first != second


def test_shared_memory_of_a_pod_is_sized_from_the_pool_in_it(find):
    def shm(preset, role, *sets):
        volumes = main(find, preset, role, *sets)["volumes"]
        return next(volume["emptyDir"] for volume in volumes if volume["name"] == "shm")

    assert shm("cpu-minimal", "prefill") == {"medium": "Memory", "sizeLimit": "64Mi"}
    assert shm("lmcache-server", "aggregated") == {"medium": "Memory", "sizeLimit": (64 << 20) + (256 << 20) + (4 << 30)}


def test_lmcache_server_is_a_sidecar_that_shares_memory_with_the_worker_only(find):
    pod = main(find, "lmcache-server", "aggregated")
    (sidecar,) = (container for container in pod["initContainers"] if container["name"] == "lmcache")
    assert sidecar["restartPolicy"] == "Always"
    assert {"name": "shm", "mountPath": "/dev/shm"} in sidecar["volumeMounts"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]
    assert config_of(find, "lmcache-server", "aggregated")["connector"]["lmcache"]["server_address"] == "tcp://127.0.0.1:5555"


def test_store_is_told_its_tiers_and_workers_where_it_is(find):
    store = config_of(find, "external-redis", "kvstore")["kvstore"]
    assert (store["bind_address"], store["disk_path"]) == ("tcp://0.0.0.0:5580", "/var/lib/kvferry")
    assert store["disk_bytes"] == (100 << 30) * 9 // 10  # of the volume
    assert store["redis_url"] == "redis://redis.data.svc:6379/0"  # in the file: `kvferry doctor` reads it in the pod
    address = config_of(find, "external-redis", "decode")["kvstore"]["address"]
    assert address == "tcp://kvferry-kvstore.llm.svc.cluster.local:5580"


def test_sizes_are_written_as_the_settings_have_them(find):
    sets = ["config.cache.memory_bytes=1.5GiB", "config.model.max_model_len=8k", "decode.config.kvstore.memory_bytes=512 MB"]
    extra = "config.connector.extra.largest_bytes=none"  # of a connector from outside: its keys have no meaning here
    config = config_of(find, "cpu-minimal", "decode", *sets, extra)
    found = (config["cache"]["memory_bytes"], config["model"]["max_model_len"], config["kvstore"]["memory_bytes"])
    assert found == (3 << 29, 8000, 512_000_000)
    assert config["connector"]["extra"] == {"largest_bytes": "none"}


def test_pool_in_huge_pages_is_apart_from_the_memory_limit(find):
    limits = [f"{role}.resources.limits.hugepages-2Mi=6Gi" for role in ("prefill", "decode")]
    sets = ["config.cache.huge_pages=always", f"config.cache.memory_bytes={6 << 30}", *limits]
    container = main(find, "cpu-minimal", "decode", *sets)["containers"][0]
    assert container["resources"]["limits"] == {"memory": "4Gi", "hugepages-2Mi": "6Gi"}
    assert config_of(find, "cpu-minimal", "decode", *sets)["cache"]["huge_pages"] == "always"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_store_in_a_worker_s_pod_is_on_its_loopback_and_shares_its_processes(find, role):
    pod = main(find, "store-sidecar", role)
    assert pod["shareProcessNamespace"] is True  # by which the worker opens the arena
    (sidecar,) = (container for container in pod["initContainers"] if container["name"] == "kvstore")
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["args"][:3] == ["kvstore", "--config", "/etc/kvferry/kvstore.yaml"]
    assert {"name": "store", "mountPath": "/var/lib/kvferry"} in sidecar["volumeMounts"]
    files = find("store-sidecar", "ConfigMap", role)["data"]
    store, worker = (yaml.safe_load(files[name])["kvstore"] for name in ("kvstore.yaml", "config.yaml"))
    assert store["bind_address"] == worker["address"] == "tcp://127.0.0.1:5580"
    assert (store["ops_port"], sidecar["ports"]) == (9401, [{"name": "store-ops", "containerPort": 9401}])
    assert store["disk_path"] == "/var/lib/kvferry"
    volume = next(volume for volume in pod["volumes"] if volume["name"] == "store")
    assert volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] == "100Gi"
    assert {entry["name"] for entry in sidecar["env"]} == {
        "KVFERRY_CLUSTER_KEY",
        "KVFERRY_OTHER_CLUSTER_KEYS",
        "KVFERRY_REDIS_PASSWORD",
    }
    assert "KVFERRY_REDIS_PASSWORD" not in environment(pod["containers"][0])


def test_a_store_beside_the_workers_has_no_pods_of_its_own_and_the_router_none(helm, find):
    kinds = {(item["kind"], item["metadata"]["name"]) for item in helm.manifests("store-sidecar")}
    assert not [kind for kind, name in kinds if name == "kvferry-kvstore"]
    router = main(find, "store-sidecar", "router")
    assert "shareProcessNamespace" not in router
    assert "kvstore.yaml" not in find("store-sidecar", "ConfigMap", "router")["data"]
    assert "shareProcessNamespace" not in main(find, "external-redis", "prefill")


def test_pod_with_a_store_has_time_to_flush_and_rolls_with_its_settings(find):
    pod = main(find, "store-sidecar", "prefill")
    assert pod["terminationGracePeriodSeconds"] == main(find, "external-redis", "prefill")["terminationGracePeriodSeconds"] + 10

    def checksum(*sets):
        template = find("store-sidecar", "Deployment", "prefill", *sets)["spec"]["template"]
        return template["metadata"]["annotations"]["kvferry/config-checksum"]

    assert checksum() != checksum("kvstore.config.kvstore.redis_ttl_s=60")


@pytest.mark.parametrize("preset", PRESETS)
def test_no_secret_is_in_a_command_line(helm, preset):
    for _, pod in pods(helm, preset):
        for container in containers(pod):
            secrets = {entry["name"] for entry in container.get("env", ()) if "secretKeyRef" in entry.get("valueFrom", {})}
            commands = [container.get(name) for name in ("command", "args", "lifecycle", "livenessProbe", "readinessProbe")]
            assert not secrets & set(re.findall(r"\$[({]?(\w+)", json.dumps(commands)))


def test_redis_password_is_in_the_environment_of_the_store_alone(helm):
    names = {
        container["name"]
        for _, pod in pods(helm, "external-redis")
        for container in containers(pod)
        if "KVFERRY_REDIS_PASSWORD" in json.dumps(container)
    }
    assert names == {"kvstore"}


def test_model_on_a_read_only_claim_is_not_fetched(find):
    pod = main(find, "gpu-rdma", "decode")
    assert "initContainers" not in pod
    assert environment(pod["containers"][0])["HF_HUB_OFFLINE"] == "1"
    assert next(volume for volume in pod["volumes"] if volume["name"] == "models")["persistentVolumeClaim"]["readOnly"] is True
    assert main(find, "cpu-minimal", "decode")["initContainers"][0]["name"] == "fetch-model"


@pytest.mark.parametrize(("role", "has_weights"), [("router", False), ("prefill", True), ("decode", True)])
def test_only_workers_fetch_weights(find, role, has_weights):
    (fetch,) = main(find, "cpu-minimal", role)["initContainers"]
    assert ("--no-weights" not in fetch["args"]) is has_weights


# ---- scaling ---------------------------------------------------------------------------------------------------------------


def test_replicas_are_left_to_the_scaler(find):
    assert "replicas" not in find("ha", "Deployment", "prefill")["spec"]
    assert "replicas" not in find("ha", "Deployment", "decode")["spec"]
    assert find("ha", "Deployment", "router")["spec"]["replicas"] == 2
    scaler = find("ha", "HorizontalPodAutoscaler", "prefill")["spec"]
    assert scaler["metrics"][0]["pods"]["metric"]["name"] == "kvferry_num_requests_waiting"
    triggers = find("ha", "ScaledObject", "decode")["spec"]["triggers"]
    assert triggers[0]["metadata"]["query"] == 'sum(kvferry_kv_cache_usage_perc{namespace="llm",pod=~"kvferry-decode-.*"})'


def test_keda_asks_the_router_how_many_workers_a_role_needs(find):
    triggers = find("ha", "ScaledObject", "decode", "decode.autoscaling.load=0.8")["spec"]["triggers"]
    asked = triggers[-1]["metadata"]
    selector = 'namespace="llm",pod=~"kvferry-router-.*",role="decode"'  # other releases of the namespace have their own demand
    demanded, offered = (f"kvferry_role_{name}_workers{{{selector}}}" for name in ("demanded", "offered"))
    assert asked["query"] == f"max({demanded}) > sum({offered}) or sum({offered})"
    assert (triggers[-1]["metricType"], asked["threshold"]) == ("AverageValue", "0.8")


def test_an_empty_answer_of_prometheus_is_an_error_not_zero_load(find):
    triggers = find("ha", "ScaledObject", "decode", "decode.autoscaling.load=0.8")["spec"]["triggers"]
    assert len(triggers) == 3
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in triggers} == {"false"}


@pytest.mark.parametrize("role", ["encode", "prefill", "decode", "aggregated"])
def test_exactly_the_roles_with_a_demand_can_be_scaled_by_their_load(helm, role):
    sets = [f"{role}.enabled=true", *(f"{role}.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "load=0.8"))]
    arguments = [part for value in sets for part in ("--set", value)]
    done = helm.run("template", "kvferry", "helm/kvferry", "--set", "security.insecure=true", *arguments)
    assert (done.returncode == 0) is (role in PLANNED_ROLES), done.stderr


@pytest.mark.parametrize("seconds", [300, 600])
def test_scalers_of_both_kinds_wait_before_they_scale_down(find, seconds):
    sets = [f"{role}.autoscaling.scaleDownSeconds={seconds}" for role in ("prefill", "decode") if seconds != 300]
    hpa = find("ha", "HorizontalPodAutoscaler", "prefill", *sets)["spec"]
    keda = find("ha", "ScaledObject", "decode", *sets)["spec"]
    for scaler in (hpa, keda["advanced"]["horizontalPodAutoscalerConfig"]):
        assert scaler["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == seconds
    assert "cooldownPeriod" not in keda  # it would be of a scaler to no pod at all
