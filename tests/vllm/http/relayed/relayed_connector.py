"""The plug-in of an engine whose peers reach it at another host than it binds: relays of a test listen there.

``relayed.host`` and ``relayed.data_port`` of ``kv_connector_extra_config``; without them it is the plug-in as it is.
"""

from dataclasses import replace

from kvferry_vllm import connector as plugin


class KvferryConnector(plugin.KvferryConnector):
    """See above."""

    def register_kv_caches(self, kv_caches):
        extra = self._vllm_config.kv_transfer_config.kv_connector_extra_config
        make = plugin.DriverSettings

        def relayed(**settings):
            made = make(**settings)
            if "relayed.host" not in extra:
                return made
            return replace(made, advertise_host=extra["relayed.host"], data_port=extra["relayed.data_port"])

        plugin.DriverSettings = relayed
        super().register_kv_caches(kv_caches)
