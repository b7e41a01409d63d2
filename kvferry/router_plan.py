"""The router processes behind one port: their names, what each binds for itself, and its share of the limits.

Each process is a router of its own to the workers, which connect to all of them; the kernel gives every new connection of a
client to one of them. Owns the settings of each. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

import msgspec

from core.config_router import RouterSection
from core.wire.sockets import join_tcp, split_tcp

ROUTER = "router"
_SHARED_LIMITS = ("max_connections", "max_requests", "max_upload_bytes")  # others hold in each process


class RouterPlan:
    """The settings of each of ``router.processes`` processes; ports that were any free one are kept once they are known.

    Process number k gets the k-th port after those of ``worker_address`` and ``ops_port``, unless these are any free one. Each
    of several has an operations port, since a request to the common port reaches any of them.
    """

    def __init__(self, router: RouterSection) -> None:
        self._sections = {
            ROUTER if number == 0 else f"{ROUTER}-{number}": _of_process(router, number) for number in range(router.processes)
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the processes; the first has to be started and pinned before the others."""
        return tuple(self._sections)

    @property
    def worker_addresses(self) -> tuple[str, ...]:
        """The addresses that workers connect to."""
        return tuple(section.worker_address for section in self._sections.values())

    def section(self, name: str) -> RouterSection:
        """Return the settings of a process."""
        return self._sections[name]

    def pin(self, name: str, addresses: Mapping[str, str]) -> None:
        """Keep the ports that a process has bound, for its successor, and the clients' port for all."""
        port = urlsplit(addresses["http_address"]).port or 0
        own: dict[str, object] = {"worker_address": addresses["worker_address"]}
        if len(self._sections) > 1:
            own["ops_port"] = urlsplit(addresses["ops_address"]).port
        self._sections[name] = msgspec.structs.replace(self._sections[name], **own)
        self._sections = {each: msgspec.structs.replace(one, port=port) for each, one in self._sections.items()}


def _of_process(router: RouterSection, number: int) -> RouterSection:
    if router.processes == 1:
        return router
    host, port = split_tcp(router.worker_address)
    shares: dict[str, object] = {name: -(-getattr(router, name) // router.processes) for name in _SHARED_LIMITS}
    shares["max_upload_bytes"] = max(router.max_body_bytes, -(-router.max_upload_bytes // router.processes))
    return msgspec.structs.replace(
        router,
        processes=1,
        shares_port=True,
        processes_at_port=router.processes,
        process_number=number,
        worker_address=join_tcp(host, port + number if port else 0),
        ops_port=router.ops_port + number if router.ops_port else 0,
        **shares,
    )
