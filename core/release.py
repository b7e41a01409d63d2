"""Which release of kvferry this process runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def package_version() -> str:
    """Return the version of the installed package, "unknown" when run from a source tree."""
    try:
        return version("kvferry")
    except PackageNotFoundError:
        return "unknown"
