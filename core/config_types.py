"""What settings are made of: their types and bounds, defaults from the environment, and the base of their sections.

Owns the bounds that several settings share. This is the only module that reads the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=365 * 86400)]
SecondsOrZero = Annotated[float, msgspec.Meta(ge=0, le=365 * 86400)]
ShareBelowOne = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
NumSeqs = Annotated[int, msgspec.Meta(ge=1, le=65536)]  # the engine keeps a row for each
HugePages = Literal["never", "auto", "always"]  # auto: ordinary pages where there are not enough, with a warning


def default_cache_dir() -> str:
    """Return the folder for models: ``$KVFERRY_CACHE``, else ``$XDG_CACHE_HOME/kvferry``, else ``~/.cache/kvferry``."""
    explicit = os.environ.get("KVFERRY_CACHE")
    if explicit:
        return explicit
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return str(Path(base) / "kvferry")


def default_package_index() -> str:
    """Return the package index where there is no pip to know it: ``$PIP_INDEX_URL``, else PyPI."""
    return os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"


def default_api_key() -> str:
    """Return the clients' key: ``$KVFERRY_API_KEY``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_API_KEY", "")


def default_cluster_key() -> str:
    """Return the cluster's secret: ``$KVFERRY_CLUSTER_KEY``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_CLUSTER_KEY", "")


def default_other_cluster_keys() -> str:
    """Return ``$KVFERRY_OTHER_CLUSTER_KEYS``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_OTHER_CLUSTER_KEYS", "")


def default_redis_password() -> str:
    """Return Redis's password: ``$KVFERRY_REDIS_PASSWORD``, which no list of processes shows; else none."""
    return os.environ.get("KVFERRY_REDIS_PASSWORD", "")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the configuration sections."""
