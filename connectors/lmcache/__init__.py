"""KV blocks to and from a multi-process LMCache server on the same host, by its own wire protocol.

Nothing of LMCache is imported: the server runs from an environment of its own, and this is a client of its ZeroMQ port. What
makes its answers safe to use is not the server but the seal that travels with every block (``connectors.lmcache.staging``).
"""
