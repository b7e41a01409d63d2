"""Common adaptations of charts: environment, volumes, users, probes, ingress, devices, several releases."""

import json
import shutil

import jsonschema
import pytest
import yaml

from tests.helm.custom_resources import SPECS

pytestmark = pytest.mark.slow

PROXY = ("decode.extraEnv[0].name=HTTPS_PROXY", "decode.extraEnv[0].value=http://proxy:3128")


def pod_of(find, role, *sets, preset="cpu-minimal"):
    return find(preset, "Deployment", role, *sets)["spec"]["template"]["spec"]


def both(pod):
    """Return the init container that fetches the model, and the main one."""
    (fetch,) = (one for one in pod["initContainers"] if one["name"] == "fetch-model")
    return fetch, pod["containers"][0]


def test_fetching_a_model_has_the_environment_of_its_role(find):
    sets = (*PROXY, "decode.envFrom[0].secretRef.name=mirror")
    for container in both(pod_of(find, "decode", *sets)):
        assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
        assert container["envFrom"] == [{"secretRef": {"name": "mirror"}}]


def test_volumes_of_a_role_are_mounted(find, check_kubernetes):
    sets = (
        "decode.extraVolumes[0].name=ca",
        "decode.extraVolumes[0].configMap.name=corporate-ca",
        "decode.extraVolumeMounts[0].name=ca",
        "decode.extraVolumeMounts[0].mountPath=/etc/ssl/corporate",
    )
    pod = pod_of(find, "decode", *sets)
    assert {"name": "ca", "configMap": {"name": "corporate-ca"}} in pod["volumes"]
    for container in both(pod):
        assert {"name": "ca", "mountPath": "/etc/ssl/corporate"} in container["volumeMounts"]
    check_kubernetes(find("cpu-minimal", "Deployment", "decode", *sets), "1.33")
    assert "ca" not in json.dumps([volume["name"] for volume in pod_of(find, "prefill", *sets)["volumes"]])


def test_platform_may_choose_users(find, helm):
    sets = tuple(f"podSecurityContext.{key}=null" for key in ("runAsUser", "runAsGroup", "fsGroup"))
    manifests = helm.manifests("cpu-minimal", *sets)
    specs = [item["spec"]["template"]["spec"] for item in manifests if item["kind"] == "Deployment"]
    specs += [item["spec"] for item in manifests if item["kind"] == "Pod"]
    assert len(specs) == 4
    for spec in specs:
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & spec["securityContext"].keys()
        assert spec["securityContext"]["runAsNonRoot"] is True


def test_role_overrides_single_keys_of_the_security_context(find):
    sets = ("decode.podSecurityContext.fsGroup=2000", "decode.securityContext.readOnlyRootFilesystem=false")
    pod = pod_of(find, "decode", *sets)
    assert (pod["securityContext"]["fsGroup"], pod["securityContext"]["runAsUser"]) == (2000, 10001)
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod_of(find, "prefill", *sets)["securityContext"]["fsGroup"] == 10001


def test_probes_and_the_deadline_of_a_rollout_can_be_set(find):
    sets = ("decode.probes.startup.failureThreshold=720", "decode.probes.readiness.timeoutSeconds=3")
    deployment = find("cpu-minimal", "Deployment", "decode", *sets)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["startupProbe"]["failureThreshold"] == 720
    assert container["readinessProbe"]["timeoutSeconds"] == 3
    assert deployment["spec"]["progressDeadlineSeconds"] == 1800 + 720 * 5 + 60  # a slow start is no failed rollout
    chosen = find("cpu-minimal", "Deployment", "decode", "decode.progressDeadlineSeconds=99")
    assert chosen["spec"]["progressDeadlineSeconds"] == 99


@pytest.mark.parametrize(
    ("preset", "role", "seconds"),
    [
        pytest.param("cpu-minimal", "router", 1800 + 900, id="the model is fetched"),
        pytest.param("gpu-rdma", "decode", 900, id="the model is on a claim"),
        pytest.param("vllm-1p1d", "decode", 2 * 1800, id="vLLM starts, then the agent"),
        pytest.param("vllm-llm-d", "decode", 1800, id="vLLM starts"),
    ],
)
def test_a_rollout_waits_for_everything_that_a_pod_does_before_it_is_ready(find, preset, role, seconds):
    assert find(preset, "Deployment", role)["spec"]["progressDeadlineSeconds"] == seconds + 60


def test_devices_can_be_claimed(find, check_kubernetes):
    claim = "decode.resourceClaims[0]"
    sets = (f"{claim}.name=gpu", f"{claim}.resourceClaimTemplateName=one-gpu", f"{claim}.request=card")
    deployment = find("cpu-minimal", "Deployment", "decode", *sets)
    pod = deployment["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpu", "request": "card"}]
    assert "claims" not in both(pod)[0]["resources"]  # a model is fetched without a device
    check_kubernetes(deployment, "1.34")


def test_ingress_leads_to_the_router(find, check_kubernetes):
    sets = ("ingress.enabled=true", "ingress.className=nginx", "ingress.hosts={llm.example.com}")
    found = find("cpu-minimal", "Ingress", "router", *sets)
    check_kubernetes(found, "1.33")
    (rule,) = found["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    assert rule["http"]["paths"][0]["backend"] == {"service": {"name": "kvferry-router", "port": {"name": "http"}}}
    (odd,) = find("cpu-minimal", "Ingress", "router", *sets, r"ingress.path=/a\, b")["spec"]["rules"]
    assert odd["http"]["paths"][0]["path"] == "/a, b"


ROUTE = ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=public", "httpRoute.requestTimeout=600s")
POOL = ("inferencePool.enabled=true", "inferencePool.endpointPicker.name=picker")


def test_route_leads_to_the_router_or_to_its_pool(find):
    spec = find("cpu-minimal", "HTTPRoute", "router", *ROUTE)["spec"]
    jsonschema.validate(spec, SPECS["gateway.networking.k8s.io/v1", "HTTPRoute"])
    assert spec["rules"][0]["backendRefs"] == [{"name": "kvferry-router", "port": 80}]
    assert spec["rules"][0]["timeouts"] == {"request": "600s"}
    pooled = find("cpu-minimal", "HTTPRoute", "router", *ROUTE, *POOL, "httpRoute.toInferencePool=true")["spec"]
    jsonschema.validate(pooled, SPECS["gateway.networking.k8s.io/v1", "HTTPRoute"])
    assert pooled["rules"][0]["backendRefs"][0]["kind"] == "InferencePool"


def test_pool_is_the_routers(find):
    spec = find("cpu-minimal", "InferencePool", "router", *POOL)["spec"]
    jsonschema.validate(spec, SPECS["inference.networking.k8s.io/v1", "InferencePool"])
    labels = pod_labels(find("cpu-minimal", "Deployment", "router"))
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert spec["targetPorts"] == [{"number": 8000}]


def test_nothing_leads_in_by_default(helm):
    kinds = {item["kind"] for item in helm.manifests("cpu-minimal")}
    assert not {"Ingress", "HTTPRoute", "InferencePool"} & kinds


@pytest.mark.parametrize(
    ("values", "is_expected"),
    [
        (["config.connector.name=store", "kvstore.enabled=true"], False),
        (["config.connector.name=offload"], False),
        (["config.connector.name=multi", "config.connector.connectors={p2p,offload}"], True),
        (["aggregated.enabled=true"], False),
    ],
)
def test_a_handoff_is_only_expected_where_every_request_makes_one(find, values, is_expected):
    memory = (f"{role}.resources.limits.memory=24Gi" for role in ("prefill", "decode"))
    (container,) = find("cpu-minimal", "Pod", "test", *values, *memory)["spec"]["containers"]
    assert ("--expect-handoff" in container["args"]) == is_expected


def test_further_objects_are_rendered(helm, tmp_path):
    values = tmp_path / "values.yaml"
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "plain"}},
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: '{{ .Release.Name }}-more'}\n",
    ]
    values.write_text(yaml.safe_dump({"extraObjects": objects, "security": {"insecure": True}}))
    done = helm.run("template", "llama", "helm/kvferry", "--values", str(values))
    names = {item["metadata"]["name"] for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item}
    assert {"plain", "llama-more"} <= names


# ---- several releases ------------------------------------------------------------------------------------------------------


def pod_labels(workload):
    return workload["spec"]["template"]["metadata"]["labels"]


def release(helm, name):
    done = helm.run("template", name, "helm/kvferry", "--namespace", "llm", "--set", "security.insecure=true")
    assert done.returncode == 0, done.stderr
    return [item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item]


NUMBERS = (
    "nameOverride=1e3",
    "fullnameOverride=llm",
    "serviceAccount.name=7",
    "imagePullSecrets={123}",
    "modelCache.hfTokenSecret.name=9",
    "security.clusterKey.existingSecret=1e5",
    "security.clusterKey.key=1",
    "security.apiKeys.existingSecret=true",
    "security.tls.existingSecret=0x1",
    "decode.priorityClassName=100",
    "decode.runtimeClassName=1",
    "decode.schedulerName=2",
    "modelCache.kind=existingClaim",
    "modelCache.existingClaim=3",
    "ingress.enabled=true",
    "ingress.className=4",
    "ingress.hosts={llm.example.com}",
    "kvstore.enabled=true",
    "kvstore.disk.size=1Gi",
    "kvstore.disk.storageClassName=5",
    "kvstore.redis.enabled=true",
    "kvstore.redis.host=redis",
    "kvstore.redis.existingSecret=6",
)


def test_names_that_look_like_numbers_stay_names(helm, check_kubernetes):
    arguments = [part for value in NUMBERS for part in ("--set" if ".enabled=" in value else "--set-string", value)]
    done = helm.run("template", "123", "helm/kvferry", "--kube-version", "1.33", *arguments)
    assert done.returncode == 0, done.stderr
    for manifest in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader):
        if manifest:
            check_kubernetes(manifest, "1.33")


@pytest.mark.parametrize("name", ["123", "a.b"])
def test_a_release_whose_services_could_have_no_such_name_is_refused(helm, name):
    done = helm.run("template", name, "helm/kvferry", "--set", "security.insecure=true")
    assert "set fullnameOverride" in done.stderr


@pytest.mark.parametrize(
    "names",
    [
        ("llama", "qwen"),
        ("kvferry", "kvferry-2"),
        ("a-model-with-quite-a-long-name-of-version-1", "a-model-with-quite-a-long-name-of-version-2"),
    ],
)
def test_releases_of_two_models_share_no_name_and_no_pod(helm, names):
    first, second = (release(helm, name) for name in names)

    def identities(manifests):
        return {(item["kind"], item["metadata"]["name"]) for item in manifests}

    assert not identities(first) & identities(second)
    foreign = [pod_labels(item) for item in second if item["kind"] == "Deployment"]
    for item in first:
        selector = item.get("spec", {}).get("selector", {})
        labels = selector.get("matchLabels", selector)
        if labels and item["kind"] in ("Deployment", "Service", "PodDisruptionBudget"):
            assert not [pod for pod in foreign if labels.items() <= pod.items()]
    assert all(len(name) <= 63 for _, name in identities(first))


# ---- upgrades --------------------------------------------------------------------------------------------------------------


def test_new_version_of_the_chart_alone_replaces_no_pod(helm, tmp_path):
    """Another image would, by its own name; labels and annotations of pods name no version."""
    copied = tmp_path / "kvferry"
    shutil.copytree("helm/kvferry", copied)
    text = (copied / "Chart.yaml").read_text()
    (copied / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0", "\nversion: 0.1.1"))

    def templates(chart):
        done = helm.run("template", "kvferry", str(chart), "--set", "security.insecure=true")
        assert done.returncode == 0, done.stderr
        workloads = [
            item for item in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if item and item["kind"] == "Deployment"
        ]
        return {item["metadata"]["name"]: item["spec"] for item in workloads}

    assert templates(copied) == templates("helm/kvferry")
