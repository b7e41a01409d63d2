"""Builders for KV cache tests: a hasher, managers of any size, and real requests."""

from collections.abc import Callable, Sequence

import pytest

from core.constants import HASH_BLOCK_SIZE
from core.kv.hashing import BlockHasher
from core.kv.manager import KVCacheManager
from core.kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from core.request import NewRequest, Request
from core.wire.sampling import SamplingParams


@pytest.fixture(scope="session")
def hasher() -> BlockHasher:
    return BlockHasher(b"test model")


@pytest.fixture(scope="session")
def make_spec() -> Callable[[int], FullAttentionSpec]:
    def make(block_size: int = HASH_BLOCK_SIZE) -> FullAttentionSpec:
        return FullAttentionSpec(block_size=block_size, num_kv_heads=3, head_dim=64, dtype_bytes=4)

    return make


@pytest.fixture(scope="session")
def make_config(make_spec) -> Callable[..., KVCacheConfig]:
    def make(num_blocks: int = 11, block_sizes: Sequence[int] = (16,)) -> KVCacheConfig:
        groups = tuple(KVCacheGroup((index,), make_spec(size)) for index, size in enumerate(block_sizes))
        return KVCacheConfig(num_blocks, groups)

    return make


@pytest.fixture(scope="session")
def make_manager(make_config) -> Callable[..., KVCacheManager]:
    """``make_manager(num_blocks=11, block_size=16, max_model_len=1024, **options)``; 11 blocks = 10 usable ones."""

    def make(num_blocks: int = 11, block_size: int = 16, max_model_len: int = 1024, **options) -> KVCacheManager:
        config = make_config(num_blocks, (block_size,))
        return KVCacheManager(config, max_model_len, block_size, HASH_BLOCK_SIZE, **options)

    return make


@pytest.fixture(scope="session")
def make_request(hasher) -> Callable[..., Request]:
    def make(request_id: str, token_ids: Sequence[int], cache_salt: str = "") -> Request:
        sampling = SamplingParams(max_tokens=1000)
        new = NewRequest(request_id=request_id, prompt_token_ids=token_ids, sampling=sampling, cache_salt=cache_salt)
        return Request(new, hasher)

    return make
