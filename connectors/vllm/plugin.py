"""The entry point in ``vllm.general_plugins``: it makes the connector known to vLLM by its name.

vLLM calls it in each of its processes, with or without a connector, so it imports nothing else and never raises.
"""

from __future__ import annotations

import logging

CONNECTOR_NAME = "KvferryConnector"

_log = logging.getLogger(__name__)


def register() -> None:
    """Register ``KvferryConnector``; its module is imported when a configuration names it. Idempotent."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        module = __name__.rpartition(".")[0] + ".connector"
        KVConnectorFactory.register_connector(CONNECTOR_NAME, module, CONNECTOR_NAME)
    except ValueError:  # it is registered
        pass
    except Exception as error:  # another vLLM than the supported ones: who does not use the connector is not disturbed
        _log.debug("kvferry cannot register its connector: %r", error)
