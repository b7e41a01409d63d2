"""Several connectors at once, in order: ``connector.name = multi`` with ``connector.connectors = [p2p, offload, store]``."""
