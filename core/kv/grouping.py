"""Which layers of a model share a KV cache group.

A group has one block table per request, so its layers must keep the same tokens: equal specs. All groups share one pool, so
their blocks must have the same bytes: equal page sizes, and the same number of slots.

    Gemma 3 270m, 18 layers, every sixth one full, hence 3 slots (layers of slots 0, 1, 2):
        sliding   group 0  0  1  2,  group 1  3  4  6,  ...  group 5  13 15 16
        full      group 2  5 11 17

Knows neither models nor memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.kv.spec import KVCacheGroup, KVCacheSpec


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Group a model's layers, given the spec of each; the groups are in the order in which their first layers are.

    Raises: ValueError if there is no layer, or block sizes or page sizes differ.
    """
    if not specs:
        raise ValueError("a KV cache needs at least one layer")
    for what in ("block_size", "page_size_bytes"):
        values = {getattr(spec, what) for spec in specs}
        if len(values) > 1:
            raise ValueError(f"layers that share a KV pool differ in {what}: {sorted(values)}")
    layers_of: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_of.setdefault(spec, []).append(layer)
    size = _choose_group_size([len(layers) for layers in layers_of.values()])
    groups = [
        KVCacheGroup(tuple(layers[start : start + size]), spec)
        for spec, layers in layers_of.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layer_indices[0]))


def _choose_group_size(counts: Sequence[int]) -> int:
    """Return the number of slots of a block, given the number of layers of each spec.

    Chooses the number that leaves the fewest slots empty, and the smallest of these: the number of layers of the rarest spec,
    if it divides the others. Smaller numbers are not considered: they would add tables without saving memory.
    """
    return min(range(min(counts), max(counts) + 1), key=lambda size: sum(-count % size for count in counts))
