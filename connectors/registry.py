"""Connectors by name: where third parties plug in.

``connector.name`` names the factory of a KV connector by its entry point in the group ``kvferry.connectors``, or as
``module:factory`` if the code is importable but not installed. ``ec_connector.name`` does the same for EC connectors in the
group ``kvferry.ec_connectors``. A factory takes the context of a worker; the class of a connector usually is its own factory.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from typing import Any

from core.connector import ConnectorFactory
from core.ec_connector import ECConnectorFactory
from core.errors import ConfigError

CONNECTORS = "kvferry.connectors"
EC_CONNECTORS = "kvferry.ec_connectors"
NO_EC_CONNECTOR = "none"


def connector_factory(name: str) -> ConnectorFactory:
    """Return the factory registered under ``name``, or the one that ``name`` spells as ``module:factory``.

    Raises:
        ConfigError: no such connector; lists the existing ones, or says what is wrong with the module.
    """
    return load_factory(CONNECTORS, name, "connector.name")


def ec_connector_factory(name: str) -> ECConnectorFactory | None:
    """Return the factory of an EC connector, as ``connector_factory`` does; None for "none".

    Raises:
        ConfigError: no such connector; lists the existing ones, or says what is wrong with the module.
    """
    return None if name == NO_EC_CONNECTOR else load_factory(EC_CONNECTORS, name, "ec_connector.name")


def find_entry_point(group: str, name: str, setting: str) -> EntryPoint:
    """Return the entry point of an installed connector.

    Raises:
        ConfigError: no such connector; lists the existing ones.
    """
    found = {entry.name: entry for entry in entry_points(group=group)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none installed"
        raise ConfigError(f"{setting} = {name!r}: no such connector; known: {known}, or any module:factory", param=setting)
    return found[name]


def load_factory(group: str, name: str, setting: str) -> Callable[..., Any]:
    """Import and return a factory of a group; ``setting`` is named in errors.

    Raises:
        ConfigError: no such connector; lists the existing ones, or says what is wrong with the module.
    """
    if ":" in name:
        module_name, _, attribute = name.partition(":")
    else:
        entry = find_entry_point(group, name, setting)
        module_name, attribute = entry.module, entry.attr
    try:
        factory: Callable[..., Any] = attrgetter(attribute)(import_module(module_name))
    except (ImportError, AttributeError, ValueError) as error:
        is_not_found = isinstance(error, ModuleNotFoundError) and error.name == module_name.partition(".")[0]
        fix = "; install it, or set PYTHONPATH to the folder that contains it" if is_not_found else ""
        raise ConfigError(f"{setting} = {name!r}: {error}{fix}", param=setting) from error
    if not callable(factory):
        raise ConfigError(f"{setting} = {name!r}: {attribute} is not callable", param=setting)
    return factory
