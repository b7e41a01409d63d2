"""Writes the chart's ``values.schema.json``: every key of values.yaml, no other, and kvferry's own settings under ``config``.

Owns the shape of the values. The settings come from ``core.config`` as they are, less those that are the chart's business
(addresses, ports, names, secrets), so that ``helm install`` refuses a wrong one; else its pod would restart forever.
Run it after a change of either: ``python helm/values_schema.py``. The tests compare.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from core.config import KVFerryConfig
from core.config_checks import NO_ORIGIN, ORIGIN
from core.config_tree import is_size
from core.constants import HASH_BLOCK_SIZE

SCHEMA_PATH = Path(__file__).parent / "kvferry" / "values.schema.json"

# Settings that the chart sets itself, by section. A section without any other setting is left out of the schema.
CHART_OWNED = {
    "ModelSection": {"cache_dir"},
    "WorkerSection": {
        "engine_id",
        "router_addresses",
        "control_address",
        "data_port",
        "advertise_host",
        "ops_host",
        "ops_port",
        "workers_on_host",
        "host_slot",
        "kv_events_address",
        "kv_events_replay_address",
        "is_supervised",
    },
    "RouterSection": {
        "host",
        "port",
        "processes",
        "shares_port",
        "processes_at_port",
        "process_number",
        "worker_address",
        "ops_host",
        "ops_port",
        "api_key",
        "requires_api_key",
        "tls_cert",
        "tls_key",
    },
    "KVStoreSection": {"address", "bind_address", "ops_host", "ops_port", "disk_path", "redis_url", "redis_password"},
    "ECConnectorSection": {"kvstore_address"},
    "LMCacheSection": {"server_address", "http_address"},
    "AgentSection": {"engine", "api_key_file"},
}
CHART_OWNED_SECTIONS = {"local", "security"}

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
PODS: Schema = {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%?$"}  # a number, or a share
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
QUANTITY: Schema = {"type": ["string", "number"], "pattern": "^[0-9]+([.][0-9]+)?(m|Ki|Mi|Gi|Ti|k|M|G|T)?$"}
SIZE: Schema = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)?(Ki|Mi|Gi|Ti|k|M|G|T)$"}
SETTING_SIZE = "^[0-9]+([.][0-9]+)? ?([kMGT]|[KMGT]i)?B?$"  # as core.config_tree.parse_size reads it
ORIGIN_OF_PAGES: Schema = {"type": "string", "pattern": ORIGIN, "not": {"pattern": NO_ORIGIN}}
DURATION: Schema = {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANYTHING: Schema = {"type": "object"}  # Kubernetes' own types; the API server knows them
LIST: Schema = {"type": "array", "items": ANYTHING}

# An entry of router.images.allowed_hosts as router.images.hosts takes it: a name, *.name, either with :port, an address or a
# network. Templates look at the rest: ports, netmasks, groups of IPv6 addresses, bits beyond a prefix. The router takes zeros
# before a prefix, too, but no NetworkPolicy does.
_LABEL = "[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?"
_NAME = rf"(\*\.)?{_LABEL}(\.{_LABEL})*(:[0-9]{{1,5}})?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}(/([12]?[0-9]|3[0-2]|[0-9]+\.[0-9.]+))?"
_IPV6 = r"[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f.:]*(%[^/%\s]+)?(/([1-9]?[0-9]|1[01][0-9]|12[0-8]))?"
IMAGE_HOST: Schema = {"type": "string", "pattern": rf"^\s*({_NAME}|[\[\]]*({_IPV4}|{_IPV6})[\[\]]*)\s*$"}

ROLES = ("router", "encode", "prefill", "decode", "aggregated", "kvstore")
# Values that templates read without a look whether they are there (Helm takes out what is set to null), if others are these.
NEEDED: tuple[tuple[Mapping[str, object], str], ...] = (
    ({}, "image network ports ports.http router encode encode.enabled prefill decode vllm kvstore kvstore.redis"),
    ({}, "kvstore.disk lmcache rdma shm modelCache modelCache.hfTokenSecret security security.apiKeys security.tls"),
    ({}, "serviceAccount networkPolicy ingress httpRoute inferencePool"),
    ({}, "monitoring monitoring.podMonitor monitoring.serviceMonitor monitoring.dashboard"),
    ({}, "image.repository network.clusterDomain shm.size modelCache.kind lmcache.mode security.insecure"),
    ({"security.insecure": False}, "security.clusterKey.key security.clusterKey.othersKey"),
    ({"router.enabled": True}, "router.endpointDelaySeconds tests.timeoutSeconds"),
    ({"router.enabled": True}, "router.service router.service.port ports.workers ports.control ports.data ports.ops tests"),
    ({"prefill.enabled": True}, "ports.ucx ports.ucx.first ports.ucx.last"),
    ({"kvstore.enabled": True}, "ports.store"),
    ({"kvstore.enabled": True, "kvstore.mode": "service"}, "kvstore.kind"),
    ({"kvstore.enabled": True, "kvstore.mode": "sidecar"}, "ports.storeOps"),
    ({"lmcache.mode": "sidecar"}, "lmcache.image lmcache.port lmcache.httpPort"),
    ({"lmcache.mode": "external"}, "lmcache.port lmcache.httpPort"),
    ({"engine": "vllm"}, "vllm.image vllm.plugin vllm.agent vllm.proxy vllm.proxy.image"),
    ({"engine": "vllm", "vllm.agent.enabled": True}, "vllm.port"),
    ({"engine": "vllm", "vllm.agent.enabled": False}, "monitoring.prometheusRule"),
    ({"engine": "vllm", "vllm.agent.enabled": False, "decode.enabled": True}, "vllm.port"),
    ({"inferencePool.enabled": True}, "inferencePool.endpointPicker"),
    *(({f"{name}.enabled": True}, f"{name}.kind") for name in ROLES if name != "kvstore"),
    *(({f"{name}.enabled": True, f"{name}.autoscaling.type": "keda"}, "keda") for name in ROLES),
)


def closed(**properties: Schema) -> Schema:
    """Return an object that may have these keys and no others."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def needed(values: Mapping[str, object], paths: str) -> Schema:
    """Return a schema by which the values at ``paths`` have to be there if others are as ``values`` says."""
    conditions: list[Schema] = []
    for path, value in values.items():
        condition: Schema = {"const": value}
        for key in reversed(path.split(".")):
            condition = {"required": [key], "properties": {key: condition}}
        conditions.append(condition)
    found: Schema = {}
    for path in paths.split():
        *parents, key = path.split(".")
        within = found
        for parent in parents:
            within = within.setdefault("properties", {}).setdefault(parent, {})
        within.setdefault("required", []).append(key)
    return {"if": {"allOf": conditions}, "then": found} if conditions else found


def one_of(*values: str) -> Schema:
    """Return one of these texts."""
    return {"enum": list(values)}


def image(**more: Schema) -> Schema:
    """Return an image reference."""
    return closed(
        repository=TEXT,
        tag=TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        pullPolicy=one_of("Always", "IfNotPresent", "Never"),
        **more,
    )


def probe(**more: Schema) -> Schema:
    """Return the settings of a probe."""
    counts = dict.fromkeys(("periodSeconds", "timeoutSeconds", "failureThreshold"), POSITIVE)
    return closed(initialDelaySeconds=COUNT, **counts, **more)


def resource_claim() -> Schema:
    """Return a claim of dynamic resource allocation, with the request of it that the container gets."""
    found = closed(name=TEXT, resourceClaimName=TEXT, resourceClaimTemplateName=TEXT, request=TEXT)
    sources = [{"required": ["resourceClaimName"]}, {"required": ["resourceClaimTemplateName"]}]
    return {**found, "required": ["name"], "oneOf": sources}


def role(*kinds: str, **more: Schema) -> Schema:
    """Return what every role has; ``config`` overrides the common one."""
    return closed(
        enabled=FLAG,
        kind=one_of(*kinds),
        replicas=COUNT,
        config={"$ref": "#/$defs/KVFerryConfig"},
        resources=closed(
            requests={"type": "object", "additionalProperties": QUANTITY},
            limits={"type": "object", "additionalProperties": QUANTITY},
        ),
        gpu=closed(count=COUNT, resourceName=TEXT),
        podLabels=TEXTS,
        podAnnotations=TEXTS,
        nodeSelector=TEXTS,
        tolerations=LIST,
        affinity=ANYTHING,
        topologySpreadConstraints=LIST,
        priorityClassName=TEXT,
        runtimeClassName=TEXT,
        schedulerName=TEXT,
        extraEnv=LIST,
        envFrom=LIST,
        extraVolumes=LIST,
        extraVolumeMounts=LIST,
        podSecurityContext=ANYTHING,
        securityContext=ANYTHING,
        resourceClaims={"type": "array", "items": resource_claim()},
        progressDeadlineSeconds=POSITIVE,
        terminationGracePeriodSeconds=POSITIVE,
        rollingUpdate=closed(maxUnavailable=PODS, maxSurge=PODS),
        probes=closed(
            startup=probe(terminationGracePeriodSeconds=POSITIVE),
            readiness=probe(),
            liveness=probe(terminationGracePeriodSeconds=POSITIVE),
        ),
        pdb=closed(enabled=FLAG, maxUnavailable=PODS),
        autoscaling=autoscaling(),
        **more,
    )


def vllm_role(*kinds: str) -> Schema:
    """Return a role that vLLM engines may have."""
    arguments: Schema = {"type": "array", "items": TEXT}
    own = closed(tensorParallelSize=POSITIVE, dataParallelSize=POSITIVE, arguments=arguments, nodes=POSITIVE)
    return role(*kinds, vllm=own)


def vllm() -> Schema:
    """Return the values of vLLM engines."""
    return closed(
        image=image(),
        plugin=image(),
        port=PORT,
        arguments={"type": "array", "items": TEXT},
        settings=ANYTHING,
        tmpSize=SIZE,
        endpointDelaySeconds=COUNT,
        idleSeconds=POSITIVE,
        agent=closed(
            enabled=FLAG,
            resources=closed(
                requests={"type": "object", "additionalProperties": QUANTITY},
                limits={"type": "object", "additionalProperties": QUANTITY},
            ),
        ),
        proxy=closed(image=image()),
    )


def autoscaling() -> Schema:
    """Return how a role is scaled: ``metrics`` maps names to their target per pod, ``load`` is a pod's by the router's view."""
    found = closed(
        type=one_of("hpa", "keda"),
        min=POSITIVE,
        max=POSITIVE,
        scaleDownSeconds={**POSITIVE, "maximum": 3600},  # of an HPA's window
        metrics={
            "type": "object",
            "minProperties": 1,
            "propertyNames": {"pattern": "^kvferry_[a-z_]+$"},
            "additionalProperties": {**QUANTITY, "exclusiveMinimum": 0},
        },
        # --set makes texts of fractions
        load={"type": ["string", "number"], "exclusiveMinimum": 0, "maximum": 1, "pattern": "^(0?[.][0-9]*[1-9]|1)$"},
    )
    return {**found, "required": ["type", "min", "max"], "anyOf": [{"required": ["metrics"]}, {"required": ["load"]}]}


def stores() -> dict[str, Schema]:
    """Return the values of the stores."""
    return {
        "kvstore": role(
            "StatefulSet",
            "Deployment",
            mode=one_of("service", "sidecar"),
            disk=closed(size={"anyOf": [SIZE, {"const": ""}]}, storageClassName=TEXT),
            redis=closed(enabled=FLAG, host=TEXT, port=PORT, existingSecret=TEXT, passwordKey=TEXT),
        ),
        "lmcache": closed(
            mode=one_of("none", "sidecar", "external"),
            image=image(),
            command={"type": "array", "items": TEXT},
            port=PORT,
            httpPort=PORT,
            memory=SIZE,
            cpu=QUANTITY,
            host=TEXT,
            peer=ANYTHING,
        ),
    }


def hardware() -> dict[str, Schema]:
    """Return the values of networks, memory and volumes."""
    return {
        "rdma": closed(
            enabled=FLAG,
            resourceName=TEXT,
            count=POSITIVE,
            podAnnotations=TEXTS,
            netDevices=TEXT,
            tls=TEXT,
            extraEnv={**TEXTS, "propertyNames": {"pattern": "^UCX_[A-Z0-9_]+$"}},
        ),
        "shm": closed(size=SIZE),
        "modelCache": closed(
            kind=one_of("emptyDir", "existingClaim", "create"),
            existingClaim=TEXT,
            size=SIZE,
            storageClassName=TEXT,
            accessModes={"type": "array", "items": one_of("ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany")},
            singleNode=FLAG,
            readOnly=FLAG,
            fetch=FLAG,
            hfTokenSecret=closed(name=TEXT, key=TEXT),
        ),
    }


def trust() -> dict[str, Schema]:
    """Return the values of the network policy."""
    key_text = {"anyOf": [{"const": ""}, {"type": "string", "minLength": 32}]}
    return {
        "security": closed(
            clusterKey=closed(
                existingSecret=TEXT,
                key=TEXT,
                othersKey=TEXT,
                value=key_text,
                others={"type": "array", "items": {"type": "string", "minLength": 32, "pattern": "^[^,]+$"}},
                generate=FLAG,
            ),
            revision={"type": ["string", "integer"]},
            insecure=FLAG,
            apiKeys=closed(existingSecret=TEXT, key=TEXT),
            tls=closed(existingSecret=TEXT),
        ),
        "serviceAccount": closed(create=FLAG, name=TEXT, annotations=TEXTS),
        "networkPolicy": closed(
            enabled=FLAG,
            clients=LIST,
            prometheus=LIST,
            dns=LIST,
            modelSources=LIST,
            imageSources=LIST,
            redis=LIST,
            collector=LIST,
        ),
    }


def ways_in() -> dict[str, Schema]:
    """Return the values of what leads clients to the router."""
    path: Schema = {"type": "string", "pattern": "^/"}
    texts: Schema = {"type": "array", "items": TEXT}
    return {
        "ingress": closed(enabled=FLAG, className=TEXT, annotations=TEXTS, hosts=texts, path=path, tls=LIST),
        "httpRoute": closed(
            enabled=FLAG,
            annotations=TEXTS,
            parentRefs=LIST,
            hostnames=texts,
            path=path,
            requestTimeout={"type": "string", "pattern": "^([0-9]{1,5}(ms|s|m|h)){0,4}$"},
            toInferencePool=FLAG,
        ),
        "inferencePool": closed(
            enabled=FLAG, endpointPicker=closed(name=TEXT, port=PORT, failureMode=one_of("FailOpen", "FailClose"))
        ),
        "extraObjects": {"type": "array", "items": {"type": ["object", "string"]}},
    }


def monitoring() -> dict[str, Schema]:
    """Return the values of metrics."""
    scrape = closed(enabled=FLAG, interval=DURATION, labels=TEXTS)
    ratio: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    seconds: Schema = {"type": "number", "exclusiveMinimum": 0}
    return {
        "monitoring": closed(
            podMonitor=scrape,
            serviceMonitor=scrape,
            prometheusRule=closed(enabled=FLAG, labels=TEXTS, ttftSeconds=seconds, transferFailureRatio=ratio),
            dashboard=closed(enabled=FLAG, labels=TEXTS),
        ),
        "keda": closed(serverAddress=TEXT),
    }


def settings() -> dict[str, Schema]:
    """Return the definitions of kvferry's settings, less what the chart sets."""
    found: dict[str, Schema] = msgspec.json.schema(KVFerryConfig)["$defs"]
    sections = found["KVFerryConfig"]["properties"]
    for name in CHART_OWNED_SECTIONS & sections.keys():
        del sections[name]
    for name, owned in CHART_OWNED.items():
        for key in owned:
            found[name]["properties"].pop(key)
    for definition in found.values():
        for setting in definition["properties"].values():
            setting.pop("default", None)  # some are this machine's; kvferry knows them
        for name, setting in definition["properties"].items():
            if is_size(name):  # templates read it, and write a number into the configuration file
                setting.update(type=["integer", "string"], pattern=SETTING_SIZE)
    found["CacheSection"]["properties"]["block_size"]["multipleOf"] = HASH_BLOCK_SIZE
    found["ImagesSection"]["properties"]["allowed_hosts"]["items"] = IMAGE_HOST
    found["RouterSection"]["properties"]["cors_origins"]["items"] = ORIGIN_OF_PAGES
    used = reachable("KVFerryConfig", found)
    return {name: definition for name, definition in found.items() if name in used}


def reachable(name: str, definitions: dict[str, Schema]) -> set[str]:
    """Return the definitions that one refers to, itself and those further on included."""
    refs = set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(definitions[name])))
    return {name}.union(*(reachable(ref, definitions) for ref in refs))


def build() -> Schema:
    """Return the whole schema."""
    kinds = ("Deployment", "StatefulSet")
    service = closed(type=one_of("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=TEXTS)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the kvferry chart",
        **closed(
            nameOverride={"type": "string", "maxLength": 63, "pattern": "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"},
            fullnameOverride={"type": "string", "pattern": "^([a-z]([-a-z0-9]*[a-z0-9])?)?$"},  # Services are called by it
            image=image(),
            imagePullSecrets={"type": "array", "items": TEXT},
            config={"$ref": "#/$defs/KVFerryConfig"},
            network=closed(ipFamily=one_of("IPv4", "IPv6"), clusterDomain=TEXT),
            ports=closed(
                **dict.fromkeys(("http", "workers", "control", "data", "ops", "store", "storeOps"), PORT),
                ucx=closed(first=PORT, last=PORT),
            ),
            router=role(*kinds, service=service, endpointDelaySeconds=COUNT),
            encode=role(*kinds),
            prefill=vllm_role(*kinds),
            decode=vllm_role(*kinds),
            aggregated=vllm_role(*kinds),
            engine=one_of("kvferry", "vllm"),
            vllm=vllm(),
            **stores(),
            **hardware(),
            **trust(),
            **ways_in(),
            podSecurityContext=ANYTHING,
            securityContext=ANYTHING,
            **monitoring(),
            tests=closed(timeoutSeconds=POSITIVE),
            **{"global": ANYTHING},  # Helm's own, for charts that have this one as a part
        ),
        "allOf": [needed(values, paths) for values, paths in NEEDED],
        "$defs": settings(),
    }


def render() -> str:
    """Return the text of the file."""
    return json.dumps(build(), indent=1) + "\n"


if __name__ == "__main__":
    sys.exit(SCHEMA_PATH.write_text(render()) == 0)
