"""How much KV one attention type keeps, and which layers share a block table.

A spec says how many bytes a block of one layer takes, which sizes the pool, and how many blocks one request can hold at most,
which caps admission: were that too low, a prefill could run out of blocks half-way. Knows no tensors. Built by
``core.engine`` from the model's configuration. A new attention type is a subclass here and a manager in
``core.kv.single_type``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


@dataclass(slots=True, frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """Shape of the KV of one layer. ``block_size`` in tokens, ``dtype_bytes`` per element."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        """Raises: ValueError for a size below 1."""
        for name in ("block_size", "num_kv_heads", "head_dim", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @abstractmethod
    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most blocks one request really holds at a time.

        ``max_in_flight_tokens`` are scheduled but not yet processed: blocks are dropped only behind them.
        """


@dataclass(slots=True, frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it: a request keeps every block until it ends."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks of ``max_model_len`` tokens; tokens in flight are among them."""
        return ceil_div(max_model_len, self.block_size)


@dataclass(slots=True, frozen=True)
class KVCacheGroup:
    """Layers with one spec and one block table per request."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers of the group, which lie side by side."""
        return len(self.layer_indices) * self.spec.page_size_bytes


@dataclass(slots=True, frozen=True)
class KVCacheConfig:
    """One pool of ``num_blocks`` blocks (the null block included) shared by all groups."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        """Raises: ValueError for a pool without a usable block or without a group."""
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), not {self.num_blocks}")
        if not self.groups:
            raise ValueError("a KV cache needs at least one group of layers")
