"""Every preset is linted, renders for every Kubernetes version that the chart allows, and is what the API server accepts."""

import importlib.util
import json
import re
import tarfile
from pathlib import Path

import jsonschema
import pytest

from core.errors import ConfigError
from router.images.hosts import HostRules

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvferry"
PRESETS = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").iterdir())
VERSIONS = [
    "1.29",
    *(pytest.param(f"1.{minor}", marks=pytest.mark.full) for minor in (30, 31, 32, 33, 34)),
    "1.35",
]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CUSTOM = load(Path(__file__).with_name("custom_resources.py")).SPECS


@pytest.mark.parametrize("preset", PRESETS)
def test_lint_finds_nothing(helm, preset):
    done = helm.run("lint", "--strict", str(CHART), "--values", str(CHART / "ci" / f"{preset}-values.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_manifest_is_valid(helm, check_kubernetes, preset, version):
    manifests = helm.manifests(preset, kube_version=version)
    assert len(manifests) > 8
    for manifest in manifests:
        custom = CUSTOM.get((manifest["apiVersion"], manifest["kind"]))
        if custom is None:
            check_kubernetes(manifest, version)
        else:
            jsonschema.validate(manifest["spec"], custom)


def test_every_role_can_be_a_stateful_set_with_a_service_of_its_own(helm, check_kubernetes):
    roles = ("router", "prefill", "decode")
    manifests = helm.manifests("cpu-minimal", *(f"{role}.kind=StatefulSet" for role in roles))
    for manifest in manifests:
        check_kubernetes(manifest, "1.33")
    services = {item["metadata"]["name"] for item in manifests if item["kind"] == "Service"}
    sets = {item["metadata"]["name"]: item["spec"]["serviceName"] for item in manifests if item["kind"] == "StatefulSet"}
    assert set(sets) == {f"kvferry-{role}" for role in roles}
    assert set(sets.values()) <= services


def test_validation_notices_a_key_that_kubernetes_does_not_know(helm, check_kubernetes):
    pod = json.loads(json.dumps(next(item for item in helm.manifests("cpu-minimal") if item["kind"] == "Pod")))
    check_kubernetes(pod, "1.33")
    pod["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(jsonschema.ValidationError):
        check_kubernetes(pod, "1.33")


def test_no_two_manifests_have_the_same_name(helm):
    for preset in PRESETS:
        names = [(item["kind"], item["metadata"]["name"]) for item in helm.manifests(preset)]
        assert len(names) == len(set(names)), preset


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "golden").glob("*.yaml")), ids=lambda path: path.stem)
def test_renders_as_recorded(helm, path):
    assert helm.template(path.stem) == path.read_text(), "meant? then `make chart` records it, and the diff shows what changes"


def notes(helm, preset, *sets):
    arguments = [part for value in sets for part in ("--set", value)]
    values = str(CHART / "ci" / f"{preset}-values.yaml")
    done = helm.run("install", "--dry-run=client", "kvferry", str(CHART), "--values", values, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_notes_tell_the_effective_topology_and_what_is_open(helm):
    closed = notes(helm, "ha", "networkPolicy.enabled=true")
    assert "router     2 x Deployment" in closed
    assert "decode     2 to 12 (keda) x Deployment, KV by p2p over tcp" in closed
    assert "OPEN" not in closed
    opened = notes(
        helm, "external-redis", "networkPolicy.enabled=false", "security.clusterKey.existingSecret=", "security.insecure=true"
    )
    assert "KV by p2p and store over tcp" in opened
    assert "NOT authenticated: security.insecure is set" in opened
    assert opened.count("OPEN") == 2  # no API key, no network policy
    assert "UCX        has no authentication" in notes(helm, "gpu-rdma")


def test_notes_say_whose_metrics_the_chart_has_nobody_scrape(helm):
    sets = ("decode.autoscaling.load=0.8", "monitoring.podMonitor.enabled=false", "monitoring.serviceMonitor.enabled=false")
    assert "scaling" not in notes(helm, "ha", sets[0])
    missing = notes(helm, "ha", *sets)
    assert "scaling    of decode needs its metrics in Prometheus: monitoring.podMonitor is off" in missing
    assert "scaling    of decode needs the router's metrics in Prometheus: monitoring.serviceMonitor is off" in missing
    assert "scaling    of prefill" not in missing, "an HPA asks its adapter"


def test_older_kubernetes_is_refused(helm):
    done = helm.run("template", "kvferry", str(CHART), "--kube-version", "1.28")
    assert "incompatible with Kubernetes" in done.stderr


def test_package_holds_the_schema_and_the_presets(helm, tmp_path):
    done = helm.run("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tgz"))) as package:
        names = package.getnames()
    assert "kvferry/values.schema.json" in names
    assert {f"kvferry/ci/{preset}-values.yaml" for preset in PRESETS} <= set(names)


def test_schema_is_that_of_the_settings():
    written = (CHART / "values.schema.json").read_text()
    assert written == load(ROOT / "helm" / "values_schema.py").render(), "run `make chart`"


@pytest.mark.parametrize(
    "entry",
    [
        *("a.example", "*.A_b.example:8443", " 10.0.0.0/8 ", "[2001:db8::1]", "::/0", "fe80::1%eth0"),
        *("255.249.199.99", "0.0.0.0/0", "300.1.1.1"),
    ],
)
def test_schema_takes_every_host_of_images_that_the_router_takes(entry):
    HostRules([entry], "")
    assert image_hosts().search(entry)


@pytest.mark.parametrize(
    "entry",
    [
        *("", "*", "a b", "http://a.example", "a.example/x.png", "bücher.example", "10.0.0.0/33", "::/129", "[::1]:80"),
        *("999.0.0.0/8", "256.0.0.0/8", "010.0.0.0/8", "00.0.0.0/8", "10.0.0/8", "fe80::1%a%b"),
    ],
)
def test_schema_refuses_what_is_no_host_of_images(entry):
    with pytest.raises(ConfigError):
        HostRules([entry], "")
    assert not image_hosts().search(entry)


@pytest.mark.parametrize("entry", ["10.0.0.0/08", "2001:db8::/032"])
def test_schema_refuses_prefixes_that_no_network_policy_takes(entry):
    HostRules([entry], "")
    assert not image_hosts().search(entry)


def image_hosts():
    schema = json.loads((CHART / "values.schema.json").read_text())
    return re.compile(schema["$defs"]["ImagesSection"]["properties"]["allowed_hosts"]["items"]["pattern"])
