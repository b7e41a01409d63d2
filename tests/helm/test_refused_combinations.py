"""Values that are accepted one by one, but that cannot work together, are refused when the chart is rendered."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CHART = Path(__file__).parents[2] / "helm/kvferry"
STORE = ("kvstore.enabled=true",)
SCALED = tuple(f"kvstore.autoscaling.{part}" for part in ("type=hpa", "min=1", "max=2", "metrics.kvferry_kvstore_clients=9"))
CUDA = ("config.model.device=cuda", "prefill.gpu.count=1", "decode.gpu.count=1")
AGGREGATED = ("prefill.enabled=false", "decode.enabled=false", "aggregated.enabled=true")

CASES = {
    "several stores": ((*STORE, "kvstore.replicas=3"), "kvstore.replicas = 3: one store serves all workers"),
    "no store": ((*STORE, "kvstore.replicas=0"), "kvstore.replicas = 0: one store"),
    "scaled store": ((*STORE, *SCALED), "kvstore.autoscaling: a store is not scaled"),
    "deployment with a disk": (
        (*STORE, "kvstore.kind=Deployment", "kvstore.disk.size=10Gi"),
        "kvstore.kind = Deployment: only a StatefulSet has a disk of its own",
    ),
    "second GPU idles": ((*CUDA, "prefill.gpu.count=2"), "prefill.gpu.count = 2: a worker computes on one GPU"),
    "no GPU for cuda": (("config.model.device=cuda",), "prefill.config.model.device = cuda, but its pods get no GPU"),
    "no GPU for cuda of one role": ((*CUDA, "decode.gpu.count=0"), "set decode.gpu.count to 1"),
    "no GPU for cuda of encode": ((*CUDA, "encode.enabled=true"), "set encode.gpu.count to 1"),
    "another model": (("decode.config.model.name=gemma3-270m",), 'decode.config.model.name = "gemma3-270m", but prefill has'),
    "another model of the router": (("router.config.model.name=gemma3-270m",), "router.config.model.name"),
    "another dtype": (
        ("decode.config.model.dtype=bfloat16",),
        'decode.config.model.dtype = "bfloat16", but prefill has "auto"',
    ),
    "8-bit weights in one role": (
        ("decode.config.model.quantization=int8",),
        'decode.config.model.quantization = "int8", but prefill has "none"',
    ),
    "8-bit weights of vLLM": (
        ("engine=vllm", "config.model.quantization=int8"),
        "prefill.config.model.quantization: it is for our own engine; remove it, and give vLLM its --quantization",
    ),
    "8-bit weights on a GPU": (
        (*CUDA, "config.model.quantization=int8"),
        "config.model.quantization = int8, but its pods compute on a GPU: set prefill.config.model.device to cpu",
    ),
    "prefixes shared by some": (
        ("decode.config.connector.peer_prefixes=true",),
        'decode.config.connector.peer_prefixes = "true", but prefill has "false"',
    ),
    "prefixes without p2p": (
        ("config.connector.peer_prefixes=true", "config.connector.name=offload"),
        "config.connector.peer_prefixes: it is of connector p2p, which is not among offload",
    ),
    "another connector": (("decode.config.connector.name=offload",), 'decode.config.connector.name = "offload", but prefill'),
    "other connectors": (
        ("config.connector.name=multi", "config.connector.connectors={p2p,store}", "decode.config.connector.connectors={p2p}"),
        "decode.config.connector.connectors",
    ),
    "unknown connector": (("config.connector.name=p2q",), '"p2q" is no connector; take p2p, lmcache'),
    "unknown part of multi": (("config.connector.name=multi", "config.connector.connectors={p2p,stroe}"), '"stroe" is no conn'),
    "multi of nothing": (("config.connector.name=multi",), "the list is for connector.name = multi, which needs one"),
    "connectors without multi": (("config.connector.connectors={p2p,store}",), "the list is for connector.name = multi"),
    "unknown transport": (("config.connector.transports={rdma}",), '"rdma" is no transport'),
    "unknown connector of embeddings": (("config.ec_connector.name=p2q",), '"p2q" is no connector of embeddings; take p2p or'),
    "unknown transport of embeddings": (
        ("config.ec_connector.name=p2p", "config.ec_connector.transports={tpc}"),
        'config.ec_connector.transports: "tpc" is no transport',
    ),
    "LMCache connector without a server": (("config.connector.name=lmcache",), "connector lmcache needs a server"),
    "offload beyond the limit": (
        ("config.connector.name=offload", "config.connector.offload.memory_bytes=4294967296"),
        "prefill.resources.limits.memory = 4Gi does not hold the KV pool (1073741824), the connector's blocks",
    ),
    "offload beyond the limit beside a GPU": (
        (*CUDA, "config.connector.name=offload", "config.connector.offload.memory_bytes=4294967296"),
        "the connector's blocks in host memory",
    ),
    "store of its own beyond the limit": (
        ("config.connector.name=store", "config.kvstore.memory_bytes=4294967296"),
        "the connector's blocks in host memory",
    ),
    "shared memory between aggregated workers": (
        (*AGGREGATED, "config.connector.peer_prefixes=true", "config.connector.transports={shm}"),
        "aggregated.config.connector.transports: shm works between processes of one pod only",
    ),
    "shared memory between aggregated workers that switch": (
        (*AGGREGATED, "config.worker.can_switch_role=true", "config.connector.transports={shm,tcp}"),
        "aggregated.config.connector.transports: shm works between processes of one pod only",
    ),
    "RDMA for aggregated workers": (
        (*AGGREGATED, "rdma.enabled=true", "config.connector.transports={nixl}"),
        "rdma.enabled: no worker would use RDMA. Aggregated ones do if they read from each other",
    ),
    "RDMA without nixl for aggregated workers that read from each other": (
        (*AGGREGATED, "rdma.enabled=true", "config.connector.peer_prefixes=true", "config.connector.transports={tcp}"),
        "rdma.enabled: no worker would use RDMA. Aggregated ones do if they read from each other",
    ),
    "one claim for several nodes": (
        ("modelCache.kind=create", "modelCache.accessModes={ReadWriteOnce}"),
        "pods of several nodes cannot share a ReadWriteOnce claim",
    ),
    "new claim that is read-only": (
        ("modelCache.kind=create", "modelCache.accessModes={ReadOnlyMany}"),
        "nothing can be fetched",
    ),
    "new claim mounted read-only": (
        ("modelCache.kind=create", "modelCache.readOnly=true"),
        "a claim that the chart creates is empty",
    ),
    "no pod may change": (
        ("decode.rollingUpdate.maxUnavailable=0", "decode.rollingUpdate.maxSurge=0"),
        "decode.rollingUpdate: maxUnavailable and maxSurge are both 0",
    ),
    "no pod may change, in percent": (
        ("decode.rollingUpdate.maxUnavailable=0%", "decode.rollingUpdate.maxSurge=0%"),
        "maxUnavailable and maxSurge are both 0",
    ),
    "rolling update of a stateful set": (
        ("decode.kind=StatefulSet", "decode.rollingUpdate.maxUnavailable=1"),
        "decode.rollingUpdate: it is for a Deployment",
    ),
    "label over the selector": (
        (r"decode.podLabels.app\.kubernetes\.io/component=other",),
        "decode.podLabels: app.kubernetes.io/component is a label the selectors go by",
    ),
    "block size": (("config.cache.block_size=7",), "at '/config/cache/block_size'"),
    "renewal after the lease": (
        ("config.connector.lease_renew_interval_s=60",),
        "config.connector.lease_renew_interval_s = 60 must be below config.connector.lease_s = 30",
    ),
    "lease over its maximum": (("config.connector.lease_max_s=20",), "config.connector.lease_s = 30 must be at most"),
    "heartbeat after the timeout": (
        ("config.router.heartbeat_interval_s=9",),
        "config.router.heartbeat_interval_s = 9 must be below config.router.heartbeat_timeout_s = 5",
    ),
    "store's heartbeat after the timeout": (
        ("config.kvstore.heartbeat_interval_s=9",),
        "config.kvstore.heartbeat_interval_s = 9 must be below config.kvstore.client_timeout_s = 5",
    ),
    "body over all bodies": (
        ("config.router.max_body_bytes=1000000001",),
        "config.router.max_body_bytes = 1000000001 must be at most config.router.max_upload_bytes = 268435456",
    ),
    "role without pods": (("decode.replicas=0",), "decode.replicas = 0: the role is enabled but has no pod"),
    "claim of nothing": (("decode.resourceClaims[0].name=gpu",), "at '/decode/resourceClaims/0'"),
    "ingress without a host": (("ingress.enabled=true",), "ingress.hosts: name at least one host"),
    "route without a gateway": (("httpRoute.enabled=true",), "httpRoute.parentRefs: name the Gateway"),
    "pool without a picker": (("inferencePool.enabled=true",), "inferencePool.endpointPicker.name: name the Service"),
    "route to no pool": (
        ("httpRoute.enabled=true", "httpRoute.parentRefs[0].name=gateway", "httpRoute.toInferencePool=true"),
        "httpRoute.toInferencePool: there is no pool; set inferencePool.enabled",
    ),
    "longer window than an HPA takes": (
        tuple(f"prefill.autoscaling.{part}" for part in ("type=keda", "min=1", "max=2", "load=1", "scaleDownSeconds=3601")),
        "at '/prefill/autoscaling/scaleDownSeconds'",
    ),
    "no cluster key": ((), "security.clusterKey: no key is given. Make one: kubectl -n default create secret"),
    "made key beside another": (
        ("security.clusterKey.generate=true", "security.clusterKey.existingSecret=a"),
        "security.clusterKey.generate: a key is given already",
    ),
    "other keys of a secret": (
        ("security.clusterKey.existingSecret=a", "security.clusterKey.others[0]=0123456789012345678901234567890123456789"),
        "of an existingSecret they are its key other-cluster-keys",
    ),
    "short other key": (("security.clusterKey.others[0]=short",), "at '/security/clusterKey/others/0'"),
}


@pytest.mark.parametrize(("sets", "message"), CASES.values(), ids=CASES)
def test_is_refused_with_what_to_change(helm, sets, message):
    assert message in helm.refusal(*sets)


WORKING = {
    "aggregated alone": AGGREGATED,
    "aggregated workers that move no blocks": (*AGGREGATED, "config.connector.transports={shm}"),
    "GPU by a claim": (
        "config.model.device=cuda",
        *(
            f"{role}.resourceClaims[0].{part}"
            for role in ("prefill", "decode")
            for part in ("name=gpu", "resourceClaimTemplateName=one-gpu")
        ),
    ),
    "one node": ("modelCache.kind=create", "modelCache.accessModes={ReadWriteOnce}", "modelCache.singleNode=true"),
    "different block sizes": ("prefill.config.cache.block_size=32", "decode.config.cache.block_size=64"),
    "different lengths": ("decode.config.model.max_model_len=2048",),
    "kvferry's own model": ("config.model.name=null",),
    "connector of the image": ("config.connector.name=my_module:connector",),
    "replace before surge": ("decode.rollingUpdate.maxUnavailable=1", "decode.rollingUpdate.maxSurge=0"),
}


@pytest.mark.parametrize("sets", WORKING.values(), ids=WORKING)
def test_what_works_is_accepted(helm, sets):
    assert helm.template("cpu-minimal", sets=sets)


@pytest.mark.parametrize(
    ("sets", "refused"),
    [
        ((), "prefill"),
        (AGGREGATED, ""),
        ((*AGGREGATED, "config.connector.name=multi", "config.connector.connectors={p2p,offload}"), "aggregated"),
    ],
)
def test_no_transport_is_refused_where_a_worker_would_not_start(helm, sets, refused):
    values = str(CHART / "ci" / "cpu-minimal-values.yaml")
    arguments = [part for value in sets for part in ("--set", value)]
    empty = ["--set-json", "config.connector.transports=[]"]
    done = helm.run("template", "kvferry", str(CHART), "--values", values, *empty, *arguments)
    said = f"{refused}.config.connector.transports is empty: name nixl or tcp"
    assert (said in done.stderr) == bool(done.returncode) == bool(refused)
