"""How many connections the process's limit of open files allows, and what is said when it is reached.

Raises the soft limit and computes the rest. Without this a router could run out of descriptors before it reaches
``router.max_connections``, and then accept no connection on any port, probes included; and an agent, which has a connection
for each choice at its server, could no longer look whether the server is well.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
from typing import Any, TypeGuard

from core.errors import ConfigError
from core.log import event
from core.rate_limit import LimitedLog

logger = logging.getLogger(__name__)
RESERVED = 256  # sockets of the cluster, files, the operations port; half of a limit below twice that
WORKER_CONNECTIONS = 4096  # of routers, peers and operators, at most as many as a large cluster needs


def raise_descriptor_limit(num_connections: int) -> None:
    """Raise the process's soft limit as far as ``num_connections`` need it and the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + RESERVED
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_within(num_connections: int, setting: str) -> int:
    """Return ``num_connections``, or fewer if the descriptor limit requires it; then the log names ``setting``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max(1, soft - RESERVED, soft // 2)
    if soft == resource.RLIM_INFINITY or room >= num_connections:
        return num_connections
    logger.warning(event("few_descriptors", limit=soft, connections=room, wanted=num_connections, setting=setting))
    return room


def is_full_table(error: BaseException) -> TypeGuard[OSError]:
    """Return True for the error of a call that found no descriptor; ZeroMQ's has the number and the text of an OSError."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def too_few_descriptors(error: OSError) -> ConfigError:
    """Return the error of a process that cannot start for want of descriptors: its own, or those of the machine."""
    if error.errno == errno.ENFILE:
        return ConfigError(f"{error.strerror}: all processes together have too many (`sysctl fs.file-max`)")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"which is {soft} here, and {hard} at most"
    return ConfigError(f"{error.strerror}: raise the limit of open files (`ulimit -n`), {limits}")


def report_full_table(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop say in one line a minute that it can accept no connection for want of descriptors; it goes on trying.

    asyncio would write an error with a traceback at every try. Whatever else the loop reports is written as before.
    """
    limited_log = LimitedLog(logger, loop.time)

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "socket" not in context or error is None or not is_full_table(error):
            loop.default_exception_handler(context)
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        fix = "raise the limit of open files (`ulimit -n`): new connections wait until others end"
        limited_log.warning("no_descriptors", reason=error.strerror, soft_limit=soft, hard_limit=hard, fix=fix)

    loop.set_exception_handler(handle)
