"""The product: the ``kvferry`` command, and ``LocalCluster`` for Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core.release import VERSION

if TYPE_CHECKING:
    from kvferry.local import LocalCluster

__all__ = ["LocalCluster", "__version__"]
__version__ = VERSION


def __getattr__(name: str) -> object:
    """Import ``LocalCluster`` on first use, because worker processes import this package too and do not need it."""
    if name == "LocalCluster":
        from kvferry.local import LocalCluster

        return LocalCluster
    raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
