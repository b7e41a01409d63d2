"""Identifiers as an injected dependency, so that a simulation replays a seed exactly.

``incarnation`` is a random 64-bit number, new at every process start: it distinguishes a restarted worker from its predecessor.
"""

from __future__ import annotations

import random
import secrets
from typing import Protocol


class IdSource(Protocol):
    """A source of unique names and random numbers."""

    def bits(self, count: int) -> int:
        """Return ``count`` random bits as a non-negative integer."""
        ...


class RandomIds:
    """Unpredictable ids from the operating system."""

    def bits(self, count: int) -> int:
        """Return ``count`` random bits."""
        return secrets.randbits(count)


class SeededIds:
    """Reproducible ids for tests and the simulation."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bits(self, count: int) -> int:
        """Return the next ``count`` bits of the seeded stream."""
        return self._random.getrandbits(count)


def new_incarnation(ids: IdSource) -> int:
    """Return a non-zero 64-bit incarnation; 0 means "none"."""
    return ids.bits(64) or 1


def new_hex_id(ids: IdSource, prefix: str = "") -> str:
    """Return ``prefix`` and 128 random bits in hex: request ids, transfer ids."""
    return f"{prefix}{ids.bits(128):032x}"


def router_id(name: str) -> str:
    """Return the id in the router's log of a request that a worker knows as ``id/0``, or ``id.2/0`` in a later attempt."""
    return name.partition("/")[0].partition(".")[0]


def new_seed(ids: IdSource) -> int:
    """Return a sampling seed in [0, 2**63)."""
    return ids.bits(63)
