"""Environment variables of libraries that read them when they are loaded or first used: torch, UCX and NIXL."""

from __future__ import annotations

import os


def ucx_net_devices() -> str:
    """Return ``$UCX_NET_DEVICES``, the user's choice of network devices for UCX; empty = the configured address decides."""
    return os.environ.get("UCX_NET_DEVICES", "")


def set_default_environment(variable: str, value: str) -> None:
    """Set a variable that a library reads when it is loaded, unless the user has set it."""
    os.environ.setdefault(variable, value)
