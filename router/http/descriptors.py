"""How many connections the process's limit of open files allows.

Raises the soft limit and computes the rest. Without this a router could run out of descriptors before it reaches
``router.max_connections``, and then accept no connection on any port, probes included.
"""

from __future__ import annotations

import logging
import resource

from core.log import event

logger = logging.getLogger(__name__)
RESERVED = 256  # workers' sockets, files, the operations port


def raise_descriptor_limit(max_connections: int) -> None:
    """Raise the process's soft limit as far as ``max_connections`` needs it and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + RESERVED
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within(max_connections: int) -> int:
    """Return the limit of connections: ``max_connections``, or fewer if the descriptor limit requires it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(1, soft - RESERVED)
    if soft == resource.RLIM_INFINITY or room >= max_connections:
        return max_connections
    logger.warning(
        event("few_descriptors", limit=soft, connections=room, wanted=max_connections, setting="router.max_connections")
    )
    return room
