"""KV blocks to and from a multi-process LMCache server on the same host, by its own wire protocol.

LMCache is not imported: the server runs from an environment of its own, and this package is a client of its ZeroMQ port. The
server's answers are not trusted: the seal that travels with every block (``connectors.lmcache.staging``) verifies them.
"""
