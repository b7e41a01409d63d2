"""Values that are wrong, or do not go together, are refused by Helm with a message that says what to change."""

import json

import pytest

from core.config_tree import is_size
from tests.helm.conftest import CHART

pytestmark = pytest.mark.slow

CASES = {
    "unknown key": (["prefil.replicas=2"], "additional properties 'prefil' not allowed"),
    "unknown key of a role": (["decode.replica=2"], "at '/decode': additional properties 'replica' not allowed"),
    "wrong type": (["ports.http=abc"], "at '/ports/http': got string, want integer"),
    "unknown setting": (["config.worker.drain_timeout=3"], "at '/config/worker': additional properties 'drain_timeout'"),
    "setting out of range": (["config.cache.watermark=2"], "at '/config/cache/watermark'"),
    "origin that no browser sends": (["config.router.cors_origins={abc}"], "at '/config/router/cors_origins/0'"),
    "unknown setting of one role": (["decode.config.cache.blocksize=16"], "at '/decode/config/cache'"),
    "address that the chart sets": (["config.worker.ops_port=1"], "additional properties 'ops_port' not allowed"),
    "secret in a config map": (["config.router.api_key=secret"], "additional properties 'api_key' not allowed"),
    "short cluster key": (["security.clusterKey.value=short"], "at '/security/clusterKey/value'"),
    "hostPath": (["prefill.hostPath=/dev"], "additional properties 'hostPath' not allowed"),
    "hostIPC": (["prefill.hostIPC=true"], "additional properties 'hostIPC' not allowed"),
    "latest": (["image.tag=latest"], 'image.tag: "latest" names another image every day'),
    "half a pair": (["decode.enabled=false"], "prefill.enabled and decode.enabled: a prompt needs one worker of each"),
    "no worker": (["prefill.enabled=false", "decode.enabled=false"], "no worker is enabled"),
    "no router": (["router.enabled=false"], "router.enabled: workers need a router"),
    "two keys": (
        ["security.clusterKey.existingSecret=a", "security.clusterKey.value=0123456789012345678901234567890123456789"],
        "existingSecret and value are two keys",
    ),
    "insecure with a key": (["security.insecure=true", "security.clusterKey.existingSecret=a"], "remove one of the two"),
    "one port twice": (["ports.data=8000"], "are both 8000; every port needs its own number"),
    "port within UCX's": (["ports.data=20001"], "ports.data = 20001 lies in ports.ucx"),
    "no UCX ports": (["ports.ucx.first=30000"], "ports.ucx.first = 30000 must be at most"),
    "grace period too short": (
        ["prefill.terminationGracePeriodSeconds=30"],
        "draining takes up to 90 s, so the pod would be killed in the middle of it; give at least 95",
    ),
    "lease longer than the grace period": (
        ["config.connector.lease_s=120", "prefill.terminationGracePeriodSeconds=90"],
        "draining takes up to 180 s",
    ),
    "shared memory across pods": (["config.connector.transports={shm,tcp}"], "shm works between processes of one pod only"),
    "RDMA without nixl": (["rdma.enabled=true"], "rdma.enabled: only transport nixl uses RDMA"),
    "GPU that idles": (["decode.gpu.count=1"], "config.model.device is cpu: set it to cuda"),
    "pool beyond the memory limit": (["config.cache.memory_bytes=5000000000"], "does not even hold the KV pool"),
    "pool beyond the memory limit, as a size": (["config.cache.memory_bytes=5GiB"], "does not even hold the KV pool"),
    "setting that is no size": (["config.cache.memory_bytes=5 Gigs"], "at '/config/cache/memory_bytes'"),
    "size without a byte": (
        ["config.cache.memory_bytes=0GiB"],
        "config.cache.memory_bytes = 0GiB: expected a whole number, at least 1 and",
    ),
    "size with a part of a byte": (["config.cache.memory_bytes=1.0001Ki"], "config.cache.memory_bytes = 1.0001Ki: expected"),
    "endless size": (["config.cache.memory_bytes=99999999T"], "at least 1 and at most 999999999999999999"),
    "part of a size of a role": (
        ["prefill.config.cache.memory_bytes=1.5B"],
        "prefill.config.cache.memory_bytes = 1.5B: expected",
    ),
    "default port in an origin": (["config.router.cors_origins={https://a:443}"], "at '/config/router/cors_origins/0'"),
    "host of an origin in upper case": (["config.router.cors_origins={https://A}"], "at '/config/router/cors_origins/0'"),
    "memory that is no quantity": (["prefill.resources.limits.memory=4 GB"], "at '/prefill/resources/limits/memory'"),
    "scaling from more to fewer": (
        [*(f"decode.autoscaling.{part}" for part in ("type=hpa", "min=3", "max=2", "metrics.kvferry_num_requests_running=9"))],
        "decode.autoscaling.min = 3 must be at most max = 2",
    ),
    "load of nothing": (
        [*(f"decode.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "load=0.0"))],
        "at '/decode/autoscaling/load'",
    ),
    "load without KEDA": (
        [*(f"decode.autoscaling.{part}" for part in ("type=hpa", "min=1", "max=2", "load=0.8"))],
        "decode.autoscaling.load: it is asked of the router's metrics, which only KEDA can",
    ),
    "load of encode workers": (
        ["encode.enabled=true", *(f"encode.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "load=0.8"))],
        "encode.autoscaling.load: the router knows no demand for this role; use encode.autoscaling.metrics",
    ),
    "metric without a number": (
        [*(f"decode.autoscaling.{part}" for part in ("type=hpa", "min=1", "max=2", "metrics.kvferry_requests=four"))],
        "at '/decode/autoscaling/metrics/kvferry_requests'",
    ),
    "unit that KEDA does not know": (
        [*(f"decode.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "metrics.kvferry_usage=700m"))],
        "decode.autoscaling.metrics.kvferry_usage = 700m: KEDA takes a plain number",
    ),
    "negative surge": (["decode.rollingUpdate.maxSurge=-1"], "at '/decode/rollingUpdate/maxSurge'"),
    "budget in words": (["decode.pdb.maxUnavailable=one"], "at '/decode/pdb/maxUnavailable'"),
    "grace of a readiness probe": (
        ["decode.probes.readiness.terminationGracePeriodSeconds=5"],
        "additional properties 'terminationGracePeriodSeconds' not allowed",
    ),
    "name that is no label": (["nameOverride=" + "n" * 64], "at '/nameOverride'"),
    "name that no Service can have": (["fullnameOverride=7b"], "at '/fullnameOverride'"),
    "longer timeout than a route has": (["httpRoute.requestTimeout=100000s"], "at '/httpRoute/requestTimeout'"),
    "both scalers": (["decode.autoscaling.type=both"], "at '/decode/autoscaling"),
    "claim without a name": (["modelCache.kind=existingClaim"], "modelCache.existingClaim: name the claim"),
    "collector's port": (
        ["config.tracing.endpoint=http://x:99999"],
        "config.tracing.endpoint: the port of http://x:99999 must be 1 to 65535",
    ),
    "collector's port 0": (["config.tracing.endpoint=http://x:0"], "the port of http://x:0 must be 1 to 65535"),
    "collector's endless port": (
        ["config.tracing.endpoint=http://x:99999999999999999999"],
        "the port of http://x:99999999999999999999 must be 1 to 65535",
    ),
    "port of a host of images": (
        ["config.router.images.allowed_hosts={a.example,b.example:99999}"],
        "router.config.router.images.allowed_hosts: the port of b.example:99999 must be 1 to 65535",
    ),
    "port 0 of a host of images": (
        ["config.router.images.allowed_hosts={b.example:0}"],
        "router.config.router.images.allowed_hosts: the port of b.example:0 must be 1 to 65535",
    ),
    "network of images with a netmask": (
        ["config.router.images.allowed_hosts={a.example,10.0.0.0/255.0.0.0}"],
        "router.config.router.images.allowed_hosts: 10.0.0.0/255.0.0.0 has a netmask; give the number of its bits",
    ),
    "network of images that is none": (
        ["config.router.images.allowed_hosts={10.1.2.3/8}"],
        "router.config.router.images.allowed_hosts: 10.1.2.3/8 is no network, its address has bits beyond the prefix",
    ),
    "address of images with a port": (
        ["config.router.images.allowed_hosts={10.0.0.1:8080}"],
        "router.config.router.images.allowed_hosts: 10.0.0.1:8080 is an address with a port; an address allows all ports",
    ),
    "prefix of images beyond an address": (
        ["config.router.images.allowed_hosts={10.0.0.0/33}"],
        "at '/config/router/images/allowed_hosts/0': '10.0.0.0/33' does not match pattern",
    ),
    **{
        f"{address} as an address of images": (
            [f"config.router.images.allowed_hosts={{{address}}}"],
            f"router.config.router.images.allowed_hosts: {address} is no IPv6 address",
        )
        for address in ("1::2::3", ":::", "[12345::1]", "1:2:3:4:5:6:7/64", "1:2:3:4::5:6:7:8", "::ffff:256.1.1.1", "1.2.3.4::")
    },
    "host of images in another script": (
        ["config.router.images.allowed_hosts={bücher.example}"],
        "at '/config/router/images/allowed_hosts/0': 'bücher.example' does not match pattern",
    ),
    "path of images": (
        ["config.router.images.allowed_hosts={cdn.example/a.png}"],
        "at '/config/router/images/allowed_hosts/0': 'cdn.example/a.png' does not match pattern",
    ),
    "empty cache that is read-only": (["modelCache.readOnly=true"], "modelCache.readOnly: an emptyDir starts empty"),
    "LMCache nowhere": (["lmcache.mode=external"], "lmcache.host: say where"),
    "LMCache without an image": (["lmcache.mode=sidecar"], "lmcache.image.repository: name the image"),
    "arena beyond the memory limit": (
        ["kvstore.enabled=true", "config.kvstore.memory_bytes=9000000000"],
        "kvstore.resources.limits.memory = 8Gi does not hold the arena",
    ),
    "huge pages that no container gets": (
        ["config.cache.huge_pages=always"],
        "config.cache.huge_pages = always, but prefill.resources.limits names no hugepages-2Mi",
    ),
    "too few huge pages": (
        ["config.cache.huge_pages=always", "prefill.resources.limits.hugepages-2Mi=512Mi"],
        "512Mi of huge pages do not hold the 1073741824 bytes of config.cache.memory_bytes",
    ),
    "huge pages that no store gets": (
        ["kvstore.enabled=true", "config.kvstore.huge_pages=always"],
        "kvstore.resources.limits names no hugepages-2Mi",
    ),
    "several stores beside a worker": (
        ["kvstore.enabled=true", "kvstore.mode=sidecar", "kvstore.replicas=2"],
        "kvstore.replicas = 2: one store serves all workers",
    ),
    "scaled stores beside workers": (
        [
            "kvstore.enabled=true",
            "kvstore.mode=sidecar",
            *(f"kvstore.autoscaling.{part}" for part in ("type=hpa", "min=1", "max=2", "metrics.kvferry_kvstore_clients=9")),
        ],
        "kvstore.autoscaling: a store is not scaled",
    ),
    "arena beyond the memory limit of a sidecar": (
        ["kvstore.enabled=true", "kvstore.mode=sidecar", "config.kvstore.memory_bytes=9000000000"],
        "kvstore.resources.limits.memory = 8Gi does not hold the arena",
    ),
    "port of the LMCache server twice": (
        ["lmcache.mode=sidecar", "lmcache.image.repository=x", "lmcache.image.tag=v1", "lmcache.httpPort=9400"],
        "lmcache.httpPort and ports.ops are both 9400 in the pods of prefill workers",
    ),
    "Redis without a store": (["kvstore.redis.enabled=true"], "kvstore.redis: Redis is a tier of the store"),
    "Redis nowhere": (["kvstore.enabled=true", "kvstore.redis.enabled=true"], "kvstore.redis.host: say where"),
}


@pytest.mark.parametrize(("sets", "message"), CASES.values(), ids=CASES)
def test_is_refused_with_what_to_change(helm, sets, message):
    assert message in helm.refusal(*sets)


def bounds_of_sizes():
    """Return the settings that may be sizes, each with one beyond each of the bounds that numbers have."""
    definitions = json.loads((CHART / "values.schema.json").read_text())["$defs"]

    def within(section, path):
        for name, setting in definitions[section]["properties"].items():
            if "$ref" in setting:
                yield from within(setting["$ref"].rpartition("/")[2], f"{path}.{name}")
            elif is_size(name):
                beyond = [setting["minimum"] - 1, setting.get("maximum", 10**18 - 1) + 1]
                yield from ((f"{path}.{name}", f"{number}B") for number in beyond if number >= 0)

    return list(within("KVFerryConfig", "config"))


@pytest.mark.parametrize(("setting", "size"), bounds_of_sizes())
def test_size_beyond_the_bounds_of_its_number_is_refused_by_name(helm, setting, size):
    assert f"{setting} = {size}: expected a whole number" in helm.refusal(f"{setting}={size}")
