"""The settings of a p2p driver, read from the configuration of a worker."""

from __future__ import annotations

from dataclasses import fields

from connectors.p2p.settings import DriverSettings, TransferSettings
from connectors.registry import ConnectorContext
from core.config import ConnectorSection


def transfer_settings(section: ConnectorSection) -> TransferSettings:
    """Return the settings of the section that concern transfers; the names are the same."""
    return TransferSettings(**{field.name: getattr(section, field.name) for field in fields(TransferSettings)})


def driver_settings(context: ConnectorContext) -> DriverSettings:
    """Return the driver's settings on the worker that ``context`` describes."""
    return DriverSettings(
        transfer=transfer_settings(context.config),
        control_address=context.control_address,
        data_port=context.data_port,
        advertise_host=context.advertise_host,
        keys=context.keys,
        clock=context.clock,
        ids=context.ids,
    )
