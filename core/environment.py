"""Environment variables of libraries, such as UCX and NIXL, that the transports load."""

from __future__ import annotations

import os


def ucx_net_devices() -> str:
    """Return ``$UCX_NET_DEVICES``, the network devices that the user gives UCX; empty = the configured address decides."""
    return os.environ.get("UCX_NET_DEVICES", "")


def set_default_environment(variable: str, value: str) -> None:
    """Set a variable that a library reads when it is loaded; what the user has set stays."""
    os.environ.setdefault(variable, value)
