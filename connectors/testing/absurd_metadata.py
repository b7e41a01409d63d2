"""Transport metadata that decodes and is absurd, made from valid metadata.

Knows msgpack and no transport.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


def with_each_replaced(metadata: bytes, absurd: object) -> Iterator[bytes]:
    """Yield msgpack with one value replaced that has the type of ``absurd``, for each such value."""
    tree = msgspec.msgpack.decode(metadata)
    for path in list(_leaves(tree, type(absurd))):
        changed = msgspec.msgpack.decode(metadata)
        parent = changed
        for step in path[:-1]:
            parent = parent[step]
        parent[path[-1]] = absurd
        yield msgspec.msgpack.encode(changed)


def _leaves(tree: Any, kind: type) -> Iterator[list[Any]]:  # noqa: ANN401 - decoded msgpack
    """Yield the path of every value of a type."""
    for step, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from ([step, *path] for path in _leaves(value, kind))
        elif type(value) is kind:
            yield [step]
