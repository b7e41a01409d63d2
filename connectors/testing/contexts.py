"""Contexts of connectors under test: workers with the system's clock, random ids and default settings.

``sections`` are sections of ``KVFerryConfig``, such as ``connector=ConnectorSection(lease_s=1.0)``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from connectors.testing.connector_pair import FINGERPRINT, INCARNATIONS, LAYOUT
from core.clock import SystemClock
from core.config import KVFerryConfig
from core.config_types import Section
from core.connector import ConnectorContext, WorkerContext
from core.ec_connector import ECContext
from core.ids import RandomIds
from core.wire.kv import KVLayoutInfo
from core.wire.messages import Role


def worker_context(
    role: Role, *, engine_id: str = "", incarnation: int = 0, metrics: CollectorRegistry | None = None, **sections: Section
) -> WorkerContext:
    """Return a worker; its name and incarnation follow from the role unless they are given."""
    return WorkerContext(
        config=msgspec.structs.replace(KVFerryConfig(), **sections),
        role=role,
        engine_id=engine_id or f"{role}-0",
        incarnation=incarnation or INCARNATIONS.get(role, 1),
        clock=SystemClock(),
        ids=RandomIds(),
        metrics=metrics or CollectorRegistry(),
    )


def connector_context(
    role: Role,
    *,
    layout: KVLayoutInfo = LAYOUT,
    model_fingerprint: bytes = FINGERPRINT,
    **worker: Any,  # noqa: ANN401
) -> ConnectorContext:
    """Return the context of a KV connector; ``worker`` are arguments of ``worker_context``."""
    return ConnectorContext(**vars(worker_context(role, **worker)), layout=layout, model_fingerprint=model_fingerprint)


def ec_context(role: Role, *, model_fingerprint: bytes = FINGERPRINT, **worker: Any) -> ECContext:  # noqa: ANN401
    """Return the context of an EC connector; ``worker`` are arguments of ``worker_context``."""
    return ECContext(**vars(worker_context(role, **worker)), model_fingerprint=model_fingerprint)
