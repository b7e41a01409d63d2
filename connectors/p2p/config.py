"""What a p2p driver needs of a worker: its settings and its identity, as values."""

from __future__ import annotations

from dataclasses import fields

from connectors.p2p.host_id import host_id
from connectors.p2p.producer.handshake import WorkerIdentity
from connectors.p2p.settings import DriverSettings, TransferSettings
from core.config_workers import ConnectorSection
from core.connector import ConnectorContext, WorkerContext
from core.ec_connector import ECContext
from core.wire.kv import KVLayoutInfo


def transfer_settings(section: ConnectorSection) -> TransferSettings:
    """Return the settings of the section that concern transfers; the names are the same."""
    return TransferSettings(**{field.name: getattr(section, field.name) for field in fields(TransferSettings)})


def driver_settings(context: WorkerContext, section: ConnectorSection) -> DriverSettings:
    """Return the driver's settings on the worker that ``context`` describes; ``section`` has those of transfers."""
    worker = context.config.worker
    return DriverSettings(
        transfer=transfer_settings(section),
        control_address=worker.control_address,
        data_port=worker.data_port,
        advertise_host=worker.advertise_host,
        keys=context.keys,
        clock=context.clock,
        ids=context.ids,
    )


def worker_identity(context: ConnectorContext | ECContext, layout: KVLayoutInfo) -> WorkerIdentity:
    """Return what the worker says about itself in a handshake; ``layout`` is that of a block of its memory."""
    return WorkerIdentity(
        engine_id=context.engine_id,
        incarnation=context.incarnation,
        model_fingerprint=context.model_fingerprint,
        layout=layout,
        host_id=host_id(),
    )
