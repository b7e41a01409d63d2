"""How many connections the process's limit of open files leaves room for.

Owns the arithmetic and the raising of the soft limit. Without it a router runs out of descriptors before
``router.max_connections`` is reached, and then accepts nothing on any port, probes included.
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
    """Return how many connections there may be: ``max_connections``, or what the limit of descriptors allows."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(1, soft - RESERVED)
    if soft == resource.RLIM_INFINITY or room >= max_connections:
        return max_connections
    logger.warning(
        event("few_descriptors", limit=soft, connections=room, wanted=max_connections, setting="router.max_connections")
    )
    return room
