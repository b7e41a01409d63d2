"""The settings of a p2p driver, read from the configuration of a worker."""

from __future__ import annotations

from dataclasses import fields

from connectors.p2p.settings import DriverSettings, TransferSettings
from core.config import ConnectorSection
from core.connector import ConnectorContext


def transfer_settings(section: ConnectorSection) -> TransferSettings:
    """Return the settings of the section that concern transfers; the names are the same."""
    return TransferSettings(**{field.name: getattr(section, field.name) for field in fields(TransferSettings)})


def driver_settings(context: ConnectorContext) -> DriverSettings:
    """Return the driver's settings on the worker that ``context`` describes."""
    return DriverSettings(
        transfer=transfer_settings(context.config.connector),
        control_address=context.config.worker.control_address,
        data_port=context.config.worker.data_port,
        advertise_host=context.config.worker.advertise_host,
        keys=context.keys,
        clock=context.clock,
        ids=context.ids,
    )
