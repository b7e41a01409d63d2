"""How much KV one attention type keeps, and which layers share a block table.

A spec gives the bytes of a block of one layer, the number of leading tokens of a sequence that are not needed any more, and
the most blocks that one request holds. That last number is the only bound: it sizes the pool at start-up and caps admission at
run time. With two different bounds a prompt that fits could wait forever, or a prefill could lack blocks half-way. Knows no
tensors. A new attention type is a subclass here and a manager in ``core.kv.single_type``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide and round up."""
    return -(-numerator // denominator)


@dataclass(slots=True, frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """Shape of the KV of one layer. ``block_size`` in tokens, ``dtype_bytes`` per element.

    A type that ``recycles`` frees blocks while a request runs, so that a request holds fewer blocks than its tokens fill.
    """

    recycles: ClassVar[bool] = False

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        """Raises: ValueError for a size below 1."""
        self._check_positive("block_size", "num_kv_heads", "head_dim", "dtype_bytes")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Return how many leading tokens no token after the first ``num_computed_tokens`` attends to. Never falls."""
        return 0

    @abstractmethod
    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks that one request holds at a time.

        ``max_in_flight_tokens`` are scheduled but not yet processed; the blocks that they attend to are not dropped.
        """

    def max_memory_usage_bytes(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Most bytes of one layer that one request really holds at a time."""
        return self.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) * self.page_size_bytes


@dataclass(slots=True, frozen=True, kw_only=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token attends to all before it: a request keeps every block until it ends."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Blocks of ``max_model_len`` tokens; tokens in flight are among them."""
        return ceil_div(max_model_len, self.block_size)


@dataclass(slots=True, frozen=True, kw_only=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token attends to itself and the ``sliding_window - 1`` tokens before it."""

    recycles: ClassVar[bool] = True

    sliding_window: int

    def __post_init__(self) -> None:
        """Raises: ValueError for a size below 1."""
        KVCacheSpec.__post_init__(self)
        self._check_positive("sliding_window")

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last ``sliding_window - 1`` of them."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the blocks of a window and of the tokens in flight after it.

        One more, because a window need not start where a block does:

            blocks  |   :   |       |       |   :   |
                        `-- W - 1 --`-- in flight --'
        """
        num_tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return ceil_div(num_tokens, self.block_size) + 1


@dataclass(slots=True, frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A token attends to itself and the tokens before it in its own chunk of ``attention_chunk_size``."""

    recycles: ClassVar[bool] = True

    attention_chunk_size: int

    def __post_init__(self) -> None:
        """Raises: ValueError for a size below 1, and for chunks that do not start where a block does."""
        KVCacheSpec.__post_init__(self)
        self._check_positive("attention_chunk_size")
        if self.attention_chunk_size % self.block_size:
            raise ValueError(
                f"attention_chunk_size {self.attention_chunk_size} is not a multiple of block_size {self.block_size}"
            )

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All before the chunk of the next token."""
        return num_computed_tokens - num_computed_tokens % self.attention_chunk_size

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the blocks of a chunk and of the tokens in flight after it; a chunk starts at a block, so no extra one."""
        num_tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        return ceil_div(num_tokens, self.block_size)


@dataclass(slots=True, frozen=True)
class KVCacheGroup:
    """Layers with one spec and one block table per request. Layer ``layer_indices[i]`` of the model has slot i in a block."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(slots=True, frozen=True, kw_only=True)
class KVCacheSizes:
    """Token counts that all parts of one KV cache are built with. They are passed down unchanged and never recomputed.

    Prefix hits end at multiples of ``scheduler_block_size``; the hash chain has one value per ``hash_block_size``.
    ``max_in_flight_tokens`` bounds the tokens scheduled but not yet processed, over all concurrent steps.
    """

    scheduler_block_size: int
    hash_block_size: int
    max_in_flight_tokens: int
    max_model_len: int


@dataclass(slots=True, frozen=True)
class KVCacheConfig:
    """One pool of ``num_blocks`` blocks (the null block included) shared by all groups: any block may serve any group."""

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        """Raises: ValueError for a pool without a usable block or without a group."""
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (block 0 is the null block), not {self.num_blocks}")
        if not self.groups:
            raise ValueError("a KV cache needs at least one group of layers")

    @property
    def layers_per_group(self) -> int:
        """Slots of a block: layers of the largest group. In a smaller one the last slots are padding."""
        return max(len(group.layer_indices) for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the pages of all its slots, side by side."""
        return self.layers_per_group * max(group.spec.page_size_bytes for group in self.groups)

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each group by the model's numbers, in the order of their slots."""
        return tuple(group.layer_indices for group in self.groups)

    def num_blocks_of_sequence(self, num_tokens: int, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the most blocks, over all groups, that a sequence of ``num_tokens`` tokens really holds at a time."""
        num_blocks = 0
        for group in self.groups:
            bound = group.spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
            num_blocks += min(ceil_div(num_tokens, group.spec.block_size), bound)
        return num_blocks

    def max_tokens_of_sequence(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Return the longest sequence, ``max_model_len`` at most, that can run if it is alone. The bound of admission."""
        lengths = range(1, max_model_len + 1)
        return bisect_right(
            lengths,
            self.num_blocks - 1,
            key=lambda num_tokens: self.num_blocks_of_sequence(num_tokens, max_in_flight_tokens, max_model_len),
        )
