"""Schemas of the custom resources that the chart makes: what their operators would refuse, as far as the chart uses it.

Sources: prometheus-operator API v1 (PodMonitor, ServiceMonitor, PrometheusRule), KEDA v2 (ScaledObject), Gateway API v1
(HTTPRoute), Gateway API inference extension v1 (InferencePool).
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string", "minLength": 1}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
DURATION: Schema = {"type": "string", "pattern": "^(([0-9]+)(ms|s|m|h|d))+$"}


def closed(required: str, **properties: Schema) -> Schema:
    return {"type": "object", "required": required.split(), "additionalProperties": False, "properties": properties}


def listed(item: Schema) -> Schema:
    return {"type": "array", "items": item, "minItems": 1}


_SELECTOR = closed(
    "", matchLabels=LABELS, matchExpressions=listed(closed("key operator", key=TEXT, operator=TEXT, values=listed(TEXT)))
)
_RELABELING = closed("targetLabel", sourceLabels=listed(TEXT), targetLabel=TEXT, replacement=TEXT, action=TEXT, regex=TEXT)
_ENDPOINT = closed(
    "port", port=TEXT, path=TEXT, interval=DURATION, honorLabels={"type": "boolean"}, relabelings=listed(_RELABELING)
)
_RULE = closed("alert expr", alert=TEXT, expr=TEXT, **{"for": DURATION}, labels=LABELS, annotations=LABELS)
_TRIGGER = closed(
    "type metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=closed(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold=TEXT,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
_WINDOW: Schema = {"type": "integer", "minimum": 0, "maximum": 3600}
_BEHAVIOR = closed("scaleDown", scaleDown=closed("", stabilizationWindowSeconds=_WINDOW))
_TARGET = closed("name", apiVersion=TEXT, kind=TEXT, name=TEXT)
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_BACKEND = closed("name", group=TEXT, kind=TEXT, name=TEXT, port=_PORT)
_ROUTE_RULE = closed(
    "backendRefs",
    matches=listed(closed("path", path=closed("type value", type={"const": "PathPrefix"}, value=TEXT))),
    backendRefs=listed(_BACKEND),
    timeouts=closed("request", request=DURATION),
)

SPECS: dict[tuple[str, str], Schema] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        "selector podMetricsEndpoints", selector=_SELECTOR, podMetricsEndpoints=listed(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): closed(
        "selector endpoints", selector=_SELECTOR, endpoints=listed(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        "groups", groups=listed(closed("name rules", name=TEXT, rules=listed(_RULE)))
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): closed(
        "rules",
        parentRefs=listed(closed("name", name=TEXT, namespace=TEXT, sectionName=TEXT)),
        hostnames=listed(TEXT),
        rules=listed(_ROUTE_RULE),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): closed(
        "selector targetPorts endpointPickerRef",
        selector=closed("matchLabels", matchLabels=LABELS),
        targetPorts=listed(closed("number", number=_PORT)),
        endpointPickerRef=closed(
            "name", name=TEXT, port=closed("number", number=_PORT), failureMode={"enum": ["FailOpen", "FailClose"]}
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        "scaleTargetRef triggers",
        scaleTargetRef=_TARGET,
        minReplicaCount={"type": "integer"},
        maxReplicaCount={"type": "integer"},
        advanced=closed("horizontalPodAutoscalerConfig", horizontalPodAutoscalerConfig=closed("behavior", behavior=_BEHAVIOR)),
        triggers=listed(_TRIGGER),
    ),
}
