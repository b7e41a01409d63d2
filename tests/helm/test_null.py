"""Helm takes out what is set to null: kvferry's own default holds then, or the chart says which value is missing."""

import pytest
import yaml

from core.config_router import RouterSection
from core.config_workers import ConnectorSection, ModelSection, WorkerSection
from tests.helm.conftest import CHART

pytestmark = pytest.mark.slow

WAITS = ("config.router.drain_timeout_s=null", "config.worker.drain_timeout_s=null", "config.connector.lease_s=null")
KEDA = tuple(f"decode.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "load=0.8"))


def sections(values, *path):
    """Return the paths of all sections of values.yaml, without kvferry's own settings."""
    inner = {key: value for key, value in values.items() if isinstance(value, dict) and key != "config"}
    return [each for key, value in inner.items() for each in (".".join((*path, key)), *sections(value, *path, key))]


SECTIONS = sections(yaml.safe_load((CHART / "values.yaml").read_text()))


def stderr(helm, preset, *sets):
    values = ("--values", str(CHART / "ci" / f"{preset}-values.yaml"))
    return helm.run("template", "kvferry", str(CHART), *values, *(part for one in sets for part in ("--set", one))).stderr


@pytest.mark.parametrize(
    "preset",
    ["cpu-minimal", *(pytest.param(preset, marks=pytest.mark.full) for preset in ("store-sidecar", "vllm-1p1d", "vllm-llm-d"))],
)
@pytest.mark.parametrize("path", SECTIONS)
def test_a_section_that_is_needed_is_named(helm, preset, path):
    said = stderr(helm, preset, f"{path}=null")
    assert "nil pointer" not in said, said


@pytest.mark.parametrize(
    ("preset", "sets", "said"),
    [
        ("cpu-minimal", ["encode=null"], "missing property 'encode'"),
        ("cpu-minimal", ["security.tls=null"], "at '/security': missing property 'tls'"),
        ("cpu-minimal", ["security.apiKeys=null"], "at '/security': missing property 'apiKeys'"),
        ("cpu-minimal", ["security.clusterKey=null"], "security.clusterKey: no key is given"),
        ("cpu-minimal", ["ports.http=null"], "at '/ports': missing property 'http'"),
        ("cpu-minimal", ["ports.ucx=null"], "at '/ports': missing property 'ucx'"),
        ("cpu-minimal", ["ports.ucx.last=null"], "at '/ports/ucx': missing property 'last'"),
        ("cpu-minimal", ["security.clusterKey.key=null"], "at '/security/clusterKey': missing property 'key'"),
        ("cpu-minimal", ["security.clusterKey.othersKey=null"], "at '/security/clusterKey': missing property 'othersKey'"),
        ("cpu-minimal", ["keda=null", *KEDA], "missing property 'keda'"),
        (
            "cpu-minimal",
            ["inferencePool.enabled=true", "inferencePool.endpointPicker=null"],
            "missing property 'endpointPicker'",
        ),
        *(
            ("cpu-minimal", [f"{section}.{value}=null"], f"at '/{section}': missing property '{value}'")
            for section, value in (
                *(("image", "repository"), ("network", "clusterDomain"), ("shm", "size"), ("modelCache", "kind")),
                *(("lmcache", "mode"), ("router", "kind"), ("prefill", "kind"), ("decode", "kind")),
                *(("router", "endpointDelaySeconds"), ("tests", "timeoutSeconds"), ("security", "insecure")),
            )
        ),
        ("cpu-minimal", ["kvstore.enabled=true", "kvstore.kind=null"], "at '/kvstore': missing property 'kind'"),
        ("store-sidecar", ["ports.storeOps=null"], "at '/ports': missing property 'storeOps'"),
        ("vllm-1p1d", ["vllm.image=null"], "at '/vllm': missing property 'image'"),
    ],
)
def test_what_is_missing_is_said(helm, preset, sets, said):
    assert said in stderr(helm, preset, *sets)


@pytest.mark.parametrize(
    ("preset", "sets"),
    [
        ("cpu-minimal", ["keda=null", "aggregated=null"]),
        ("cpu-minimal", ["security.clusterKey=null", "security.insecure=true"]),
        ("cpu-minimal", ["podSecurityContext=null", "securityContext=null"]),
        ("vllm-1p1d", ["vllm.arguments=null", "vllm.settings=null"]),
        ("cpu-minimal", ["vllm.image=null", "vllm.agent=null"]),
        ("cpu-minimal", ["ports.store=null", "ports.storeOps=null"]),
        ("cpu-minimal", ["prefill.resources=null", "prefill.pdb=null", "encode.kind=null", "kvstore.kind=null"]),
        ("store-sidecar", ["kvstore.kind=null"]),
        ("cpu-minimal", ["networkPolicy.clients=null", "ingress.annotations=null"]),
        ("vllm-llm-d", ["tests=null", "router.service=null", "router.kind=null", "router.endpointDelaySeconds=null"]),
        *(("cpu-minimal", [f"config.{section}=null"]) for section in ("model", "worker", "connector", "router")),
        ("cpu-minimal", ["config=null"]),
    ],
)
def test_what_is_not_needed_may_be_null(helm, preset, sets):
    assert helm.template(preset, sets=sets)


def test_without_a_certificate_the_test_of_a_release_asks_by_http(find):
    pod = find("cpu-minimal", "Pod", "test", "security.tls.existingSecret=null")
    assert "http://kvferry-router:80" in pod["spec"]["containers"][0]["args"]


def test_a_wait_of_kvferry_s_own_counts_in_the_grace_period(find):
    router, worker, connector = RouterSection(), WorkerSection(), ConnectorSection()
    waits = {"router": router.drain_timeout_s + 5} | dict.fromkeys(
        ("prefill", "decode"), worker.drain_timeout_s + connector.lease_s
    )
    for sets in (WAITS, ("config=null",)):
        for role, seconds in waits.items():
            pod = find("cpu-minimal", "Deployment", role, *sets)["spec"]["template"]["spec"]
            assert pod["terminationGracePeriodSeconds"] == seconds + 20


def test_a_grace_period_within_a_wait_of_kvferry_s_own_is_refused(helm):
    said = helm.refusal(*WAITS, "prefill.terminationGracePeriodSeconds=30")
    assert "prefill.terminationGracePeriodSeconds = 30: draining takes up to 60 s" in said


def test_kvferry_s_own_model_is_fetched_by_its_name(find):
    for role in ("router", "prefill", "decode"):
        pod = find("cpu-minimal", "Deployment", role, "config.model.name=null")["spec"]["template"]["spec"]
        (fetch,) = pod["initContainers"]
        assert fetch["args"][-1] == ModelSection().name


def test_vllm_gets_the_transports_of_its_plug_in(find):
    pod = find("vllm-1p1d", "Deployment", "prefill", "config.connector.transports=null")["spec"]["template"]["spec"]
    assert "kvferry.transports" not in str(pod["initContainers"])
