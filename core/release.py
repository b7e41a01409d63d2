"""The version of kvferry, for the package's metadata, the command and the processes of a cluster."""

from __future__ import annotations

VERSION = "0.1.0"


def package_version() -> str:
    """Return the version of kvferry that this process runs."""
    return VERSION
